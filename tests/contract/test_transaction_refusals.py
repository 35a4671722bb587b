"""What TransactionLock rejects: wrong arguments, servers and modes, and requests that would fill the lock table."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from pgfence.config import configure
from pgfence.errors import (
    CapacityError,
    LockTimeoutError,
    StandbyError,
    TransactionStateError,
    UnsupportedServerError,
)
from pgfence.keys import LockKey
from pgfence.transaction import AsyncTransactionLock, TransactionLock
from support import locking
from support.limits import set_limit
from support.transactions import connection, factory, lock, run, session, statements, value

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

pytestmark = pytest.mark.twins

# ---------------------------------------------------------------- arguments


async def test_an_engine_or_a_factory_is_pointed_to_begin(world: World, name: str) -> None:
    """A lock needs a transaction; for an engine or a factory the error names `begin`."""
    for source in (world.engine(), factory(world, world.engine())):
        with pytest.raises(TypeError, match=r"TransactionLock\.begin\(\), which opens"):
            world.pick(TransactionLock, AsyncTransactionLock)(source, name)


async def test_the_wrong_twin_is_named(world: World, name: str) -> None:
    """A sync lock rejects async sessions and connections, an async lock sync ones, and each names the other."""
    engine = world.engine()
    twin = world.pick(AsyncTransactionLock, TransactionLock)
    async with session(world, engine) as orm, connection(world, engine) as plain:
        fitting = f"use {'Async' if world.is_async else ''}TransactionLock"
        for work, way in ((orm, " for"), (plain, " for"), (engine, r"\.begin\(\)")):
            with pytest.raises(TypeError, match=fitting + way):
                twin(work, name)


@pytest.mark.matrix
@pytest.mark.parametrize("wrong", [None, "session", object(), 5])
@pytest.mark.parametrize("kind", [TransactionLock, AsyncTransactionLock])
def test_other_objects_are_rejected_with_what_to_pass(kind: Any, wrong: Any) -> None:
    """The error says what to pass, and where the other arguments belong."""
    with pytest.raises(TypeError, match=r"begin\(\)"):
        kind(wrong, "a")


async def test_a_lock_shows_its_names(world: World, name: str) -> None:
    """The repr of a lock, for logs and debuggers, contains its names."""
    async with connection(world, world.engine()) as work:
        kind = world.pick("TransactionLock", "AsyncTransactionLock")
        assert repr(lock(work, name, LockKey.raw(5))) == f"<{kind} {name!r}, 'key 5'>"


# ---------------------------------------------------------------- servers


@pytest.mark.every_driver
async def test_a_standby_is_rejected(world: World, name: str, standby: Any) -> None:
    """C046: a lock on a standby excludes no other session; with one name or several, nothing is acquired there."""
    engine = world.engine(dsn=standby.dsn)
    async with session(world, engine) as work:
        for _ in range(2):
            for names in ((name,), (name, name + ":2"), [f"{name}:{n}" for n in range(20)]):
                for call in (lock(work, *names).acquire, lock(work, *names).try_acquire):
                    with pytest.raises(StandbyError, match="primary"):
                        await world.call(call)
                    assert await world.call(lock(work, *names).holders) == []
        assert await value(world, work, "SELECT 1") == 1


def test_another_dialect_is_named() -> None:
    """SQLite raises an error that names it, instead of a lock that holds nothing."""
    with (
        create_engine("sqlite://", poolclass=NullPool).connect() as work,
        pytest.raises(UnsupportedServerError, match="sqlite"),
    ):
        TransactionLock(work, "a").acquire()


@pytest.mark.every_driver
async def test_another_driver_is_named(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown driver is rejected by name."""
    engine = world.engine()
    async with session(world, engine) as work:
        await world.call(work.connection)
        monkeypatch.setattr(engine.dialect, "driver", "pg8000")
        with statements(engine) as sent, pytest.raises(UnsupportedServerError, match="pg8000"):
            await world.call(lock(work, name).acquire)
        assert sent == []
        monkeypatch.undo()


