"""The version of a row in HTTP, as an entity tag and in the If-Match header (RFC 9110, 8.8.3 and 13.1.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import quote

from pgfence.errors import VersionRequiredError

__all__ = ["Headers", "IfMatch", "etag", "if_match"]

_STAR = "*"
_WEAK = "W/"
# One element of a list, which may be empty, with what separates it from the next. The quantifiers are possessive, so a header of
# blanks alone takes time proportional to its length, not to its square.
_ELEMENT = re.compile(r'[ \t]*+(?P<tag>(?:W/)?"[\x21\x23-\x7e\x80-\xff]*+")?[ \t]*+(?P<end>,|\Z)')
_SHOWN = 60


class Headers(Protocol):
    """Headers of a request: Werkzeug's, Starlette's, or a plain dict."""

    def get(self, key: str, /) -> str | None:
        """Return the header with that name, or None."""


@dataclass(frozen=True, slots=True)
class IfMatch:
    """The requirement of an If-Match header: `*`, or one of several entity tags.

    Attributes:
        tags: the tags as written in the header, with quotes; `("*",)` for any version, and `()` for a list without a tag.
    """

    tags: tuple[str, ...]

    def matches(self, tag: str) -> bool:
        """Return whether the row with this tag may be changed, by the strong comparison, in which a weak tag matches nothing.

        `*` matches every row that exists.
        """
        return self == ANY or (tag in self.tags and not tag.startswith(_WEAK))

    def __str__(self) -> str:
        return ", ".join(self.tags)


ANY = IfMatch((_STAR,))
"""Any version of a row that exists."""


def etag(instance: object, /) -> str:
    """Return the version of a row as a strong entity tag for an ETag header, including the quotes, such as `"page-7"`.

    ::

        session.commit()
        return jsonify(title=page.title), {"ETag": etag(page)}

    Guarantees: all processes return the same tag for the same version of a row, and a subclass returns the same tag as its base
    class. Another version of the row has another tag; if the row was deleted and created again, this is guaranteed only with
    `VersionedUUID`.

    Limitations: the tag covers only this row. A response may also depend on other rows, or on the reader's permissions.

    Args:
        instance: an instance of a versioned class, with its changes flushed. An expired instance is loaded again, which an
            AsyncSession cannot do here, so use `expire_on_commit=False` with it.

    Raises:
        SchemaError: the version of the row is NULL. `command` contains the statements that fix it.
        ValueError: the row is not in the database yet, or has unflushed changes, so that its next version is not known.
        TypeError: the object is not an instance of a versioned class, or its class has `__version_mode__ = "xmin"`. An
            xmin does not survive a dump and restore of the database, but a client may still hold the tag.
    """
    from sqlalchemy import inspect
    from sqlalchemy.orm import InstanceState

    from pgfence.versions import _mapping

    state = inspect(instance, raiseerr=False)
    if not isinstance(state, InstanceState) or not _mapping.is_versioned(state.mapper):
        raise TypeError(
            f"etag() takes an instance of a class with Versioned or VersionedUUID, not {type(instance).__name__}"
        )
    name = state.class_.__name__
    if _mapping.mode_of(state.mapper) == "xmin":
        raise TypeError(
            f"the version of {name} is xmin, which does not survive a dump, so it cannot be an ETag: use the mode 'client' or"
            " 'server', which have a version column"
        )
    if state.key is None or (state.session is not None and state.session.is_modified(instance)):
        raise ValueError(f"this {name} is new, or has unflushed changes: call commit() first, then etag()")
    version = getattr(instance, _mapping.ATTRIBUTE)
    if version is None:
        from pgfence.versions._conflicts import missing_version_error

        raise missing_version_error(state.mapper, tuple(state.key[1]))
    return f'"{quote(_mapping.get_version_table(state.mapper).fullname, safe="")}-{version}"'


def if_match(headers: Headers, /) -> IfMatch:
    """Read the If-Match header of a request.

    Args:
        headers: the headers of Flask, FastAPI or Starlette, or a dict with `If-Match` or `if-match`. Several header lines form
            one list.

    Returns:
        The value to pass to `load_for_version` as `expected`.

    Raises:
        VersionRequiredError: there is no such header; respond with 428.
        ValueError: the header is not a list of entity tags, and the message shows the invalid part; respond with 400.
    """
    lines = _read_lines(headers)
    if not lines:
        raise VersionRequiredError(
            "the request has no version: read the row first and send its ETag in an If-Match header"
        )
    value = ", ".join(lines).strip(" \t")
    return ANY if value == _STAR else IfMatch(tuple(_parse_tags(value)))


def _read_lines(headers: Headers) -> list[str]:
    get_all = getattr(headers, "getlist", None)
    if get_all is not None:  # its get() may return only the first line
        return list(get_all("If-Match"))
    value = headers.get("If-Match")
    if value is None:
        value = headers.get("if-match")
    return [] if value is None else [value]


def _parse_tags(value: str) -> list[str]:
    found, place = [], 0
    while place < len(value):
        element = _ELEMENT.match(value, place)
        if element is None:
            raise ValueError(
                f"invalid entity tag at {value[place : place + _SHOWN]!r}: If-Match must be * or a list of tags in double quotes"
            )
        if element["tag"] is not None:
            found.append(element["tag"])
        place = element.end()
    return found
