"""The migration lock alone: who has it, what is left on the connection, what is rejected."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import Connection, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from pgfence import LockKey
from pgfence._sql.migration_lock import UNSEEN, Doing, describe_sessions
from pgfence.errors import LockLostError, LockTimeoutError, TransactionStateError, UnsupportedServerError
from pgfence.migrations import _session, migration_lock
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

SETTINGS = text(
    "SELECT string_agg(name || '=' || setting, ' ' ORDER BY name) FROM pg_settings"
    " WHERE name ~ 'timeout|keepalive|check_interval|^default_transaction|^transaction_isolation'"
)
HELD = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND pid = %s"


async def on(world: World, work: Callable[[Connection], Any], **options: Any) -> Any:
    """Call a function with a new Connection of the world's driver, as env.py does."""
    engine = world.engine(**options)

    def here() -> Any:
        with engine.connect() as connection:
            return work(connection)

    async def there() -> Any:
        async with engine.connect() as connection:
            return await connection.run_sync(work)

    return await world.call(world.pick(here, there))


def pid_of(connection: Connection) -> int:
    pid: int = connection.scalar(text("SELECT pg_backend_pid()"))  # type: ignore[assignment]
    connection.rollback()
    return pid


def locks(admin: psycopg.Connection[Any], pid: int) -> int:
    return admin.execute(HELD, [pid]).fetchone()[0]  # type: ignore[index]


def state(admin: psycopg.Connection[Any], pid: int) -> Any:
    row = admin.execute("SELECT state, backend_xmin FROM pg_stat_activity WHERE pid = %s", [pid])
    return row.fetchone()


@pytest.fixture
def key(name: str) -> LockKey:
    return LockKey.of(name)


async def test_it_is_held_across_commits_and_leaves_the_connection_unchanged(
    world: World, admin: psycopg.Connection[Any], key: LockKey
) -> None:
    """C051: transactions come and go inside; no transaction is open at first; afterwards nothing is held or set otherwise."""

    def work(connection: Connection) -> None:
        pid, before = pid_of(connection), connection.scalar(SETTINGS)
        connection.rollback()
        with migration_lock(connection, key=key):
            assert not connection.in_transaction()
            assert state(admin, pid) == ("idle", None)
            for _ in range(2):
                with connection.begin():
                    connection.execute(text("CREATE TEMPORARY TABLE IF NOT EXISTS t (x int)"))
                assert locks(admin, pid) == 1
        assert locks(admin, pid) == 0
        assert not connection.in_transaction()
        assert connection.scalar(SETTINGS) == before
        assert connection.scalar(text("SELECT count(*) FROM t")) == 0

    await on(world, work, isolation_level="REPEATABLE READ")


async def test_it_is_released_after_a_failed_migration(
    world: World, admin: psycopg.Connection[Any], key: LockKey
) -> None:
    """Its own error is what is raised, its transaction is rolled back, and the connection can be used."""

    def work(connection: Connection) -> None:
        pid = pid_of(connection)
        with pytest.raises(Exception, match="no_such_table"):
            with migration_lock(connection, key=key), connection.begin():
                connection.execute(text("CREATE TEMPORARY TABLE t (x int)"))
                connection.execute(text("SELECT * FROM no_such_table"))
        assert locks(admin, pid) == 0
        assert connection.scalar(text("SELECT to_regclass('pg_temp.t')")) is None

    await on(world, work)


