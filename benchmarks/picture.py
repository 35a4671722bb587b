"""Curves and bars as SVG, drawn with the standard library alone from a description that the results keep as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WIDTH, HEIGHT, LEFT, TOP, GAP = 320, 200, 60, 60, 70
COLOURS = ("#1f5fa8", "#c2571a", "#4b7f3c", "#7a4b9a")
DASHES = ("", ' stroke-dasharray="7 4"', ' stroke-dasharray="2 4"', ' stroke-dasharray="9 3 2 3"')
LEGEND = 190
LABELS, ROW, LONGEST = 330, 24, 380
OURS, OTHERS = "#1f5fa8", "#b9bec6"
_CUT = '<path d="M{0:.1f} {1}l6 24h5l-6 -24z" fill="#ffffff"/>'


def curves(
    name: str, across: str, places: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float]]]
) -> dict[str, Any]:
    """Describe panels side by side, with one legend.

    Args:
        name: of the file.
        across: what the horizontal axis shows.
        places: the values on the horizontal axis, evenly spaced.
        panels: by title, which says what the vertical axis shows: by name, a value for each place. At least one panel; each
            has a scale of its own.
    """
    described = {title: {line: list(values) for line, values in lines.items()} for title, lines in panels.items()}
    return {"name": name, "kind": "curves", "across": across, "places": list(places), "panels": described}


def bars(name: str, title: str, values: Mapping[str, float], unit: str = "x") -> dict[str, Any]:
    """Describe a bar for each value, the shortest first; those of pgfence have a colour of their own."""
    return {"name": name, "kind": "bars", "title": title, "values": dict(values), "unit": unit}


def draw(described: Mapping[str, Any]) -> str:
    """Return a picture as SVG."""
    return _draw_curves(described) if described["kind"] == "curves" else _draw_bars(described)


def _draw_curves(described: Mapping[str, Any]) -> str:
    panels: Mapping[str, Mapping[str, Sequence[float]]] = described["panels"]
    names = list(next(iter(panels.values())))
    width = LEFT + max(len(panels) * (WIDTH + GAP), len(names) * LEGEND)
    height = TOP + HEIGHT + 50
    parts = _start(width, height)
    for number, name in enumerate(names):
        x = LEFT + number * LEGEND
        parts += [_stroke(number, f"M{x} 16H{x + 28}"), _text(x + 34, 20, name, "start")]
    for number, (title, lines) in enumerate(panels.items()):
        parts += _panel(LEFT + number * (WIDTH + GAP), title, lines, described["places"])
    parts += [_text(LEFT + len(panels) * (WIDTH + GAP) - GAP, height - 8, described["across"], "end"), "</svg>", ""]
    return "\n".join(parts)


def _panel(left: int, title: str, lines: Mapping[str, Sequence[float]], places: Sequence[int]) -> list[str]:
    top = _ceiling(max(max(values) for values in lines.values()))
    parts = [_text(left + WIDTH / 2, TOP - 12, title, "middle")]
    for step in range(5):
        y = TOP + HEIGHT - HEIGHT * step / 4
        parts += [
            f'<path d="M{left} {y:g}H{left + WIDTH}" stroke="#d0d0d0" fill="none"/>',
            _text(left - 6, y + 4, f"{top * step / 4:g}", "end"),
        ]
    x = [left + WIDTH * (number + 0.5) / len(places) for number in range(len(places))]
    # Ten labels at most have room.
    for at, place in list(zip(x, places, strict=True))[:: -(-len(places) // 10)]:
        parts.append(_text(at, TOP + HEIGHT + 18, f"{place:,}", "middle"))
    for number, values in enumerate(lines.values()):
        points = [(at, TOP + HEIGHT - HEIGHT * value / top) for at, value in zip(x, values, strict=True)]
        parts.append(_stroke(number, "M" + "L".join(f"{at:.1f} {y:.1f}" for at, y in points)))
        parts += [f'<circle cx="{at:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[number]}"/>' for at, y in points]
    return parts


def _draw_bars(described: Mapping[str, Any]) -> str:
    values = sorted(described["values"].items(), key=lambda each: each[1])
    # A bar far beyond the others would leave no room for their differences: it is cut, and its number says so.
    top = min(values[-1][1], 3 * values[len(values) // 2][1])
    width, height = LABELS + LONGEST + 80, 40 + ROW * len(values) + 8
    parts = [*_start(width, height), _text(12, 22, described["title"], "start")]
    for number, (name, value) in enumerate(values):
        y = 40 + ROW * number
        length = LONGEST * min(value, top) / top
        colour = OURS if name.startswith("pgfence") else OTHERS
        parts += [
            _text(LABELS - 8, y + 15, name, "end"),
            f'<rect x="{LABELS}" y="{y + 2}" width="{length:.1f}" height="{ROW - 6}" fill="{colour}"/>',
            *([_CUT.format(LABELS + length - 16, y)] if value > top else ()),
            _text(LABELS + length + 6, y + 15, f"{value:.2f}{described['unit']}", "start"),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _start(width: int, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        "<style>text { font: 12px sans-serif }</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]


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