async def test_an_old_server_is_named(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL before 14 is rejected with its version."""
    engine = world.engine()
    async with session(world, engine) as work:
        await world.call(work.connection)
        monkeypatch.setattr(engine.dialect, "server_version_info", (13, 9))
        with pytest.raises(UnsupportedServerError, match=r"13\.9"):
            await world.call(lock(work, name).acquire)


@pytest.fixture
def pooled(pgbouncer: Callable[..., str]) -> str:
    """The DSN of the test database through a PgBouncer in transaction mode."""
    return pgbouncer("transaction")


@pytest.mark.every_driver
async def test_it_works_behind_a_pooler_in_transaction_mode(world: World, name: str, pooled: str) -> None:
    """A transaction lock needs no session, so it works behind PgBouncer in transaction mode."""
    ways: dict[str, Any] = {
        "psycopg": {"prepare_threshold": None},
        "psycopg_async": {"prepare_threshold": None},
        "psycopg2": {},
        "asyncpg": {"statement_cache_size": 0, "prepared_statement_name_func": lambda: ""},
    }
    engine = world.engine(dsn=pooled, connect_args=ways[world.name])
    async with connection(world, engine) as one, connection(world, engine) as two:
        await world.call(lock(one, name, name + ":2").acquire)
        with pytest.raises(LockTimeoutError):
            await world.call(lock(two, name).acquire, timeout=0.05)
        assert await value(world, two, "SHOW lock_timeout") == "0"
        await world.call(one.commit)
        await world.call(lock(two, name).acquire)


# ---------------------------------------------------------------- modes of the connection


@pytest.mark.every_driver
@pytest.mark.parametrize("names", [1, 2])
def test_a_pipeline_is_rejected_and_holds_nothing(dsn: str, name: str, names: int, advisory_rows: Any) -> None:
    """C063: before and after a queued failure the error is the same, and pg_locks shows that nothing is held."""
    engine = create_engine(dsn.replace("postgresql", "postgresql+psycopg", 1))
    wanted = [f"{name}:{n}" for n in range(names)]
    with engine.connect() as work:
        driver: Any = work.connection.driver_connection
        with pytest.raises(psycopg.errors.UndefinedTable), driver.pipeline():
            for _ in range(2):
                with pytest.raises(TransactionStateError, match="pipeline"):
                    TransactionLock(work, *wanted).acquire()
                driver.execute("SELECT * FROM missing")
        assert advisory_rows() == []
        driver.rollback()
        TransactionLock(work, *wanted).acquire()
        assert len(advisory_rows()) == names
    engine.dispose()


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize(
    "options", [{"stream_results": True}, {"yield_per": 5}], ids=lambda options: next(iter(options))
)
async def test_options_of_the_connection_change_nothing(world: World, name: str, options: dict[str, Any]) -> None:
    """Options for server-side cursors and batches do not affect the lock's statements."""
    engine = world.engine()
    async with connection(world, engine) as holder, connection(world, engine) as work:
        await world.call(lock(holder, name + ":busy").acquire)
        await world.call(work.execution_options, **options)
        await world.call(lock(work, name, name + ":2").acquire)
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(lock(work, name + ":3", name + ":busy").acquire, timeout=0.02)
        assert len(caught.value.holders) == 1
        assert await world.call(lock(work, name).is_held)


@pytest.mark.every_driver
async def test_an_aborted_transaction_stays_the_callers_affair(world: World, name: str) -> None:
    """In an aborted transaction the request fails like every statement, and grants nothing."""
    async with session(world, world.engine()) as work:
        with pytest.raises(DBAPIError):
            await run(world, work, "SELECT 1 / 0")
        with pytest.raises(DBAPIError, match="aborted"):
            await world.call(lock(work, name).acquire)
        await world.call(work.rollback)
        await world.call(lock(work, name).acquire)


async def test_a_begin_hook_of_the_user_runs_before_the_lock(world: World, name: str) -> None:
    """What the application does at each begin is done first, also when the lock begins the transaction."""
    engine = world.engine()
    heard: list[bool] = []

    def hook(connection: Any) -> None:
        heard.append(
            connection.exec_driver_sql(
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
            ).scalar()
            == 0
        )

    event.listen(getattr(engine, "sync_engine", engine), "begin", hook)
    async with connection(world, engine) as work:
        await world.call(lock(work, name, name + ":2").acquire)
        assert heard == [True]


# ---------------------------------------------------------------- capacity


async def test_a_request_that_would_fill_the_lock_table_is_rejected(
    world: World, dsn: str, admin: psycopg.Connection[Any], advisory_rows: Any
) -> None:
    """C035: 20,000 names in one call are rejected before one is locked; DDL and new logins still work."""
    async with session(world, world.engine()) as work:
        with pytest.raises(CapacityError, match="max_locks_per_transaction") as caught:
            await world.call(lock(work, *(LockKey.raw(n) for n in range(20_000))).acquire)
        assert caught.value.limit == await value(
            world,
            work,
            "SELECT current_setting('max_locks_per_transaction')::int"
            " * (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int)",
        )
        assert caught.value.used < 1000
        assert advisory_rows() == []
        admin.execute("CREATE TABLE after_all (); DROP TABLE after_all")
        psycopg.connect(dsn).close()
        await world.call(lock(work, *(LockKey.raw(n) for n in range(500))).acquire)
        assert len(advisory_rows()) == 500


async def test_a_nearly_full_lock_table_warns_once(
    world: World, lend_server: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """C035: from 80 % on a large request says so at WARNING, once per engine."""
    server = lend_server(max_connections="20", max_locks_per_transaction="10")
    engine = world.engine(dsn=server.dsn)
    async with connection(world, engine) as work:
        for _ in range(2):
            await world.call(lock(work, *(LockKey.raw(n) for n in range(170))).acquire)
            await world.call(work.rollback)
    assert [record.levelno for record in caplog.records if "lock table" in record.getMessage()] == [logging.WARNING]


@pytest.mark.every_driver
async def test_a_full_lock_table_is_a_capacity_error(
    world: World, lend_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C035: if the lock table is full, SQLSTATE 53200 becomes a CapacityError, and nothing is left behind."""
    set_limit(monkeypatch, "MANY_KEYS", 1_000_000)
    server = lend_server(max_connections="20", max_locks_per_transaction="10")
    engine = world.engine(dsn=server.dsn)
    async with connection(world, engine) as work:
        with pytest.raises(CapacityError, match="full") as caught:
            await world.call(lock(work, *(LockKey.raw(n) for n in range(10_000))).acquire)
        assert caught.value.sqlstate == "53200"
        await world.call(work.rollback)
        assert await value(world, work, "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == 0


# ---------------------------------------------------------------- beside session locks


@pytest.mark.matrix
@pytest.mark.parametrize(("default", "limit"), [(3600, 0.05), (float("inf"), 0.05), (0.02, 0.02)])
async def test_the_default_is_cut_while_a_session_lock_is_held(
    world: World, name: str, default: float, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server sees a deadlock between a session lock and this wait, so a long default is cut; the error names both locks."""
    set_limit(monkeypatch, "NESTED_LIMIT", 0.05)
    engine, outer = world.engine(), f"{name}:outer"
    configure(engine, default_timeout=default)
    async with world.enter(locking.lock(world, engine, outer).hold(timeout=20)):
        async with connection(world, engine) as holder, connection(world, engine) as work:
            await world.call(lock(holder, name).acquire)
            with pytest.raises(LockTimeoutError, match=outer) as caught:
                await world.call(lock(work, name).acquire)
    assert (caught.value.timeout, caught.value.held_here) == (limit, (outer,))


def test_a_session_of_several_engines_needs_no_bind(dsn: str, name: str) -> None:
    """A Session bound to a Connection locks on that very connection."""
    engine = create_engine(dsn.replace("postgresql", "postgresql+psycopg", 1))
    with engine.connect() as work, Session(work) as orm:
        TransactionLock(orm, name).acquire()
        assert (
            TransactionLock(work, name).holders()[0].backend_pid
            == work.exec_driver_sql("SELECT pg_backend_pid()").scalar()
        )
    engine.dispose()
