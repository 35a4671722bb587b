"""Which kinds of lock exclude each other under one name: every cell of the table in the docs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from pgfence import AdvisoryLock, Lease, LockKey, LockTimeoutError, Once, SlotOverError, TransactionLock
from pgfence.cli import main
from pgfence.migrations import migration_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

    Hold: TypeAlias = Callable[[Engine, str], AbstractContextManager[object]]

pytestmark = pytest.mark.usefixtures("tables")

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "promises.md"
HEADING = "## Which kinds exclude each other\n"
HOUR = timedelta(hours=1)


@contextmanager
def transaction(engine: Engine, name: str) -> Iterator[None]:
    with Session(engine) as session, session.begin():
        TransactionLock(session, name).acquire(timeout=0)
        yield


@contextmanager
def migration(engine: Engine, name: str) -> Iterator[None]:
    with engine.connect() as connection, migration_lock(connection, key=LockKey.of(name), timeout=0):
        yield


LIBRARY: dict[str, Hold] = {
    "AdvisoryLock": lambda engine, name: AdvisoryLock(engine, name).hold(timeout=0),
    "AdvisoryLock(token=True)": lambda engine, name: AdvisoryLock(engine, name, token=True).hold(timeout=0),
    "TransactionLock": transaction,
    "migration_lock(key=...)": migration,
    "Lease": lambda engine, name: Lease(engine, name, ttl=30).hold(timeout=0),
    "Once": lambda engine, name: Once(engine, name, every=HOUR).hold(timeout=0),
}
COMMANDS = {
    "pgfence run": [],
    "pgfence run --lease": ["--lease"],
    "pgfence run --once-per": ["--once-per", "hour"],
}
KINDS = [*LIBRARY, *COMMANDS]


def promised() -> dict[tuple[str, str], bool]:
    """Return what the table says of each pair: whether the second kind waits for the first."""
    table = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].partition("\n\n|")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    head, _line, *body = rows
    kinds = [[kind.strip("` ") for kind in cell.split(", ")] for cell in head]
    return {
        (held, asked): answer == "yes"
        for first, *answers in body
        for held in [kind.strip("` ") for kind in first.split(", ")]
        for column, answer in zip(kinds[-len(answers) :], answers, strict=True)
        for asked in column
    }


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    """An engine on the test's server."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield engine
    engine.dispose()


@pytest.fixture
def excluded(
    engine: Engine, dsn: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[[str, str], bool]:
    """A function that tries a name with a kind, and returns whether it was held. This very thread must not hold it."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def ask(kind: str, name: str) -> bool:
        if kind in COMMANDS:
            code = main(["run", "--json", *COMMANDS[kind], name, "--", "true"])
            outcome = json.loads(capfd.readouterr().err.splitlines()[-1])["outcome"]
            assert (code, outcome) in {(0, "ran"), (75, "busy"), (75, "done")}
            return bool(outcome == "busy")
        try:
            with LIBRARY[kind](engine, name):
                return False
        except SlotOverError:
            return False
        except LockTimeoutError:
            return True

    return ask


def test_the_table_has_each_kind_twice() -> None:
    """As what is held and as what asks for it; and it does not matter which of the two comes first."""
    table = promised()
    assert sorted(table) == sorted((held, asked) for held in KINDS for asked in KINDS)
    assert [pair for pair, answer in table.items() if table[pair[::-1]] is not answer] == []


@pytest.mark.parametrize("held", LIBRARY)
def test_what_a_held_lock_excludes(engine: Engine, name: str, excluded: Callable[[str, str], bool], held: str) -> None:
    """Each other kind is busy under its name, or is not, as the table says."""
    found = {}
    with ThreadPoolExecutor(1) as elsewhere:
        for number, asked in enumerate(KINDS):
            holder = LIBRARY[held](engine, f"{name}:{number}")
            elsewhere.submit(holder.__enter__).result()
            try:
                found[held, asked] = excluded(asked, f"{name}:{number}")
            finally:
                elsewhere.submit(holder.__exit__, None, None, None).result()
    assert found == {pair: answer for pair, answer in promised().items() if pair[0] == held}


@pytest.mark.parametrize("held", COMMANDS)
def test_what_a_command_excludes(name: str, dsn: str, excluded: Callable[[str, str], bool], held: str) -> None:
    """The same for what `pgfence run` holds while its command runs."""
    words = [sys.executable, "-m", "pgfence", "run", *COMMANDS[held], name, "--", "sh", "-c", "echo held; read x"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, env=os.environ | {"DATABASE_URL": dsn}, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        found = {(held, asked): excluded(asked, name) for asked in KINDS}
        process.communicate("\n")
    assert found == {pair: answer for pair, answer in promised().items() if pair[0] == held}