async def test_a_timeout_names_the_session_and_its_statement_and_harms_nothing(
    world: World, dsn: str, admin: psycopg.Connection[Any], key: LockKey, caplog: pytest.LogCaptureFixture
) -> None:
    """C040: pid, application name and query of who migrates, in the error and in the log; the connection is as it was."""
    caplog.set_level(logging.INFO, "pgfence.migrations")

    def work(connection: Connection) -> None:
        before = connection.scalar(SETTINGS)
        connection.rollback()
        with psycopg.connect(dsn, autocommit=True, application_name="the-other-pod") as other:
            other.execute("SELECT pg_advisory_lock(%s)", [key.value])
            other.execute("SELECT 'building'")
            with pytest.raises(LockTimeoutError) as caught:
                migration_lock(connection, key=key, timeout=0.3).__enter__()
            pid = other.info.backend_pid
        assert [holder.backend_pid for holder in caught.value.holders] == [pid]
        for said in (str(caught.value), caplog.text):
            assert "the-other-pod" in said
            assert str(pid) in said
            assert "SELECT 'building'" in said
        assert connection.scalar(SETTINGS) == before
        assert locks(admin, pid_of(connection)) == 0

    await on(world, work)


async def test_a_holder_has_a_name(world: World, admin: psycopg.Connection[Any], key: LockKey) -> None:
    """Waiters see a name while the lock is held. An `application_name` that is set, also inside the block, is kept."""
    ours = f"migration (pid {os.getpid()} on {socket.gethostname()})"
    seen = "SELECT application_name FROM pg_stat_activity WHERE pid = %s"

    def work(connection: Connection) -> None:
        pid = pid_of(connection)
        for before, inside, after in (("", ours[:63], ""), ("100% 'mine'", "100% 'mine'", "100% 'mine'")):
            connection.execute(text("SELECT set_config('application_name', :name, false)"), {"name": before})
            connection.commit()
            with migration_lock(connection, key=key):
                assert admin.execute(seen, [pid]).fetchone() == (inside,)
            assert connection.scalar(text("SHOW application_name")) == after
            connection.rollback()
        with migration_lock(connection, key=key), connection.begin():
            connection.execute(text("SET application_name = 'theirs'"))
        assert connection.scalar(text("SHOW application_name")) == "theirs"

    await on(world, work)


async def test_ddl_that_timed_out_names_the_holders_of_table_locks(world: World, dsn: str, key: LockKey) -> None:
    """A note with table, application, process and last statement of the transaction that kept an ALTER TABLE waiting."""
    table = f"t{abs(key.value)}"

    def work(connection: Connection) -> None:
        with connection.begin():
            connection.execute(text(f"CREATE TABLE {table} (x int)"))
        with psycopg.connect(dsn, application_name="the-report") as other:
            other.execute(f"SELECT FROM {table}".encode())
            with pytest.raises(DBAPIError) as caught, migration_lock(connection, key=key), connection.begin():
                connection.execute(text("SET LOCAL lock_timeout = '50ms'"))
                connection.execute(text(f"ALTER TABLE {table} ADD y int"))
            note = caught.value.__notes__[-1]
            assert f"the-report (backend {other.info.backend_pid}) on {table}: idle in transaction" in note
        with connection.begin():
            connection.execute(text(f"DROP TABLE {table}"))

    await on(world, work)


async def test_limits_of_the_site_end_no_wait_and_hold_for_what_migrates(world: World, dsn: str, key: LockKey) -> None:
    """statement_timeout and lock_timeout are shorter than the wait, and in the block as they were; what ends idle ones is off."""
    limits = "statement_timeout=250", "lock_timeout=100", "idle_session_timeout=60000"
    show = text(
        "SELECT string_agg(setting, ' ' ORDER BY name) FROM pg_settings WHERE name ~ '^(stat|lock|idle_s).*_timeout'"
    )

    def work(connection: Connection) -> None:
        for limit in limits:
            connection.execute(text(f"SET {limit}"))
        connection.commit()
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute("SELECT pg_advisory_lock(%s)", [key.value])
            with pytest.raises(LockTimeoutError):
                migration_lock(connection, key=key, timeout=0.6).__enter__()
        with migration_lock(connection, key=key), connection.begin():
            assert connection.scalar(show) == "0 100 250"
        assert connection.scalar(show) == "60000 100 250"

    await on(world, work)


