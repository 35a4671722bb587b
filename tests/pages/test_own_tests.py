"""The pages about tests: their pytest files pass, and on SQLite each feature does what the table says."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgfence import (
    AdvisoryLock,
    IdempotentEffect,
    Lease,
    Once,
    RateLimit,
    ReadWriteLock,
    Semaphore,
    TransactionLock,
    UnsupportedServerError,
    Versioned,
    VersionedSession,
    claim,
    fenced,
    idempotent,
    run_transaction,
    schema,
)
from pgfence.migrations import migration_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "testing"
PAGE = (ROOT / "docs" / "testing" / "your-own-tests.md").read_text(encoding="utf-8")


@pytest.mark.timeout(120)
def test_the_pytest_files_of_the_pages_pass() -> None:
    """As a reader would run them: on a temporary server, each with the check for leaked locks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PGFENCE_TEST", "PYTEST_"))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        "/dev/null",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "pgfence_pytest",
        "-p",
        "anyio.pytest_plugin",
        "-o",
        "usefixtures=pgfence_no_leaks",
        "-W",
        "error",
    ]
    done = subprocess.run(
        [*command, "--rootdir", EXAMPLES, EXAMPLES],
        env=kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    written = sum(
        len(re.findall("^(?:async )?def test_", file.read_text(), re.MULTILINE)) for file in EXAMPLES.glob("test_*.py")
    )
    assert f"{written} passed" in done.stdout


class Base(DeclarativeBase):
    """Tables of an application that runs its tests on SQLite."""


schema.tables(Base.metadata)


class Page(Versioned, Base):
    """A versioned row."""

    __tablename__ = "page"
    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = create_engine("sqlite://")
    Base.metadata.create_all(made)
    yield made
    made.dispose()


def lock_in_transaction(engine: Engine) -> None:
    with Session(engine) as session:
        TransactionLock(session, "a").acquire()


def claim_key(engine: Engine) -> None:
    with Session(engine) as session:
        idempotent(session, "k", scope="s").run(lambda: 1)


def claim_row(engine: Engine) -> None:
    with Session(engine) as session:
        claim(session, select(Page))


def enter_gate(engine: Engine) -> None:
    with Session(engine) as session, fenced(session, "a", 1):
        pass


REJECTED: dict[str, Callable[[Engine], object]] = {
    "AdvisoryLock": lambda engine: AdvisoryLock(engine, "a").try_acquire(),
    "TransactionLock": lock_in_transaction,
    "ReadWriteLock": lambda engine: ReadWriteLock(engine, "a").read.try_acquire(),
    "Lease": lambda engine: Lease(engine, "a", ttl=5).try_acquire(),
    "Once": lambda engine: Once(engine, "a", every=timedelta(days=1)).try_acquire(),
    "Semaphore": lambda engine: Semaphore(engine, "a", permits=2, ttl=5).try_acquire(),
    "RateLimit": lambda engine: RateLimit(engine, "a", limit=2, per=1).try_take(),
    "claim": claim_row,
    "fenced": enter_gate,
    "idempotent": claim_key,
    "IdempotentEffect": lambda engine: IdempotentEffect(engine, "e", scope="s", ttl=5).run(lambda attempt: 1),
    "run_transaction": lambda engine: run_transaction(sessionmaker(engine), lambda s: s.execute(text("SELECT 1"))),
    "schema.create_all": schema.create_all,
}


def test_the_page_lists_what_raises_on_sqlite() -> None:
    """Its row "raises" names the features of this test."""
    (row,) = re.findall(r"^\| (.*) \| raise.*UnsupportedServerError", PAGE, re.MULTILINE)
    assert re.findall(r"`([\w.]+)(?:\(\))?`", row) == list(REJECTED)


@pytest.mark.parametrize("feature", REJECTED)
def test_a_feature_raises_on_sqlite(feature: str, engine: Engine) -> None:
    """No lock is pretended where there is none."""
    with pytest.raises(UnsupportedServerError, match="sqlite"):
        REJECTED[feature](engine)


def test_versions_and_migrations_work_on_sqlite(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    """Versions in client mode are plain columns, and the migration lock is skipped with a line in the log."""
    with VersionedSession(engine) as session, session.begin():
        session.add(Page(id=1, title="a"))
    with VersionedSession(engine) as session, session.begin():
        session.get_one(Page, 1).title = "b"
    caplog.set_level(logging.INFO)
    with engine.connect() as connection, migration_lock(connection):
        pass
    assert "sqlite" in caplog.text
