"""Bars, tables, and where they are written."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rounds import NULL_TEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DOCS = Path(__file__).parent.parent / "docs"
PAGE, STATIC = DOCS / "benchmarks.md", DOCS / "_static"
_WRITTEN = re.compile(r"(?<=<!-- written by the benchmark -->\n).*(?=<!-- end -->)", re.DOTALL)


def bar(what: str, wanted: str, figure: float, limit: float, unit: str = "", *, digits: int = 2) -> dict[str, Any]:
    """Return a bar and whether it is met: the figure is at most the limit."""
    return {
        "what": what,
        "bar": wanted,
        "figure": f"{figure:.{digits}f}{unit}",
        "value": figure,
        "met": figure <= limit,
    }


def null_test(figure: float, base: str) -> dict[str, Any]:
    """Return what raw against raw says of a run."""
    low, high = NULL_TEST
    return {
        "what": f"null test: {base} against itself",
        "bar": f"{low:g} to {high:g}",
        "figure": f"{figure:.2f}",
        "value": figure,
        "met": low <= figure <= high,
    }


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    return {"title": title, "columns": list(columns), "rows": [[str(cell) for cell in row] for row in rows]}


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Return everything that was measured, as the page shows it."""
    lines = ["| Bar | Wanted | Measured | Met |", "|---|---|---|---|"]
    for result in results:
        for each in result["bars"]:
            met = "yes" if each["met"] else "**no**"
            lines.append(f"| {each['what']} | {each['bar']} | {each['figure']} | {met} |")
    for result in results:
        lines += ["", f"### {result['title']}", "", result["method"]]
        for each in result["tables"]:
            lines += ["", f"{each['title']}:", "", f"| {' | '.join(each['columns'])} |"]
            lines.append("|" + "---|" * len(each["columns"]))
            lines += [f"| {' | '.join(row)} |" for row in each["rows"]]
        if result["skipped"]:
            left_out = "; ".join(f"{name} ({why})" for name, why in sorted(result["skipped"].items()))
            lines += ["", f"Not measured here: {left_out}."]
    return "\n".join(lines)


def described(where: dict[str, Any]) -> str:
    """Describe the machine in a sentence."""
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    return (
        f"Measured on {where['cores']} shared cores ({where['machine']}, {where['system']}), the server on the same machine"
        f" and reached over TCP: PostgreSQL {where['postgresql']}, Python {where['python']}, {packages}."
    )


def write(results: Sequence[dict[str, Any]], where: dict[str, Any], folder: Path, *, docs: bool) -> Path:
    """Write JSON, Markdown and pictures into a folder, and into the docs if it is wanted. Returns the JSON file."""
    folder.mkdir(exist_ok=True)
    pictures = [result.pop("picture") for result in results if "picture" in result]
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
    path.write_text(json.dumps({"machine": where, "results": list(results)}, indent=1, default=str))
    text = f"{described(where)}\n\n{markdown(results)}\n"
    path.with_suffix(".md").write_text(text)
    for name, drawn in pictures:
        for place in (folder, STATIC) if docs else (folder,):
            (place / f"{name}.svg").write_text(drawn, encoding="utf-8")
    if docs:
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(_WRITTEN.sub(lambda _: f"\n{text}\n", page), encoding="utf-8")
    return path
