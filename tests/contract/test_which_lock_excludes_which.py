"""Which kinds of lock exclude each other under one name: every cell of the matrix in the docs."""

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
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from pgfence import (
    AdvisoryLock,
    Election,
    Lease,
    LockKey,
    LockTimeoutError,
    Once,
    ReadWriteLock,
    Semaphore,
    SlotOverError,
    TransactionLock,
)
from pgfence.cli import main
from pgfence.compat import pals_key
from pgfence.migrations import migration_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

    Hold: TypeAlias = Callable[[Engine, str], AbstractContextManager[object]]

pytestmark = pytest.mark.usefixtures("tables")

PAGE = Path(__file__).parents[2] / "docs" / "choose" / "which-excludes-which.md"
HOUR = timedelta(hours=1)


class BusyError(Exception):
    """Raised if another session holds the number that SQL requested."""


def transaction(*, shared: bool = False) -> Hold:
    """Return a function that holds a transaction lock on a name or a key."""

    @contextmanager
    def hold(engine: Engine, name: str | LockKey) -> Iterator[None]:
        with Session(engine) as session, session.begin():
            TransactionLock(session, name, shared=shared).acquire(timeout=0)
            yield

    return hold


@contextmanager
def migration(engine: Engine, name: str | LockKey) -> Iterator[None]:
    key = name if isinstance(name, LockKey) else LockKey.of(name)
    with engine.connect() as connection, migration_lock(connection, key=key, timeout=0):
        yield


def raw(suffix: str) -> Hold:
    """Return a function that holds the number of a name, as a program without pgfence would."""

    @contextmanager
    def hold(engine: Engine, name: str | LockKey) -> Iterator[None]:
        key = name if isinstance(name, LockKey) else LockKey.of(name)
        with engine.connect() as connection:
            if not connection.scalar(text(f"SELECT pg_try_advisory_{suffix}(:key)"), {"key": key.value}):
                raise BusyError
            try:
                yield
            finally:
                connection.invalidate()

    return hold


LIBRARY: dict[str, Hold] = {
    "AdvisoryLock": lambda engine, name: AdvisoryLock(engine, name).hold(timeout=0),
    "AdvisoryLock(token=True)": lambda engine, name: AdvisoryLock(engine, name, token=True).hold(timeout=0),
    "TransactionLock": transaction(),
    "TransactionLock(shared=True)": transaction(shared=True),
    "ReadWriteLock.read": lambda engine, name: ReadWriteLock(engine, name).read.hold(timeout=0),
    "ReadWriteLock.write": lambda engine, name: ReadWriteLock(engine, name).write.hold(timeout=0),
    "migration_lock(key=...)": migration,
    "Lease": lambda engine, name: Lease(engine, name, ttl=30).hold(timeout=0),
    "Once": lambda engine, name: Once(engine, name, every=HOUR).hold(timeout=0),
    "Election": lambda engine, name: Election(engine, name).lead(timeout=0),
    "pg_advisory_lock()": raw("lock"),
    "pg_advisory_lock_shared()": raw("lock_shared"),
    "pg_advisory_xact_lock()": raw("xact_lock"),
    "pg_advisory_xact_lock_shared()": raw("xact_lock_shared"),
}
COMMANDS = {
    "pgfence run": [],
    "pgfence run --lease": ["--lease"],
    "pgfence run --once-per": ["--once-per", "hour"],
}
KINDS = [*LIBRARY, *COMMANDS]


def semaphore(engine: Engine, name: str) -> AbstractContextManager[object]:
    return Semaphore(engine, name, permits=1, ttl=30).hold(timeout=0)


NEW_CODE: dict[str, Callable[[Engine, str, LockKey], AbstractContextManager[object]]] = {
    "AdvisoryLock(engine, key)": lambda engine, _name, key: AdvisoryLock(engine, key).hold(timeout=0),
    "TransactionLock(session, key)": lambda engine, _name, key: transaction()(engine, key),
    "migration_lock(connection, key=key)": lambda engine, _name, key: migration(engine, key),
    "AdvisoryLock(engine, name)": lambda engine, name, _key: AdvisoryLock(engine, name).hold(timeout=0),
    "Lease(engine, name, ttl=60)": lambda engine, name, _key: Lease(engine, name, ttl=60).hold(timeout=0),
}


