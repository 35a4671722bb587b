"""Draw curves and bars as SVG with the standard library, from a description that the results keep as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# As wide as a phone can show with legible text; one panel below the other.
WIDTH, HEIGHT, LEFT, TOP, GAP = 390, 150, 50, 34, 44
LEGEND = 20
ROW, LONGEST = 40, 380
LINES = 4
# The classes have other colours in dark mode. An image takes the scheme of the page around it.
_STYLE = """<style>
text { font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.grid { stroke: #d0d7de; fill: none }
.line { fill: none; stroke-width: 2 }
.line1 { stroke-dasharray: 7 4 } .line2 { stroke-dasharray: 2 4 } .line3 { stroke-dasharray: 9 3 2 3 }
.line0 { stroke: #1f5fa8 } .line1 { stroke: #c2571a } .line2 { stroke: #4b7f3c } .line3 { stroke: #7a4b9a }
.dot0 { fill: #1f5fa8 } .dot1 { fill: #c2571a } .dot2 { fill: #4b7f3c } .dot3 { fill: #7a4b9a }
.ours { fill: #1f5fa8 } .others { fill: #b9bec6 } .cut { fill: #ffffff }
@media (prefers-color-scheme: dark) {
text { fill: #e6e6e6 }
.grid { stroke: #444c56 }
.line0 { stroke: #6cb0ff } .line1 { stroke: #ff9c5b } .line2 { stroke: #8fd07c } .line3 { stroke: #c99df0 }
.dot0 { fill: #6cb0ff } .dot1 { fill: #ff9c5b } .dot2 { fill: #8fd07c } .dot3 { fill: #c99df0 }
.ours { fill: #4f93d8 } .others { fill: #6e7681 } .cut { fill: #131416 }
}
</style>"""
_CUT = '<path class="cut" d="M{0:.1f} {1}l6 22h5l-6 -22z"/>'


def curves(
    name: str, across: str, places: Sequence[int], panels: Mapping[str, Mapping[str, Sequence[float]]]
) -> dict[str, Any]:
    """Describe panels one below the other, with one legend.

    Args:
        name: the name of the file.
        across: the label of the horizontal axis.
        places: the values on the horizontal axis, evenly spaced.
        panels: by title, which is the label of the vertical axis: the values of each curve, by name. At least one panel. Each
            panel has its own scale.
    """
    described = {title: {line: list(values) for line, values in lines.items()} for title, lines in panels.items()}
    return {"name": name, "kind": "curves", "across": across, "places": list(places), "panels": described}


def bars(name: str, title: str, values: Mapping[str, float], unit: str = "x") -> dict[str, Any]:
    """Describe one bar for each value, the shortest first. Those of pgfence have their own colour."""
    return {"name": name, "kind": "bars", "title": title, "values": dict(values), "unit": unit}


def draw(described: Mapping[str, Any]) -> str:
    """Return a picture as SVG."""
    return _draw_curves(described) if described["kind"] == "curves" else _draw_bars(described)


def _draw_curves(described: Mapping[str, Any]) -> str:
    panels: Mapping[str, Mapping[str, Sequence[float]]] = described["panels"]
    names = list(next(iter(panels.values())))
    first = LEGEND * len(names)
    height = first + len(panels) * (TOP + HEIGHT + GAP)
    parts = _start(LEFT + WIDTH + 20, height)
    for number, name in enumerate(names):
        y = LEGEND * number + 12
        parts += [_stroke(number, f"M{LEFT} {y}H{LEFT + 28}"), _text(LEFT + 36, y + 4, name, "start")]
    for number, (title, lines) in enumerate(panels.items()):
        top = first + number * (TOP + HEIGHT + GAP) + TOP
        parts += _panel(top, title, lines, described["places"])
        parts.append(_text(LEFT + WIDTH, top + HEIGHT + 34, described["across"], "end"))
    parts += ["</svg>", ""]
    return "\n".join(parts)


def _panel(top: int, title: str, lines: Mapping[str, Sequence[float]], places: Sequence[int]) -> list[str]:
    highest, foot = _ceiling(max(max(values) for values in lines.values())), top + HEIGHT
    parts = [_text(LEFT, top - 12, title, "start")]
    for step in range(5):
        y = foot - HEIGHT * step / 4
        parts += [
            f'<path class="grid" d="M{LEFT} {y:g}H{LEFT + WIDTH}"/>',
            _text(LEFT - 6, y + 4, f"{highest * step / 4:g}", "end"),
        ]
    x = [LEFT + WIDTH * (number + 0.5) / len(places) for number in range(len(places))]
    # There is room for at most ten labels.
    for at, place in list(zip(x, places, strict=True))[:: -(-len(places) // 10)]:
        parts.append(_text(at, foot + 18, f"{place:,}", "middle"))
    for number, values in enumerate(lines.values()):
        points = [(at, foot - HEIGHT * value / highest) for at, value in zip(x, values, strict=True)]
        parts.append(_stroke(number, "M" + "L".join(f"{at:.1f} {y:.1f}" for at, y in points)))
        parts += [f'<circle class="dot{number % LINES}" cx="{at:.1f}" cy="{y:.1f}" r="3"/>' for at, y in points]
    return parts


def _draw_bars(described: Mapping[str, Any]) -> str:
    values = sorted(described["values"].items(), key=lambda each: each[1])
    # A bar far longer than the others would hide their differences, so it is cut and labelled with its number.
    top = min(values[-1][1], 3 * values[len(values) // 2][1])
    parts = [*_start(LONGEST + 80, 40 + ROW * len(values)), _text(0, 16, described["title"], "start")]
    for number, (name, value) in enumerate(values):
        y = 34 + ROW * number
        length = LONGEST * min(value, top) / top
        kind = "ours" if name.startswith("pgfence") else "others"
        parts += [
            _text(0, y + 12, name, "start"),
            f'<rect class="{kind}" x="0" y="{y + 18}" width="{length:.1f}" height="14"/>',
            *([_CUT.format(length - 16, y + 14)] if value > top else ()),
            _text(length + 6, y + 29, f"{value:.2f}{described['unit']}", "start"),
        ]
    return "\n".join([*parts, "</svg>", ""])


def _start(width: int, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img">',
        _STYLE,
    ]


def _stroke(number: int, path: str) -> str:
    return f'<path class="line line{number % LINES}" d="{path}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def _ceiling(value: float) -> float:
    """Return a round number that is not less than a value."""
    scale = 1.0
    while scale * 10 < value:
        scale *= 10
    return next(scale * step for step in (1, 2, 4, 6, 8, 10) if scale * step >= value)