async def test_the_settings_of_a_holder_cost_two_statements(world: World, key: LockKey) -> None:
    """The lock itself is taken through the driver, like any lock on a connection of the caller."""
    asked: list[str] = []

    def work(connection: Connection) -> None:
        event.listen(connection.engine, "before_cursor_execute", lambda *what: asked.append(what[2]))
        with migration_lock(connection, key=key):
            assert len(asked) == 1
        assert len(asked) == 2

    await on(world, work)


@pytest.mark.twins
async def test_settings_changed_between_two_locks_are_restored(world: World, key: LockKey) -> None:
    """What was learnt of the connection for the first lock is not what the second one puts back."""

    def work(connection: Connection) -> None:
        with migration_lock(connection, key=key):
            pass
        connection.execute(text("SET idle_session_timeout = 60000"))
        connection.commit()
        with migration_lock(connection, key=key):
            assert connection.scalar(text("SHOW idle_session_timeout")) == "0"
        assert connection.scalar(text("SHOW idle_session_timeout")) == "1min"

    await on(world, work)


@pytest.mark.twins
async def test_a_lock_that_this_thread_holds_is_waited_for_until_the_timeout(
    world: World, dsn: str, key: LockKey, admin: psycopg.Connection[Any]
) -> None:
    """A second connection of the same thread or task waits like another process; the first one is unaffected."""

    def work(connection: Connection) -> None:
        pid = pid_of(connection)
        with migration_lock(connection, key=key):
            other = Connection(connection.engine)
            with pytest.raises(LockTimeoutError, match=str(pid)):
                migration_lock(other, key=key, timeout=0.3).__enter__()
            other.close()
            assert locks(admin, pid) == 1

    await on(world, work)


async def test_a_transaction_on_entering_is_rejected(world: World, key: LockKey) -> None:
    """C050: Alembic would treat it as external, commit nothing, and reject autocommit_block()."""

    def work(connection: Connection) -> None:
        connection.execute(text("SELECT 1"))
        with pytest.raises(TransactionStateError, match="right after connect"):
            migration_lock(connection, key=key).__enter__()

    await on(world, work)


async def test_what_it_returns_is_entered_once(world: World, key: LockKey) -> None:
    """Entered again, one after the other or nested, it raises, and the first block continues."""

    def work(connection: Connection) -> None:
        lock = migration_lock(connection, key=key)
        with lock, pytest.raises(TransactionStateError, match="already entered"):
            lock.__enter__()
        with pytest.raises(TransactionStateError, match="already entered"):
            lock.__enter__()

    await on(world, work)


async def test_an_uncommitted_write_is_reported_and_a_read_is_not(
    world: World, admin: psycopg.Connection[Any], key: LockKey
) -> None:
    """Otherwise all DDL would be lost silently; the lock is still released."""

    def work(connection: Connection) -> None:
        pid = pid_of(connection)
        with migration_lock(connection, key=key):
            connection.execute(text("SELECT 1"))
        with pytest.raises(TransactionStateError, match="rolled back"), migration_lock(connection, key=key):
            connection.execute(text("CREATE TABLE pg_temp.t (x int)"))
        assert locks(admin, pid) == 0
        assert not connection.in_transaction()

    await on(world, work)


async def test_a_connection_in_autocommit_needs_no_commit(world: World, key: LockKey) -> None:
    """With isolation_level AUTOCOMMIT nothing is open at the end, and the mode stays."""

    def work(connection: Connection) -> None:
        with migration_lock(connection, key=key):
            connection.execute(text("CREATE TEMPORARY TABLE t (x int)"))
        connection.rollback()
        assert connection.scalar(text("SELECT count(*) FROM t")) == 0

    await on(world, work, isolation_level="AUTOCOMMIT")


