"""Every example of the README and the docs runs against a real server, and every public name has its page."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import pgfence
from support import pages
from support.rows import every_row
from support.servers import database

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent
ROOT = TESTS.parent
CASEBOOK = ROOT / "docs" / "casebook.md"


def all_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def called(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", [page for page in all_pages() if any(pages.blocks(page))], ids=called)
def test_the_examples_of_a_page_run(page: Path, dsn: str) -> None:
    """The examples of a page work as written, in reading order, in a separate database."""
    command = [sys.executable, "-X", "dev", "-W", "error", pages.__file__, str(page)]
    with database(dsn, "page") as own:
        done = subprocess.run(
            command, env=pages.environment(own), capture_output=True, text=True, timeout=110, check=False
        )
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_public_name_is_in_the_reference() -> None:
    """Every name that `pgfence` exports is described on a page of the reference."""
    reference = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    modules = re.findall(r"automodule:: (\S+)", reference)
    for name in pgfence.__all__:
        home = getattr(getattr(pgfence, name), "__module__", f"pgfence.{name}")
        there = re.search(rf"::\s+(pgfence\.)?{name}\b", reference) or home in modules or f"pgfence.{name}" in modules
        assert there or name == "__version__", name


def reference_pages() -> list[Path]:
    return sorted((ROOT / "docs" / "reference").glob("*.md"))


@every_row("page", reference_pages())
def test_a_reference_page_begins_with_a_sentence_and_a_table_of_its_members(page: Path) -> None:
    """A page of the reference begins with a paragraph, and its table lists what it describes, each name once."""
    content = page.read_text(encoding="utf-8")
    assert re.match(r"# .+\n\n(?!```|:::)[^\s|<]", content), "no paragraph after the title"
    described = re.findall(r"^\.\. (?:auto(?:class|function|exception)|py:data):: ([\w.]+)", content, re.MULTILINE)
    for module in re.findall(r"^\.\. automodule:: (\S+)", content, re.MULTILINE):
        described += importlib.import_module(module).__all__
    summaries = re.findall(r"\.\. autosummary::\n(?:   :\w+:\n)*\n((?:   \S+\n)+)", content)
    rows = re.findall(r"^\| (\{py:.*?) \|", content.partition("\n## ")[0], re.MULTILINE)
    listed = "".join(summaries).split() + re.findall(r"`~(\S+?)`", " ".join(rows))
    # `op.add_fence` is described as a method of its class.
    last = [name.rpartition(".")[2] for name in described if name != "pgfence_alembic.Directives"]
    members = [name.rpartition(".")[2] for name in listed if "Directives." not in name]
    assert sorted(members) == sorted(last)


def parameters(written: str) -> dict[str, str | None]:
    """Return the parameters of a signature with their defaults, as text."""
    code = ast.parse(f"def f{written}: ...").body[0]
    assert isinstance(code, ast.FunctionDef)
    arguments = code.args
    defaults: list[ast.expr | None] = [*[None] * (len(arguments.args) - len(arguments.defaults)), *arguments.defaults]
    pairs = [
        *zip(arguments.args, defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    found = {argument.arg: default and ast.unparse(default) for argument, default in pairs}
    return found | ({arguments.vararg.arg: None} if arguments.vararg else {})


def test_signatures_written_in_the_reference_are_those_of_the_code() -> None:
    """A signature that a page of the reference spells out has the parameters and defaults of the code."""
    checked = 0
    for page in reference_pages():
        module = "pgfence"
        for line in page.read_text(encoding="utf-8").splitlines():
            module = line.split()[-1] if ".. currentmodule::" in line else module
            written = re.match(r"\.\. auto(?:class|function):: (\w+)(\(.*\))", line)
            # FastAPI fills the parameters of its dependencies in.
            if written and module != "pgfence.fastapi":
                checked += 1
                real = inspect.signature(getattr(importlib.import_module(module), written[1])).parameters.values()
                defaults = {one.name: None if one.default is one.empty else repr(one.default) for one in real}
                assert parameters(written[2]) == defaults, line
    assert checked > 0


@every_row("page", all_pages())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """A relative link or an included file exists."""
    content = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", content) + re.findall(r"literalinclude\} (\S+)", content)
    assert [target for target in targets if not (page.parent / target).exists()] == []


@every_row("page", all_pages())
def test_an_included_program_is_also_linked(page: Path) -> None:
    """In the repository an include shows nothing, so the page has a link to the program as well."""
    content = page.read_text(encoding="utf-8")
    included = set(re.findall(r"literalinclude\} (\S+)", content))
    assert sorted(program for program in included if f"]({program})" not in content) == []


def test_each_how_to_is_on_the_list_of_tasks() -> None:
    """The page that lists the tasks has a link to each how-to."""
    listed = (ROOT / "docs" / "how-to" / "index.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs" / "how-to").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", listed)) == pages


@every_row("tree", ["race", "which-one"])
def test_the_decision_tree_says_what_its_page_says(tree: str) -> None:
    """Each result in the picture is also in the list below it, in the item of the same number."""
    drawn = (ROOT / "docs" / "_diagrams" / f"{tree}.txt").read_text(encoding="utf-8").split("\n\n")[1:]
    page = (ROOT / "docs" / "choose" / f"{tree}.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\d+\. .*(?:\n   .*)*", page, re.MULTILINE)
    for paragraph, item in zip(drawn, listed, strict=True):
        results = re.findall(r"^= (.*)", paragraph, re.MULTILINE)
        assert [result for result in results if result.lower() not in item.lower()] == []


def test_the_comparison_shows_the_measured_costs() -> None:
    """The costs in the comparison and in the README are those of the benchmarks page."""
    measured = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").partition("All contestants, sync:")[2]
    ratios = {
        name: f"{float(ratio):.1f}"
        for name, ratio in re.findall(r"^\| (.+?) \| ([\d.]+)x \|", measured, re.MULTILINE)[:14]
    }
    comparison = (ROOT / "docs" / "choose" / "comparison.md").read_text(encoding="utf-8")
    row = re.search(r"^\| cost of acquiring .*\]\(\S+\)\) \| (.*) \|$", comparison, re.MULTILINE)
    assert row is not None
    assert row[1].split(" | ") == [
        f"{ratios['pgfence, hold()']}x",
        f"{ratios['sqlalchemy-dlock, one connection']}x to {ratios['sqlalchemy-dlock, from the pool']}x",
        f"{ratios['pals (psycopg2)']}x to {ratios['pals (psycopg)']}x",
        f"{ratios['django-pglock']}x",
        f"{ratios['redis-py']}x",
    ]
    assert f"{ratios['pgfence, hold()']} times as long" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_fits_on_one_screen() -> None:
    """The README has at most 110 lines, and six rows in its table of what to use; the rest is in the docs."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n") <= 110
    chooser = readme.partition("## Which one do I need?")[2].partition("\n\n|")[2].partition("\n\n")[0]
    assert len(chooser.splitlines()) == 2 + 6


