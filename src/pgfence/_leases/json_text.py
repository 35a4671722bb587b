"""Convert checkpoints and metadata to the text of a jsonb column, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgfence.types import Json


def decode_json(text: str | None) -> Json:
    found: Json = None if text is None else json.loads(text)
    return found


def encode_json(value: object, what: str) -> str | None:
    """Return a value as JSON that PostgreSQL accepts.

    Raises:
        TypeError: the value cannot be represented as JSON.
        ValueError: the value contains NaN, infinity, NUL or a lone surrogate.
    """
    if value is None:
        return None
    try:
        text = json.dumps(value, allow_nan=False)
    except TypeError as error:
        raise TypeError(f"{what} must be JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{what} must be JSON: {error}") from None
    if "\\u0000" in text.replace("\\\\", ""):  # without escaped backslashes, as in the text r"\u0000"
        raise ValueError(f"{what} must not contain NUL: PostgreSQL's jsonb cannot hold it")
    # json.dumps escapes a lone surrogate, which jsonb rejects. The full check is expensive, so it is done only for texts that
    # contain such an escape.
    if "\\ud" in text:
        try:
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = error.object[max(0, error.start - 20) : error.end + 20]
            raise ValueError(f"{what} must be valid Unicode, but it contains a lone surrogate: {found!r}") from None
    return text