async def test_a_lock_that_was_unlocked_inside_raises(world: World, key: LockKey) -> None:
    """pg_advisory_unlock_all and DISCARD ALL take it away; the block does not end as if all had been well."""

    def work(connection: Connection) -> None:
        with pytest.raises(LockLostError, match="released all its locks"), migration_lock(connection, key=key):
            with connection.begin():
                connection.execute(text("SELECT pg_advisory_unlock_all()"))

    await on(world, work)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_no_statement_reaches_another_session_after_a_loss(
    world: World, admin: psycopg.Connection[Any], key: LockKey
) -> None:
    """SQLAlchemy would reconnect silently and migrate on without the lock."""

    def work(connection: Connection) -> None:
        pid = pid_of(connection)
        with pytest.raises(LockLostError), migration_lock(connection, key=key):
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            with pytest.raises(DBAPIError):
                connection.execute(text("SELECT 1"))
            with suppress(Exception):
                connection.rollback()
            with pytest.raises(LockLostError):
                connection.execute(text("SELECT 1"))

    await on(world, work)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_a_session_that_ends_in_the_block_loses_the_lock(
    world: World, admin: psycopg.Connection[Any], key: LockKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the driver says of it, from SQLAlchemy or from a listener's own cursor, is the cause; another error says more."""

    def ask(connection: Connection) -> None:
        cursor = connection.connection.cursor()
        cursor.execute("SET LOCAL lock_timeout = 1000")
        cursor.close()

    def lost(connection: Connection, listener: Callable[[Connection], None]) -> None:
        pid = pid_of(connection)
        with pytest.raises(LockLostError, match="has ended") as caught, migration_lock(connection, key=key):
            event.listen(connection, "begin", listener)
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            connection.execute(text("SELECT 1"))
        assert caught.value.__cause__ is not None

    def failed(connection: Connection) -> None:
        pid = pid_of(connection)
        with pytest.raises(LookupError), migration_lock(connection, key=key):
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            raise LookupError

    def lost_at_the_end(connection: Connection, *, begun: bool) -> None:
        pid = pid_of(connection)
        with pytest.raises(LockLostError, match="has ended"), migration_lock(connection, key=key):
            if begun:
                connection.execute(text("SELECT 1"))
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])

    def lost_during_the_release(connection: Connection) -> None:
        pid, restore = pid_of(connection), _session.server.restore

        def end_and_restore(own: Connection, settings: dict[str, str]) -> None:
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
            restore(own, settings)

        with pytest.raises(LockLostError, match="has ended"), migration_lock(connection, key=key):
            monkeypatch.setattr(_session.server, "restore", end_and_restore)

    await on(world, lambda connection: lost(connection, lambda _: None))
    await on(world, lambda connection: lost(connection, ask))
    await on(world, failed)
    await on(world, lambda connection: lost_at_the_end(connection, begun=False))
    await on(world, lambda connection: lost_at_the_end(connection, begun=True))
    await on(world, lost_during_the_release)


async def test_a_waiter_holds_back_no_concurrent_index(
    world: World, admin: psycopg.Connection[Any], key: LockKey, name: str
) -> None:
    """C049, C052: beside a waiter, under REPEATABLE READ or SERIALIZABLE, the index is built; the waiter never idles in a transaction."""
    table = f"t_{key.value}"
    there = "SELECT state FROM pg_stat_activity WHERE application_name = %s"
    asking = f"{there} AND query LIKE '%%advisory%%'"
    seen: set[str] = set()
    held = threading.Event()

    def holder(connection: Connection) -> None:
        with migration_lock(connection, key=key):
            with connection.begin():
                connection.execute(text(f'CREATE TABLE "{table}" AS SELECT g AS x FROM generate_series(1, 1000) AS g'))
            held.set()
            blocking(lambda: admin.execute(asking, [table]).fetchone())
            connection.execution_options(isolation_level="AUTOCOMMIT")
            for number in range(3):
                connection.execute(text(f'CREATE INDEX CONCURRENTLY "{table}_{number}" ON "{table}" (x)'))
                seen.update(row[0] for row in admin.execute(there, [table]))

    def waiter(connection: Connection) -> None:
        assert held.wait(10)
        with migration_lock(connection, key=key, timeout=20):
            valid = text("SELECT count(*) FROM pg_index WHERE indisvalid AND indrelid = CAST(:name AS regclass)")
            assert connection.scalar(valid, {"name": f'"{table}"'}) == 3

    arguments = (
        {"server_settings": {"application_name": table}} if world.name == "asyncpg" else {"application_name": table}
    )
    try:
        await asyncio.gather(
            asyncio.to_thread(_run, world, holder), asyncio.to_thread(_run, world, waiter, connect_args=arguments)
        )
    finally:
        admin.execute(f'DROP TABLE IF EXISTS "{table}"'.encode())
    assert seen
    assert "idle in transaction" not in seen


