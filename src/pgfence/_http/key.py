"""The header `Idempotency-Key`: a string of a structured field (RFC 9651), and the bare form in which many clients send it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pgfence._http.problems import KEY_INVALID, KEY_MISSING, KEY_REPEATED
from pgfence._values.keys import LONGEST, expect_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._http.problems import Problem

_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
# Visible ASCII without what makes a list, a parameter or a quotation of it: servers join repeated headers by a comma.
_BARE = re.compile(r"[!#-+\--:<-\[\]-~]+")


class UnusableKeyError(ValueError):
    """A request has no key that could be used.

    Attributes:
        problem: what is wrong; the message is for the client.
    """

    def __init__(self, problem: Problem, detail: str | None = None) -> None:
        super().__init__(detail or problem.detail)
        self.problem = problem


def key_of(values: Sequence[str]) -> str:
    """Return the key that the headers of a request give: `"k1"` with its quotes and `k1` without are the same.

    Args:
        values: of each header of that name.

    Raises:
        UnusableKeyError: there is none or more than one, or it is not a key.
    """
    if len(values) != 1:
        raise UnusableKeyError(KEY_REPEATED if values else KEY_MISSING)
    value = values[0].strip(" \t")
    if len(value) > 2 * LONGEST + 2:
        raise UnusableKeyError(KEY_INVALID, f"The Idempotency-Key must not be longer than {LONGEST} characters.")
    if quoted := _QUOTED.fullmatch(value):
        value = re.sub(r'\\(["\\])', r"\1", quoted[1])
    elif not _BARE.fullmatch(value):
        raise UnusableKeyError(KEY_INVALID)
    try:
        return expect_key(value, "The Idempotency-Key")
    except ValueError as error:
        raise UnusableKeyError(KEY_INVALID, f"{error}.") from None
