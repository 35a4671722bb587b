"""Curves as SVG, drawn with the standard library alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP, GAP = 320, 200, 60, 60, 70
COLOURS = ("#1f5fa8", "#c2571a", "#4b7f3c", "#7a4b9a")
DASHES = ("", ' stroke-dasharray="7 4"', ' stroke-dasharray="2 4"', ' stroke-dasharray="9 3 2 3"')


class Panel(NamedTuple):
    """One diagram.

    Attributes:
        title: above it; says what the vertical axis shows.
        lines: by name, a value for each place on the axis.
    """

    title: str
    lines: Mapping[str, Sequence[float]]


def draw(across: str, places: Sequence[int], panels: Sequence[Panel]) -> str:
    """Return panels side by side as SVG, with one legend.

    Args:
        across: what the horizontal axis shows.
        places: the values on the horizontal axis, evenly spaced.
        panels: at least one; each has a scale of its own.
    """
    width = LEFT + len(panels) * (WIDTH + GAP)
    height = TOP + HEIGHT + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for number, name in enumerate(panels[0].lines):
        x = LEFT + number * 190
        parts += [_stroke(number, f"M{x} 16H{x + 28}"), _text(x + 34, 20, name, "start")]
    for number, panel in enumerate(panels):
        parts += _panel(LEFT + number * (WIDTH + GAP), panel, places)
    parts += [_text(width - GAP, height - 8, across, "end"), "</svg>", ""]
    return "\n".join(parts)


def _panel(left: int, panel: Panel, places: Sequence[int]) -> list[str]:
    top = _ceiling(max(max(values) for values in panel.lines.values()))
    parts = [_text(left + WIDTH / 2, TOP - 12, panel.title, "middle")]
    for step in range(5):
        y = TOP + HEIGHT - HEIGHT * step / 4
        parts += [
            f'<path d="M{left} {y:g}H{left + WIDTH}" stroke="#d0d0d0" fill="none"/>',
            _text(left - 6, y + 4, f"{top * step / 4:g}", "end"),
        ]
    x = [left + WIDTH * (number + 0.5) / len(places) for number in range(len(places))]
    parts += [_text(at, TOP + HEIGHT + 18, str(place), "middle") for at, place in zip(x, places, strict=True)]
    for number, values in enumerate(panel.lines.values()):
        points = [(at, TOP + HEIGHT - HEIGHT * value / top) for at, value in zip(x, values, strict=True)]
        parts.append(_stroke(number, "M" + "L".join(f"{at:.1f} {y:.1f}" for at, y in points)))
        parts += [f'<circle cx="{at:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[number]}"/>' for at, y in points]
    return parts


def _stroke(number: int, path: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"{DASHES[number]}/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#202020">{escape(text)}</text>'


def _ceiling(value: float) -> float:
    """Return a round number that is not below a value."""
    scale = 1.0
    while scale * 10 < value:
        scale *= 10
    return next(scale * step for step in (1, 2, 4, 6, 8, 10) if scale * step >= value)