def _run(world: World, work: Callable[[Connection], Any], **options: Any) -> None:
    """Run work in a separate thread, with a separate loop for an async driver; transactions hold a snapshot."""
    options["isolation_level"] = "SERIALIZABLE" if world.name in ("psycopg2", "psycopg_async") else "REPEATABLE READ"
    if not world.is_async:
        engine = create_engine(world.url, **options)
        with engine.connect() as connection:
            work(connection)
        engine.dispose()
        return

    async def there() -> None:
        from sqlalchemy.ext.asyncio import create_async_engine

        engine = create_async_engine(world.url, **options)
        async with engine.connect() as connection:
            await connection.run_sync(work)
        await engine.dispose()

    asyncio.run(there())


def test_the_default_keys_of_two_schemas_are_two_locks(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C030: version tables in two schemas migrate side by side, one of them only once at a time."""
    from pgfence.migrations import _command

    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")

    def table(schema: str) -> None:
        monkeypatch.setattr(_command, "find_version_table", lambda: _command.VersionTable("alembic_version", schema))

    with engine.connect() as one, engine.connect() as two:
        table("tenant_a")
        with migration_lock(one, timeout=0):
            with pytest.raises(LockTimeoutError, match=r"tenant_a\.alembic_version"):
                migration_lock(two, timeout=0).__enter__()
            table("tenant_b")
            with migration_lock(two, timeout=0):
                pass
    engine.dispose()


def test_another_database_is_skipped_or_rejected(caplog: pytest.LogCaptureFixture) -> None:
    """On SQLite, in tests, it says so in the log and does nothing, unless it is asked to raise."""
    caplog.set_level(logging.INFO, "pgfence.migrations")
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        with migration_lock(connection):
            assert not connection.in_transaction()
        assert "no migration lock was acquired: sqlite" in caplog.text
        with pytest.raises(UnsupportedServerError):
            migration_lock(connection, unsupported="raise").__enter__()
    engine.dispose()


def test_wrong_arguments_are_type_errors() -> None:
    """An engine, a name instead of a key, an unknown option, an impossible time."""
    engine = create_engine("sqlite://")
    with pytest.raises(TypeError, match="takes the Connection"):
        migration_lock(engine)  # type: ignore[arg-type]
    with engine.connect() as connection:
        with pytest.raises(TypeError, match="must be a LockKey"):
            migration_lock(connection, key="migrations")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'skip' or 'raise'"):
            migration_lock(connection, unsupported="ignore")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="0 or more"):
            migration_lock(connection, timeout=-1)
    engine.dispose()


def test_the_activity_of_a_session_is_described(dsn: str, admin: psycopg.Connection[Any]) -> None:
    """Also that of a session that has executed nothing. A session that has ended is omitted."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with psycopg.connect(dsn) as fresh, psycopg.connect(dsn) as ended, engine.connect() as connection:
        pids = fresh.info.backend_pid, ended.info.backend_pid
        ended.close()
        blocking(lambda: not admin.execute("SELECT FROM pg_stat_activity WHERE pid = %s", [pids[1]]).fetchall(), 40)
        found = describe_sessions(connection, pids)
        assert {pid: str(doing) for pid, doing in found.items()} == {pids[0]: "idle"}
    engine.dispose()
    assert str(Doing(1, None, None, "<insufficient privilege>")) == UNSEEN
