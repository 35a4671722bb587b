"""Every example of the README and the docs runs against a real server, and every public name has its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import make_url

import pgfence
from support import pages
from support.servers import database

TESTS = Path(__file__).parent
ROOT = TESTS.parent
PROGRAMS = TESTS / "typing" / "uses"


def all_pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def called(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def environment(dsn: str) -> dict[str, str]:
    """Return the environment of a reader whose server and database are those of `dsn`."""
    url = make_url(dsn)
    known = {
        "DATABASE_URL": dsn,
        "PGDATABASE": url.database,
        "PGHOST": url.host or url.query.get("host"),
        "PGPASSWORD": url.password,
        "PGPORT": url.port or url.query.get("port"),
        "PGUSER": url.username,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")]),
    }
    return os.environ | {name: str(value) for name, value in known.items() if value}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", [page for page in all_pages() if any(pages.blocks(page))], ids=called)
def test_the_examples_of_a_page_run(page: Path, dsn: str) -> None:
    """What a page shows works as it stands, in the order in which it is read, in a database of its own."""
    command = [sys.executable, "-X", "dev", "-W", "error", pages.__file__, str(page)]
    with database(dsn, "page") as own:
        done = subprocess.run(command, env=environment(own), capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_public_name_is_in_the_reference() -> None:
    """Whatever `pgfence` exports is described on a page of the reference."""
    reference = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "reference").glob("*.md"))
    modules = re.findall(r"automodule:: (\S+)", reference)
    for name in pgfence.__all__:
        home = getattr(getattr(pgfence, name), "__module__", f"pgfence.{name}")
        there = re.search(rf"::\s+(pgfence\.)?{name}\b", reference) or home in modules or f"pgfence.{name}" in modules
        assert there or name == "__version__", name


@pytest.mark.parametrize("page", all_pages(), ids=called)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """A relative link or an included file exists."""
    content = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", content) + re.findall(r"literalinclude\} (\S+)", content)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_each_command_a_stranger_types_is_one_line() -> None:
    """The README marks its two commands, and each needs one line."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for what in ("demo", "test"):
        marked = re.findall(rf"<!-- fresh: {what} -->\n+```\w*\n(.*?)```", readme, re.DOTALL)
        assert [command.count("\n") for command in marked] == [1], what


def test_every_case_of_the_casebook_is_held_by_the_tests_it_names() -> None:
    """The casebook lists the cases that tests name, each with the files of those tests, and no others."""
    page = (ROOT / "docs" / "casebook.md").read_text(encoding="utf-8")
    listed = {
        case: set(re.findall(r"`(tests/\S+?\.py)`", section))
        for case, section in re.findall(r"^## (C\d{3})(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    }
    held: dict[str, set[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        for case in set(re.findall(r"\bC\d{3}\b", file.read_text(encoding="utf-8"))):
            held.setdefault(case, set()).add(called(file))
    assert listed == held
