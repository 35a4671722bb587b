"""Errors in the place of a result: what is recorded can be raised again."""

from __future__ import annotations

from typing import Any, Self

import pytest
from pydantic import BaseModel, ValidationError

from pgfence._values import errors
from pgfence._values.codec import Codec
from pgfence.errors import IdempotencyMisuseError
from support.rows import every_row


class Request(BaseModel):
    """What can be wrong."""

    amount: int


class Declined(Exception):
    """One whose `__new__` takes other arguments than it passes on."""

    def __new__(cls, code: int, message: str) -> Self:
        """Pass the text on."""
        return super().__new__(cls, message)

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Picky(Exception):
    """One whose `__new__` makes something else."""

    def __new__(cls, *args: Any) -> Any:
        """Return nothing of the kind."""
        return Exception.__new__(cls) if args == ("first",) else ValueError()


CODEC = Codec.of(None)


def again(error: Exception) -> Exception:
    """Record an error and read it."""
    return errors.decode(errors.encode(error, CODEC), (Exception,), CODEC, "the key")


@every_row("error", [Declined(7, "no"), KeyError("a"), FileNotFoundError(2, "gone"), Picky("first")])
def test_an_error_comes_back_as_its_class_whatever_that_takes(error: Exception) -> None:
    """C101: with its arguments and attributes, also where its `__new__` would not take them."""
    back = again(error)
    assert type(back) is type(error)
    assert back.args == error.args
    assert {**vars(back), "__notes__": None} == {**vars(error), "__notes__": None}


def test_an_error_that_could_not_be_raised_again_is_not_recorded() -> None:
    """C101: the first caller gets that error, so later callers never get another one instead."""
    with pytest.raises(ValidationError) as caught:
        Request.model_validate({"amount": "x"})
    with pytest.raises(IdempotencyMisuseError, match="ValidationError cannot be recreated from its args"):
        errors.encode(caught.value, CODEC)
