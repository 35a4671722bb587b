"""Which paths a middleware is for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

_FIELD = re.compile(r"\{[A-Za-z_]\w*(:\w+)?\}")


def routes_of(routes: Collection[str]) -> re.Pattern[str]:
    """Return what the whole of a path has to match.

    A pattern is a path: `/payments`. `{name}` stands for one segment or a part of it, `{name:path}` for one or more
    segments, and a `*` at the end for anything.

    Raises:
        TypeError: it is one str, or there is something else among them.
        ValueError: there is none, or one that could never match.
    """
    if isinstance(routes, str):
        raise TypeError(f"routes takes several patterns: routes=[{routes!r}]")
    if not routes:
        raise ValueError("routes=[] is for no request at all; None is for all of them")
    return re.compile("|".join(_pattern(route) for route in routes), re.DOTALL)


def _pattern(route: str) -> str:
    if not isinstance(route, str):
        raise TypeError(f"a route is a str, not {type(route).__name__}")
    stem = route.removesuffix("*")
    pattern, at = "", 0
    for field in _FIELD.finditer(stem):
        pattern += re.escape(stem[at : field.start()]) + (".+" if field[1] == ":path" else "[^/]+")
        at = field.end()
    literal = _FIELD.sub("", stem)
    if not route.startswith("/") or any(character in literal for character in "{}<>*?"):
        raise ValueError(
            f"{route!r} is no route: it is a path from its first slash on, with {{name}} for a segment, and * only at the end"
        )
    return pattern + re.escape(stem[at:]) + (".*" if stem != route else "")
