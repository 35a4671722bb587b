"""Calls of our server functions, as texts.

Every argument is cast, so that each driver's idea of a number, a list or nothing fits the function's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._sql.advisory import Style
    from pgfence._sql.storage import Place


def mark(style: Style, n: int) -> str:
    """Return the mark of the n-th parameter, from 1 on."""
    return f"${n}" if style == "numeric" else "%s"


def name_of(place: Place, what: str, style: Style) -> str:
    """Return the name of a table or function for a statement with parameters, where a per cent sign means something."""
    name = place.name(what)
    return name if style == "numeric" else name.replace("%", "%%")


def call(place: Place, style: Style, function: str, kinds: Sequence[str], start: int = 1) -> str:
    """Return a call with as many parameters as kinds, the first of them the `start`-th of the statement."""
    arguments = ", ".join(f"CAST({mark(style, n)} AS {kind})" for n, kind in enumerate(kinds, start))
    return f"{name_of(place, function, style)}({arguments})"
