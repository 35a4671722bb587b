"""Build the tables and pictures of the results, and write them to files and to the page.

The page is written from JSON alone: a run with `--docs` replaces its scenarios in the file beside the page, and writes the page
from that file.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import picture
from benchmarks.rounds import NULL_TEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DOCS = Path(__file__).parent.parent / "docs"
PAGE, PICTURES, KEPT = "benchmarks.md", "_static", "_static/benchmarks.json"
_WRITTEN = re.compile(r"(?<=<!-- written by the benchmark -->\n).*(?=<!-- end -->)", re.DOTALL)


def bar(what: str, wanted: str, figure: float, limit: float, unit: str = "", *, digits: int = 2) -> dict[str, Any]:
    """Return a limit and whether it is met: the figure is at most the limit."""
    return {
        "what": what,
        "bar": wanted,
        "figure": f"{figure:.{digits}f}{unit}",
        "value": figure,
        "met": figure <= limit,
    }


def null_test(figure: float, base: str) -> dict[str, Any]:
    """Return the comparison of the plain driver with itself."""
    low, high = NULL_TEST
    return {
        "what": f"null test: {base}",
        "bar": f"{low:g} to {high:g}",
        "figure": f"{figure:.2f}",
        "value": figure,
        "met": low <= figure <= high,
        "null": True,
    }


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    return {"title": title, "columns": list(columns), "rows": [[str(cell) for cell in row] for row in rows]}


def markdown(results: Sequence[Mapping[str, Any]], pictures: str = "") -> str:
    """Return all results as the page shows them; `pictures` is the folder of the pictures, relative to the page."""
    bars = [(result, each) for result in results for each in result["bars"] if not each.get("null")]
    missed = [(result["title"], *_show(each)) for result, each in bars if not each["met"]]
    lines = [f"{len(bars) - len(missed)} of {len(bars)} limits are met."]
    if missed:
        lines += ["", "These limits are missed:", "", *_draw_table(("Scenario", "Figure", "Limit", "Measured"), missed)]
    for result in results:
        lines += ["", f"### {result['title']}", "", result["method"], ""]
        rows = [(*_show(each), "yes" if each["met"] else "**no**") for each in result["bars"] if not each.get("null")]
        lines += _draw_table(("Figure", "Limit", "Measured", "Met"), rows)
        for each in result.get("pictures", ()):
            lines += ["", f"![{each.get('title', result['title'])}]({pictures}{each['name']}.svg)"]
        for each in result["tables"]:
            lines += ["", f"{each['title']}:", "", *_draw_table(each["columns"], each["rows"])]
        if tested := [_show_null_test(each) for each in result["bars"] if each.get("null")]:
            lines += ["", f"Null tests: {', '.join(tested)}."]
        if result["skipped"]:
            left_out = "; ".join(f"{name} ({why})" for name, why in sorted(result["skipped"].items()))
            lines += ["", f"Not measured: {left_out}."]
        if "measured" in result:
            took = "less than 1 s" if result["took"] < 1 else f"{result['took']:.0f} s"
            lines += ["", f"*Measured on {result['measured']}, in {took}.*"]
    return "\n".join(lines)


def _show(each: Mapping[str, Any]) -> tuple[str, str, str]:
    return each["what"], each["bar"], each["figure"]


def _show_null_test(each: Mapping[str, Any]) -> str:
    figure = each["figure"] if each["met"] else f"**{each['figure']}**"
    return f"{figure} ({each['what'].removeprefix('null test: ')})"


def _draw_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *(f"| {' | '.join(row)} |" for row in rows)]


def described(where: Mapping[str, Any]) -> str:
    """Describe the machine in a sentence."""
    packages = ", ".join(f"{name} {version}" for name, version in where["packages"].items())
    return (
        f"Measured on {where['cores']} shared cores ({where['machine']}, {where['system']}), with the server on the same"
        f" machine and reached over TCP, using PostgreSQL {where['postgresql']}, Python {where['python']}, {packages}."
    )


def save(results: Sequence[Mapping[str, Any]], where: Mapping[str, Any], folder: Path) -> Path:
    """Write results as JSON, Markdown and pictures into a folder, and return the JSON file."""
    folder.mkdir(exist_ok=True, parents=True)
    path = folder / f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}.json"
    _write_json(path, results, where)
    path.with_suffix(".md").write_text(f"{described(where)}\n\n{markdown(results)}\n", encoding="utf-8")
    _write_pictures(results, folder)
    return path


def publish(files: Sequence[Path], order: Sequence[str], docs: Path) -> None:
    """Put the scenarios of result files into the file beside the page, and write the page and its pictures.

    Args:
        files: files written by `save`. The last one that contains a scenario is used, and the machine of the last is described.
        order: the order of the scenarios on the page.
        docs: the folder of the page.
    """
    beside, page = docs / KEPT, docs / PAGE
    kept: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {"results": []}
    found = {result["scenario"]: result for result in kept["results"]}
    where = kept.get("machine")
    for file in files:
        read = json.loads(file.read_text(encoding="utf-8"))
        if quick := [result["scenario"] for result in read["results"] if result["quick"]]:
            raise SystemExit(f"{file}: a quick run measures too little for the page: {', '.join(quick)}")
        found |= {result["scenario"]: result for result in read["results"]}
        where = read["machine"]
    if where is None:
        raise SystemExit("there are no results to write a page from")
    results = [found[name] for name in order if name in found]
    beside.parent.mkdir(exist_ok=True)
    _write_json(beside, results, where)
    _write_pictures(results, docs / PICTURES)
    text = f"{described(where)}\n\n{markdown(results, f'{PICTURES}/')}"
    page.write_text(_WRITTEN.sub(lambda _: f"\n{text}\n\n", page.read_text(encoding="utf-8")), encoding="utf-8")


def _write_pictures(results: Iterable[Mapping[str, Any]], folder: Path) -> None:
    for result in results:
        for each in result.get("pictures", ()):
            (folder / f"{each['name']}.svg").write_text(picture.draw(each), encoding="utf-8")


def _write_json(path: Path, results: Sequence[Mapping[str, Any]], where: Mapping[str, Any]) -> None:
    text = json.dumps({"machine": where, "results": _round(results)}, indent=1, default=str)
    # Keep lists of numbers on one line, because people read the file too.
    flat = re.sub(r"\[\s+([-\d.e]+(?:,\s+[-\d.e]+)*)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    path.write_text(f"{flat}\n", encoding="utf-8")


def _round(value: Any) -> Any:
    """Return a value with its numbers rounded to four digits, because the rest is noise."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _round(each) for key, each in value.items()}
    return [_round(each) for each in value] if isinstance(value, (list, tuple)) else value
