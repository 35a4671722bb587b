"""The paths that a middleware applies to."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_SLASHES = re.compile("/{2,}")
_FIELD = re.compile(r"\{[A-Za-z_]\w*(:\w+)?\}")


def compile_routes(routes: Collection[str]) -> re.Pattern[str]:
    """Compile patterns into an expression that must match a whole path.

    A pattern is a path such as `/payments`. `{name}` matches one segment or a part of it, `{name:path}` matches any number of
    segments, and a `*` at the end matches any text.

    Raises:
        TypeError: `routes` is a single str, or one of the patterns is not a str.
        ValueError: there are no patterns, or a pattern could never match or would take too long to match.
    """
    if isinstance(routes, str):
        raise TypeError(f"routes must be a collection of patterns: pass routes=[{routes!r}]")
    if not routes:
        raise ValueError("routes=[] would apply to no request; pass None for all paths")
    # Frameworks treat paths as equal if they differ only by a trailing slash, or by a trailing line feed, because `$` also
    # matches before a line feed.
    return re.compile(f"(?:{'|'.join(_compile_route(route) for route in routes)})/?\n?", re.DOTALL)


def matches(routes: re.Pattern[str], path: str) -> bool:
    """Return whether a path matches the routes. A framework may collapse slashes, or accept a path without the first slash."""
    return any(routes.fullmatch(read) for read in (path, _SLASHES.sub("/", f"/{path}")))


def _compile_route(route: str) -> str:
    if not isinstance(route, str):
        raise TypeError(f"a route must be a str, not {type(route).__name__}")
    stem = _SLASHES.sub("/", route.removesuffix("*"))
    if not route.endswith("*"):
        stem = stem.removesuffix("/")
    pattern, at = "", 0
    for field in _FIELD.finditer(stem):
        pattern += re.escape(stem[at : field.start()]) + (".*" if field[1] == ":path" else "[^/]+")
        at = field.end()
    literal = _FIELD.sub("", stem)
    if not route.startswith("/") or any(character in literal for character in "{}<>*?"):
        raise ValueError(
            f"{route!r} is not a route: a route is a path that begins with a slash and has no query. Write {{name}} for a part"
            " that varies; * is allowed only at the end"
        )
    if stem.count(":path}") > 1 or any(len(_FIELD.findall(segment)) > 1 for segment in stem.split("/")):
        raise ValueError(
            f"{route!r} is not a route: a route may have at most one field in each segment, and at most one {{name:path}}"
        )
    return pattern + re.escape(stem[at:]) + (".*" if route.endswith("*") else "")
