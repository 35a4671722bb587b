"""Translate the four errors with which drivers and the server report text that cannot be encoded into one error."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pgfence._sql.sqlstate import sqlstate_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from pgfence._sql.params import RawConnection

UNTRANSLATABLE = "22P05"
BAD_BYTES = "22021"
UNSUPPORTED = "0A000"
_SHOWN = 40
# These patterns are compiled when they are used, like those of `errors`.
_BYTE = r"0x([0-9a-f]{2})"
_ESCAPES = r"(?:\\u[0-9a-f]{4})+"


class TextError(ValueError):
    """A text in a statement cannot be encoded for this connection, so the statement was not executed."""


def text_error(error: BaseException, values: object, driver: Callable[[], object]) -> TextError | None:
    """Return the error for a statement with text that cannot be encoded, or None if `error` has another cause.

    `driver` returns the driver's own connection, which knows the encodings. It is called only for an encoding error, because
    SQLAlchemy would replace a lost connection.
    """
    codec, state = _find_encode_error(error), sqlstate_of(error)
    shown: str | None
    if codec is not None:
        shown = codec.object[max(0, codec.start - _SHOWN // 2) : codec.end + _SHOWN // 2]
        if any("\ud800" <= letter <= "\udfff" for letter in codec.object[codec.start : codec.end]):
            return TextError(f"{_cut(shown)} must be valid Unicode, but it contains a lone surrogate")
    elif state in (UNTRANSLATABLE, BAD_BYTES) or (state == UNSUPPORTED and "SQL_ASCII" in str(error)):
        shown = _find_culprit(str(error), list(_iterate_texts(values)))
    else:
        return None
    server, client = _read_setting(driver(), "server_encoding"), _read_setting(driver(), "client_encoding")
    if codec is not None and server == "UTF8":
        return TextError(f"{_cut(shown)} cannot be sent in client_encoding {client}: set client_encoding to UTF8")
    return TextError(
        f"{_cut(shown)} cannot be represented in the encoding of this database, {server}: use other characters, or a database"
        " with the encoding UTF8"
    )


@contextmanager
def translate_text_errors(connection: Connection, values: object) -> Iterator[None]:
    """In the block, translate the error of a statement whose text cannot be encoded."""
    try:
        yield
    except Exception as error:
        if told := text_error(error, values, lambda: connection.connection.driver_connection):
            raise told from error
        raise


def _find_encode_error(error: BaseException | None) -> UnicodeEncodeError | None:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, UnicodeEncodeError):
            return error
        error = getattr(error, "orig", None) or error.__cause__
    return None


def _iterate_texts(values: object) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _iterate_texts(value)


def _find_culprit(said: str, texts: list[str]) -> str | None:
    """Return an excerpt of the text that the server rejected, or None if no text of the statement explains the error."""
    # In every language, the server's message contains the bytes of one character in UTF-8.
    letter = bytes(int(byte, 16) for byte in re.findall(_BYTE, said)).decode(errors="ignore")[:1]
    forms = (letter, json.dumps(letter)[1:-1]) if letter else ()
    for text in texts:
        for form in forms:
            if form in text:
                at = text.index(form)
                return text[max(0, at - _SHOWN // 2) : at + len(form) + _SHOWN // 2]
    return next((text for text in texts if not text.isascii() or "\\u" in text), None)


def _cut(text: str | None) -> str:
    if text is None:
        return "a text in this statement"
    plain = re.sub(_ESCAPES, lambda found: str(json.loads(f'"{found[0]}"')), text)
    return repr(plain if len(plain) <= _SHOWN * 2 else f"{plain[: _SHOWN * 2]}...")


def _read_setting(driver: RawConnection, name: str) -> str:
    settings = driver.get_settings() if hasattr(driver, "get_settings") else None
    found = getattr(settings, name, None) if settings is not None else driver.info.parameter_status(name)
    return found or "unknown"