def table(first: str) -> list[list[str]]:
    """Return the rows of the page's table whose header starts with these words."""
    lines = PAGE.read_text(encoding="utf-8").partition(f"\n| {first}")[2].partition("\n\n")[0].splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def matrix() -> dict[tuple[str, str], bool]:
    """Return, for each pair of kinds on the page, whether the second kind waits for the first."""
    members = {group: [kind.strip("` ") for kind in kinds.split(", ")] for group, kinds in table("Group")}
    rows = table("| exclusive locks")
    groups = [group for group, *_answers in rows]
    return {
        (held, asked): answer == "yes"
        for group, *answers in rows
        for column, answer in zip(groups, answers, strict=True)
        for held in members[group]
        for asked in members[column]
    }


def busy(holder: AbstractContextManager[object]) -> bool:
    """Return whether a lock was held by another session. This very thread must not hold it."""
    try:
        with holder:
            return False
    except SlotOverError:
        return False
    except (LockTimeoutError, BusyError):
        return True


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
    """A function that tries a name with a kind, and returns whether it was held."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def ask(kind: str, name: str) -> bool:
        if kind not in COMMANDS:
            return busy(LIBRARY[kind](engine, name))
        code = main(["run", "--json", *COMMANDS[kind], name, "--", "true"])
        outcome = json.loads(capfd.readouterr().err.splitlines()[-1])["outcome"]
        assert (code, outcome) in {(0, "ran"), (75, "busy"), (75, "done")}
        return bool(outcome == "busy")

    return ask


def test_the_matrix_has_each_kind_once_and_is_symmetric() -> None:
    """Each kind has one group, the columns are the groups of the rows, and it does not matter which kind comes first."""
    answers = matrix()
    head = PAGE.read_text(encoding="utf-8").partition("\n| | exclusive locks")[2].partition("\n")[0]
    assert [group for group, *_answers in table("| exclusive locks")] == [
        "exclusive locks",
        *(cell.strip(" `") for cell in head.strip("| ").split(" | ")),
    ]
    assert sorted(answers) == sorted((held, asked) for held in KINDS for asked in KINDS)
    assert [pair for pair, answer in answers.items() if answers[pair[::-1]] is not answer] == []


@pytest.mark.parametrize("held", LIBRARY)
def test_what_a_held_lock_excludes(engine: Engine, name: str, excluded: Callable[[str, str], bool], held: str) -> None:
    """Each other kind is busy under its name, or is not, as the matrix says."""
    found = {}
    with ThreadPoolExecutor(1) as elsewhere:
        for number, asked in enumerate(KINDS):
            holder = LIBRARY[held](engine, f"{name}:{number}")
            elsewhere.submit(holder.__enter__).result()
            try:
                found[held, asked] = excluded(asked, f"{name}:{number}")
            finally:
                elsewhere.submit(holder.__exit__, None, None, None).result()
    assert found == {pair: answer for pair, answer in matrix().items() if pair[0] == held}


@pytest.mark.parametrize("held", COMMANDS)
def test_what_a_command_excludes(name: str, dsn: str, excluded: Callable[[str, str], bool], held: str) -> None:
    """The lock that `pgfence run` holds while its command runs excludes what the matrix says."""
    words = [sys.executable, "-m", "pgfence", "run", *COMMANDS[held], name, "--", "sh", "-c", "echo held; read x"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, text=True, env=os.environ | {"DATABASE_URL": dsn}, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        found = {(held, asked): excluded(asked, name) for asked in KINDS}
        process.communicate("\n")
    assert found == {pair: answer for pair, answer in matrix().items() if pair[0] == held}


def test_what_a_lock_of_another_library_excludes(engine: Engine, name: str) -> None:
    """While old code holds the number of its library, new code waits if it uses that library's key, as the page says."""
    key = pals_key("myapp", name)
    with raw("lock")(engine, key):
        found = {code: busy(hold(engine, name, key)) for code, hold in NEW_CODE.items()}
    assert found == {code: answer == "yes" for code, answer in table("New code")}


def test_a_semaphore_excludes_no_lock_of_its_name(engine: Engine, name: str) -> None:
    """A permit is busy for semaphores only, and no lock keeps a semaphore of its name from giving one."""
    with semaphore(engine, name):
        assert [kind for kind, hold in LIBRARY.items() if busy(hold(engine, name))] == []
    with ThreadPoolExecutor(1) as elsewhere:
        for number, hold in enumerate(LIBRARY.values()):
            holder = hold(engine, f"{name}:{number}")
            elsewhere.submit(holder.__enter__).result()
            try:
                assert not busy(semaphore(engine, f"{name}:{number}"))
            finally:
                elsewhere.submit(holder.__exit__, None, None, None).result()
