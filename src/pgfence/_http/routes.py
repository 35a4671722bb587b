"""Which paths a middleware is for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_SLASHES = re.compile("/{2,}")
_FIELD = re.compile(r"\{[A-Za-z_]\w*(:\w+)?\}")


def compile_routes(routes: Collection[str]) -> re.Pattern[str]:
    """Return what the whole of a path has to match.

    A pattern is a path: `/payments`. `{name}` stands for one segment or a part of it, `{name:path}` for any number of
    segments, and a `*` at the end for anything.

    Raises:
        TypeError: it is one str, or there is something else among them.
        ValueError: there is none, or one that could never match, or that would take long to.
    """
    if isinstance(routes, str):
        raise TypeError(f"routes takes several patterns: routes=[{routes!r}]")
    if not routes:
        raise ValueError("routes=[] applies to no request; None applies to all paths")
    # Frameworks take paths for the same that differ by a slash at the end, or by a line feed, before which `$` matches too.
    return re.compile(f"(?:{'|'.join(_compile_route(route) for route in routes)})/?\n?", re.DOTALL)


def matches(routes: re.Pattern[str], path: str) -> bool:
    """Return whether a path is on one of the routes. A framework may take several slashes for one, and none at first too."""
    return any(routes.fullmatch(read) for read in (path, _SLASHES.sub("/", f"/{path}")))


def _compile_route(route: str) -> str:
    if not isinstance(route, str):
        raise TypeError(f"a route is a str, not {type(route).__name__}")
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
            f"{route!r} is no route: it is a path from its first slash on, with {{name}} for a segment, and * only at the end"
        )
    if stem.count(":path}") > 1 or any(len(_FIELD.findall(segment)) > 1 for segment in stem.split("/")):
        raise ValueError(f"{route!r} is no route: it may have one field in each segment, and one {{name:path}}")
    return pattern + re.escape(stem[at:]) + (".*" if route.endswith("*") else "")
