"""Run the examples of a page of documentation: `python pages.py PAGE`.

Blocks marked `python` run in order, in one namespace, `await` at the top included; one that begins with the name of a file, as
in `# worker.py`, is saved under that name instead. Blocks marked `console` run in a shell,
`$` before each command, and print what stands under it (`...` for anything). A comment that starts with `<!-- run` holds
Python that a reader need not see.

On a page with `<!-- generated output -->`, the output is what the commands have printed, written by `python pages.py --write PAGE`;
it may differ from that of another run in its numbers only.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from sqlalchemy import make_url

from pgfence import embedded, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TESTS = Path(__file__).parents[1]
PROGRAMS = [str(_TESTS.parent / "docs" / "examples"), str(_TESTS / "typing" / "uses")]
"""The folders of the programs that pages include."""

_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$|^<!-- run\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")
_GENERATED = "<!-- generated output -->"
_LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Block(NamedTuple):
    """A piece of a page that runs, and the line before its first."""

    kind: str
    line: int
    code: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield what runs on a page, in order."""
    content = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(content):
        line = content.count("\n", 0, match.start()) + 1
        yield Block(match[1] or "python", line, match[2] if match[1] else match[3])


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
        "PYTHONPATH": os.pathsep.join([*PROGRAMS, os.environ.get("PYTHONPATH", "")]),
    }
    return os.environ | {name: str(value) for name, value in known.items() if value}


def reader(dsn: str, code: str) -> str:
    """Return a script for `support.processes.Script` that can import the programs of pages; their server is that of `dsn`."""
    known = {name: value for name, value in environment(dsn).items() if name.startswith("PG")}
    return f"os.environ.update({known!r})\nsys.path[:0] = {PROGRAMS!r}\n{code}"


def install(dsn: str) -> None:
    """Make the tables that the programs need."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(schema.sql().encode())


def run(page: Path, check: Callable[[Path, Block, str], None] | None = None) -> None:
    """Run the blocks of a page; a failure shows the page's own file and line."""
    check = check or _check_output
    module = sys.modules["page"] = ModuleType("page")
    with asyncio.Runner() as runner:
        for block in blocks(page):
            if block.kind == "console":
                check(page, block, _run_console(block))
                continue
            if named := _FILE.match(block.code):
                Path(named[1]).write_text(block.code, encoding="utf-8")
                continue
            source = "\n" * block.line + block.code
            code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            outcome = eval(code, vars(module))
            if inspect.iscoroutine(outcome):
                runner.run(outcome)


def write(page: Path) -> None:
    """Write what its commands print to a page, from a new server."""
    with embedded.server(fsync=False) as url:
        os.environ.update(environment(url.replace("+psycopg", "")))
        run(page, _write_output)


def _run_console(block: Block) -> str:
    script = "".join(line[2:] for line in block.code.splitlines(keepends=True) if line.startswith("$ "))
    shell = ["bash", "-c", script]
    done = subprocess.run(shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False)
    return done.stdout


def _check_output(page: Path, block: Block, output: str) -> None:
    wanted = "".join(line for line in block.code.splitlines(keepends=True) if not line.startswith("$ "))
    if _GENERATED in page.read_text(encoding="utf-8"):
        same = _shape(wanted) == _shape(_hide_machine(output))
    else:
        same = doctest.OutputChecker().check_output(wanted, output, _LOOSE)
    if not same:
        raise AssertionError(f"{page}:{block.line}: wanted\n{wanted}\ngot\n{output}")


def _write_output(page: Path, block: Block, output: str) -> None:
    commands = "".join(line for line in block.code.splitlines(keepends=True) if line.startswith("$ "))
    content = page.read_text(encoding="utf-8")
    assert content.count(block.code) == 1, block.code
    page.write_text(content.replace(block.code, commands + _hide_machine(output)), encoding="utf-8")


def _hide_machine(output: str) -> str:
    """Replace the role and the address of the tests by others."""
    shown = re.sub(rf"\b{re.escape(os.environ['PGUSER'])}@[\w.:-]+", "shop@10.0.0.7", output)
    return shown.replace("127.0.0.1", "10.0.0.7")


def _shape(output: str) -> list[str]:
    return re.sub(r"-?\d[\d.]*(m\d+)?", "0", output).split()


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(Path(sys.argv[2]))
    else:
        run(Path(sys.argv[1]))
