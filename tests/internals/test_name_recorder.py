"""The thread that stores the names of locks on connections of the application."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from pgfence import AdvisoryLock, AsyncAdvisoryLock, AsyncTransactionLock, LockKey, TransactionLock
from pgfence._locks import name_recorder
from pgfence._process.clock import clock
from pgfence._process.lifecycle import PROCESS
from pgfence.config import configure
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

pytestmark = pytest.mark.one_driver


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    """An engine of psycopg, where the driver does not matter."""
    engine = create_engine(make_url(dsn).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


def test_the_background_thread_ends_and_does_not_try_in_vain(
    name: str, engine: Engine, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the table it opens one connection in five minutes, closes it, and ends."""
    for setting, seconds in (("TICK", 0.05), ("BETWEEN", 0.0), ("LINGER", 0.2)):
        monkeypatch.setattr(name_recorder, setting, seconds)
    configure(engine, prefix="no_such_")
    opened: list[int] = []
    with engine.connect():  # so that only the thread opens connections from here on
        pass

    event.listen(engine, "connect", lambda connection, _: opened.append(connection.info.backend_pid))
    for n in range(2):
        with TransactionLock.begin(engine, f"{name}:{n}"):
            eventually(lambda: opened and not any(thread.name == "pgfence-names" for thread in threading.enumerate()))
    assert len(opened) == 1
    eventually(lambda: admin.execute("SELECT FROM pg_stat_activity WHERE pid = ANY (%s)", [opened]).rowcount == 0)


@pytest.mark.usefixtures("tables")
def test_a_long_transaction_has_a_name_among_many_short_ones(
    name: str, engine: Engine, admin: psycopg.Connection[Any]
) -> None:
    """The connections that come and go after it are forgotten at once, and it is not."""
    with TransactionLock.begin(engine, name):
        for _ in range(10):
            with TransactionLock.begin(engine, f"{name}:short"):
                pass
        assert len(name_recorder.recorder_of(engine)._watched) == 1
        query = "SELECT count(*) FROM pgfence_lock_name WHERE key = %s"
        eventually(lambda: admin.execute(query, [LockKey.of(name).value]).fetchone() == (1,))


@pytest.mark.usefixtures("tables")
def test_disposing_of_an_engine_ends_its_thread(name: str, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a transaction holds a lock, for whose name no connection is opened any more."""
    opened: list[object] = []
    monkeypatch.setattr(name_recorder, "LINGER", 600.0)
    engine = create_engine(make_url(dsn).set(drivername="postgresql+psycopg"), poolclass=NullPool)
    with TransactionLock.begin(engine, name):
        thread = name_recorder.recorder_of(engine)._thread
        assert thread is not None and thread.is_alive()
        event.listen(engine, "connect", lambda *_: opened.append(1))
        engine.dispose()
        eventually(lambda: not thread.is_alive())
    assert opened == []


@pytest.mark.usefixtures("tables")
def test_a_connection_that_a_creator_returns_again_is_not_touched(
    name: str, dsn: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A test suite may share one connection in this way. Its transactions and locks go on, and no name is stored."""
    for setting, seconds in (("TICK", 0.05), ("BETWEEN", 0.0), ("PAUSE", 0.0)):
        monkeypatch.setattr(name_recorder, setting, seconds)
    caplog.set_level(logging.DEBUG)
    with psycopg.connect(dsn) as shared:
        engine = create_engine("postgresql+psycopg://", creator=lambda: shared)
        with TransactionLock.begin(engine, name) as connection:
            eventually(lambda: "creator returned a connection" in caplog.text)
            assert connection.scalar(text("SELECT 1")) == 1
        caplog.clear()
        with engine.connect() as connection, AdvisoryLock(connection, name).hold():
            eventually(lambda: "creator returned a connection" in caplog.text)
            assert connection.scalar(text("SELECT 1")) == 1
            connection.commit()
        engine.dispose()


@pytest.mark.usefixtures("tables")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("handler", [None, "raises"])
def test_after_a_failure_and_a_pause_names_are_stored_again(
    name: str, engine: Engine, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, handler: str | None
) -> None:
    """Also those of a connection that was open all the time, and if a logging handler has raised an error."""
    for setting, seconds in (("TICK", 0.05), ("BETWEEN", 0.0), ("PAUSE", 0.1)):
        monkeypatch.setattr(name_recorder, setting, seconds)
    failed: list[str] = []

    def fail(message: object, *_: object) -> None:
        failed.append(str(message))
        if handler:
            raise RuntimeError(message)

    monkeypatch.setattr(name_recorder.log, "debug", fail)
    recorder = name_recorder.recorder_of(engine)
    with engine.connect() as connection:
        with monkeypatch.context() as patch:
            patch.setattr(name_recorder, "choose_background_connection", None)
            with connection.begin():
                TransactionLock(connection, f"{name}:first").acquire()
                eventually(
                    lambda: failed and not any(thread.name == "pgfence-names" for thread in threading.enumerate())
                )
        eventually(lambda: clock() > recorder._paused_until)
        with connection.begin():
            TransactionLock(connection, name).acquire()
            query = "SELECT count(*) FROM pgfence_lock_name WHERE key = %s"
            eventually(lambda: admin.execute(query, [LockKey.of(name).value]).fetchone() == (1,))


@pytest.mark.usefixtures("tables")
def test_the_exit_of_the_interpreter_ends_the_thread_between_two_names(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names that are not stored yet would keep it inside a driver while libraries are shut down."""
    seen: list[object] = []

    def exit_now(*names: object) -> None:
        seen.append(names)
        monkeypatch.setattr(PROCESS, "ending", True)

    monkeypatch.setattr(name_recorder.NameRecorder, "_store_names", exit_now)
    with TransactionLock.begin(engine, name), TransactionLock.begin(engine, f"{name}:2"):
        thread = name_recorder.recorder_of(engine)._thread
        assert thread is not None
        eventually(lambda: not thread.is_alive())
    assert len(seen) == 1


async def test_connections_of_a_pool_of_asyncpg_take_locks(name: str, dsn: str) -> None:
    """Such a connection is a proxy, of which Python makes no weak reference."""
    async with asyncpg.create_pool(make_url(dsn).render_as_string(hide_password=False)) as pool:
        engine = create_async_engine("postgresql+asyncpg://", async_creator=pool.acquire, poolclass=NullPool)
        async with AsyncTransactionLock.begin(engine, name) as connection:
            assert await connection.scalar(text("SELECT 1")) == 1
        async with engine.connect() as connection, AsyncAdvisoryLock(connection, name).hold():
            await connection.commit()
        await engine.dispose()