@every_row("page", all_pages())
def test_included_files_are_also_linked(page: Path) -> None:
    """A file that a page includes is also linked, because a repository shows the include as a path without content."""
    content = page.read_text(encoding="utf-8")
    included = set(re.findall(r"literalinclude\} (\S+)", content))
    assert sorted(file for file in included if f"]({file})" not in content) == []


def test_diagrams_are_those_of_their_script() -> None:
    """The committed diagrams are what docs/_diagrams/draw.py draws."""
    diagrams = runpy.run_path(str(ROOT / "docs" / "_diagrams" / "draw.py"))["DIAGRAMS"]
    for name, draw in diagrams.items():
        committed = (ROOT / "docs" / "_static" / name).read_text(encoding="utf-8")
        assert committed == draw(), "python docs/_diagrams/draw.py"


def test_each_command_of_the_readme_is_one_line() -> None:
    """The README marks its two commands, and each needs one line."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for what in ("demo", "test"):
        marked = re.findall(rf"<!-- fresh: {what} -->\n+```\w*\n(.*?)```", readme, re.DOTALL)
        assert [command.count("\n") for command in marked] == [1], what


def properties(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = {ast.unparse(decorator) for decorator in node.decorator_list}
            if names & {"property", "cached_property"}:
                yield node


def test_no_docstring_of_a_property_begins_like_a_type() -> None:
    """Sphinx renders the docstring "word: text" of a property as text of the type "word", so no property has one."""
    found = []
    for file in sorted((ROOT / "src").rglob("*.py")):
        for node in properties(ast.parse(file.read_text(encoding="utf-8"))):
            first = (ast.get_docstring(node) or "").split("\n", 1)[0]
            if re.search(r":(\s|$)", re.sub(r"`[^`]*`", "", first)):
                found.append(f"{called(file)}: {node.name}: {first}")
    assert found == []


def files_by_case() -> dict[str, list[str]]:
    """Return the files of the tests that name each case."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for case in sorted(set(re.findall(r"\bC\d{3}\b", file.read_text(encoding="utf-8")))):
            found.setdefault(case, []).append(called(file))
    return found


def casebook(page: str) -> str:
    """Return the casebook with the files of the tests as they are now."""
    files = files_by_case()

    def tested_by(section: re.Match[str]) -> str:
        listed = "**Tested by** " + ", ".join(f"`{file}`" for file in files.get(section["case"], []))
        return section["text"] + textwrap.fill(listed, 120, break_long_words=False, break_on_hyphens=False)

    return re.sub(
        r"(?ms)(?P<text>^## (?P<case>C\d{3}).*?)^\*\*(?:Held|Tested) by\*\* .*?(?=\n\n|\n?\Z)", tested_by, page
    )


def test_every_case_of_the_casebook_names_its_tests() -> None:
    """The casebook has a section for each case that tests name, with the files of those tests, and no other section."""
    page = CASEBOOK.read_text(encoding="utf-8")
    assert sorted(re.findall(r"^## (C\d{3})", page, re.MULTILINE)) == sorted(files_by_case())
    assert page == casebook(page), "python tests/test_docs.py --write"


def test_the_index_of_contract_tests_has_one_row_for_each_file() -> None:
    """`tests/contract/README.md` says of each file which promise it tests."""
    index = (TESTS / "contract" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \S.* \| \[`(test_\w+)`\]\(\1\.py\) \|$", index, re.MULTILINE)
    assert sorted(listed) == sorted(file.stem for file in (TESTS / "contract").glob("test_*.py"))


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    CASEBOOK.write_text(casebook(CASEBOOK.read_text(encoding="utf-8")), encoding="utf-8")
