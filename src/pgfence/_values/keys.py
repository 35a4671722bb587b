"""What may be a key and a scope."""

from __future__ import annotations

import unicodedata

LONGEST = 255


def expect_key(value: object, what: str) -> str:
    """Return a key or a scope, if it is one.

    Args:
        value: what the caller, or a client, gave.
        what: it is called in messages.

    Raises:
        TypeError: it is no str.
        ValueError: it is empty or blank, has more than 255 characters, or one that is a control or half a surrogate pair.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if not value or value.isspace():
        raise ValueError(f"{what} must not be {'blank' if value else 'empty'}")
    if len(value) > LONGEST:
        raise ValueError(f"{what} must not be longer than {LONGEST} characters: {len(value)}")
    if not value.isprintable():
        for character in value:
            if unicodedata.category(character) in ("Cc", "Cs"):
                raise ValueError(f"{what} must not contain control characters: U+{ord(character):04X}")
    # A str enum or other subclass may format itself differently on each Python: only its plain text counts.
    return str.__str__(value)
