"""The doctor's findings that depend on time: leaked locks and long waits, with their limits lowered; and an old server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine, text

from pgfence import AdvisoryLock, ReadWriteLock, monitoring
from pgfence._admin.doctor import activity, connection
from support.locking import has_ticket, take, waits
from support.waiting import blocking

if TYPE_CHECKING:
    from sqlalchemy import Engine

KEY = 7_000_001


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session has leaked its lock, and a wait is long, at once."""
    monkeypatch.setattr(activity, "LEAKED_AFTER", 0.0)
    monkeypatch.setattr(activity, "LONG_WAIT", 0.0)


def make_engine(dsn: str, **kwargs: Any) -> Engine:
    """Return an engine."""
    return create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}", **kwargs)


def find(engine: Engine, code: str) -> str | None:
    """Return what was found."""
    return next((finding.found for finding in monitoring.doctor(engine) if finding.code == code), None)


def test_a_lock_that_was_returned_to_a_pool_is_found(dsn: str) -> None:
    """It stays on the pooled connection; in use it is no leak, and neither is the lock of a transaction."""
    engine, pooled = make_engine(dsn), make_engine(dsn, connect_args={"application_name": "importer"})
    try:
        with pooled.connect() as taken:
            taken.execute(text("SELECT pg_advisory_lock(:key), pg_advisory_xact_lock(:key)"), {"key": KEY})
            assert find(engine, "leaked-locks") is None
        found = find(engine, "leaked-locks")
        assert found is not None
        assert "importer" in found
        assert "1 idle session holds 1 advisory lock " in found
    finally:
        pooled.dispose()
    assert find(engine, "leaked-locks") is None
    engine.dispose()


@pytest.mark.usefixtures("tables")
def test_a_lock_of_pgfence_is_no_leak(dsn: str, name: str) -> None:
    """With one name, with many, with a token, for reading and for writing."""
    engine = make_engine(dsn)
    others = [
        AdvisoryLock(engine, f"{name}:1"),
        AdvisoryLock(engine, f"{name}:2", f"{name}:3"),
        AdvisoryLock(engine, f"{name}:4", token=True),
        ReadWriteLock(engine, f"{name}:5").read,
        ReadWriteLock(engine, f"{name}:6").write,
    ]
    for lock in others:
        with lock.hold():
            assert find(engine, "leaked-locks") is None, lock
    engine.dispose()


def test_a_lock_that_was_waited_for_is_no_leak(dsn: str, name: str, admin: psycopg.Connection[Any]) -> None:
    """The last statement of the session is then another one: that of the first slice, or that of a later one."""
    engine = make_engine(dsn, connect_args={"application_name": name})
    with ThreadPoolExecutor() as beside:
        for waited in (waits(admin, name), has_ticket(admin, name, name)):
            take(admin, name)
            waiting = beside.submit(AdvisoryLock(engine, name).acquire)
            blocking(waited)
            admin.execute("SELECT pg_advisory_unlock_all()")
            with waiting.result(20):
                assert find(engine, "leaked-locks") is None
    engine.dispose()


def test_a_long_wait_is_found_with_the_session_that_blocks_it(
    dsn: str, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The waiter's and the holder's server processes are in the text."""
    engine = make_engine(dsn)
    take(admin, name)
    with psycopg.connect(dsn, autocommit=True) as waiter, ThreadPoolExecutor() as beside:
        waiting = beside.submit(take, waiter, name)
        blocking(waits(admin, name))
        found = find(engine, "long-wait")
        admin.execute("SELECT pg_advisory_unlock_all()")
        waiting.result(20)
        assert found is not None
        assert f"backend {waiter.info.backend_pid} for" in found
        assert f"blocked by backend {admin.info.backend_pid}" in found
    assert find(engine, "long-wait") is None
    engine.dispose()


def test_an_old_server_is_found() -> None:
    """Releases before 14, and a look-alike; nothing newer."""
    (finding,) = connection.check_version("PostgreSQL 13.4 on x86_64", 130004)
    assert (finding.code, finding.severity) == ("server-version", "error")
    assert "PostgreSQL 13.4;" in finding.found
    assert list(connection.check_version("PostgreSQL 15.2-YB-2.25", 150002))
    assert not list(connection.check_version("PostgreSQL 14.0", 140000))
