"""TransactionLock waits in the server, within its timeout, and changes no setting of the caller's transaction."""

from __future__ import annotations

import asyncio
import pickle
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import DBAPIError

from pgfence.config import configure
from pgfence.errors import DeadlockError, LockTimeoutError, PgfenceError
from pgfence.keys import LockKey
from support.limits import set_limit
from support.locking import limited
from support.rows import every_row
from support.transactions import connection, lock, run, session, statements, value
from support.waiting import FAR

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from support.worlds import World


@pytest.fixture
def journal(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of one column, n."""
    admin.execute("CREATE TABLE journal (n int)")
    yield "journal"
    admin.execute("DROP TABLE journal")


async def waits(advisory_rows: Any, eventually: Any) -> None:
    await eventually(lambda: [row for row in advisory_rows() if not row.granted])


# ---------------------------------------------------------------- timeouts


@pytest.mark.matrix
@pytest.mark.parametrize("names", [1, 3])
async def test_a_timeout_leaves_the_transaction_usable(world: World, name: str, journal: str, names: int) -> None:
    """C038: write, time out, write again, commit: both rows are there, and the wait took as long as was asked for."""
    engine = world.engine()
    wanted = [f"{name}:{n}" for n in range(names)]
    async with connection(world, engine) as holder, session(world, engine) as work:
        await world.call(lock(holder, wanted[-1]).acquire)
        await run(world, work, f"INSERT INTO {journal} VALUES (1)")
        began = time.monotonic()
        with pytest.raises(LockTimeoutError):
            await world.call(lock(work, *wanted).acquire, timeout=0.2)
        assert 0.2 <= time.monotonic() - began < FAR
        await run(world, work, f"INSERT INTO {journal} VALUES (2)")
        await world.call(work.commit)
        assert await value(world, work, f"SELECT count(*) FROM {journal}") == 2


@pytest.mark.twins
async def test_a_timeout_of_the_first_statement_keeps_the_transaction_usable(
    world: World, name: str, journal: str
) -> None:
    """C038: the same where the lock came first; then the writes follow in the very transaction that was begun."""
    engine = world.engine()
    async with connection(world, engine) as holder, connection(world, engine) as work:
        await world.call(lock(holder, name).acquire)
        for wanted in ((name,), ("a" + name, name)):
            with pytest.raises(LockTimeoutError):
                await world.call(lock(work, *wanted).acquire, timeout=0.05)
            assert work.in_transaction()
        await run(world, work, f"INSERT INTO {journal} VALUES (1)")
        await world.call(work.commit)
        assert await value(world, work, f"SELECT count(*) FROM {journal}") == 1


@pytest.mark.twins
async def test_the_timeout_holds_for_all_names_together(world: World, advisory_rows: Any, eventually: Any) -> None:
    """`lock_timeout` counts per lock: a wait for two busy names still ends when the caller's time is over."""
    engine = world.engine()
    first, second, waiter = LockKey.raw(1), LockKey.pair(1, 1), world.other()
    async with (
        connection(world, engine) as one,
        connection(world, engine) as two,
        connection(world, engine, waiter) as work,
    ):
        await world.call(lock(one, first).acquire)
        await world.call(lock(two, second).acquire)
        began = time.monotonic()
        waiting = asyncio.create_task(waiter.call(lock(work, first, second).acquire, timeout=2))
        await waits(advisory_rows, eventually)
        await eventually(lambda: time.monotonic() - began > 1.5)
        await world.call(one.rollback)
        freed = time.monotonic()
        with pytest.raises(LockTimeoutError) as caught:
            await waiting
        assert began + 2 <= time.monotonic() < freed + 2, "the wait for the second name had a time limit of its own"
        assert [holder.key for holder in caught.value.holders] == [second]


@pytest.mark.twins
async def test_the_configured_default_holds_where_no_timeout_is_given(world: World, name: str) -> None:
    """`timeout=None` means the engine's default_timeout."""
    engine = world.engine()
    configure(engine, default_timeout=0.1)
    async with connection(world, engine) as holder, connection(world, engine) as work:
        await world.call(lock(holder, name).acquire)
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(lock(work, name).acquire)
        assert caught.value.timeout == 0.1


@pytest.mark.twins
@every_row("wrong", [-1, float("nan"), True, "2"])
async def test_an_invalid_timeout_is_rejected_before_anything_is_sent(world: World, name: str, wrong: Any) -> None:
    """A timeout that is neither a number of 0 or more nor a timedelta is rejected."""
    engine = world.engine()
    async with session(world, engine) as work:
        with statements(engine) as sent, pytest.raises((TypeError, ValueError)):
            await world.call(lock(work, name).acquire, timeout=wrong)
        assert sent == []


async def test_a_timeout_names_the_holder_and_can_be_pickled(world: World, name: str) -> None:
    """The error carries names, keys, timeout and holders, its message names one, and it survives a pickle."""
    engine = world.engine(connect_args={"server_settings": {"application_name": "billing"}} if world.driver == "asyncpg"
                          else {"application_name": "billing"})  # fmt: skip
    async with connection(world, engine) as holder, connection(world, engine) as work:
        await world.call(lock(holder, name).acquire)
        with pytest.raises(LockTimeoutError, match="billing") as caught:
            await world.call(lock(work, name, "z" + name).acquire, timeout=0.02)
        error = pickle.loads(pickle.dumps(caught.value))
        for one in (caught.value, error):
            assert set(one.names) == {name, "z" + name}
            assert set(one.keys) == {LockKey.of(name), LockKey.of("z" + name)}
            assert one.timeout == 0.02
            assert [(found.name, found.application_name, found.kind) for found in one.holders] == [
                (name, "billing", "advisory")
            ]
        assert str(error) == str(caught.value)


@pytest.mark.twins
async def test_a_long_wait_is_logged(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait of more than 30 s, here of less, says so at WARNING with its name, age and holder; a short one is silent."""
    engine = world.engine()
    async with connection(world, engine) as holder, connection(world, engine) as work:
        await world.call(lock(holder, name).acquire)
        for limit, told in ((30, 0), (0.01, 1)):
            set_limit(monkeypatch, "WARN_AFTER", limit)
            with pytest.raises(LockTimeoutError):
                await world.call(lock(work, name).acquire, timeout=0.05)
            assert [
                name in record.getMessage() and "backend" in record.getMessage() for record in caplog.records
            ] == told * [True]


# ---------------------------------------------------------------- the site's own limits


HOSTILE = {"statement_timeout": "300ms", "lock_timeout": "200ms"}


@pytest.mark.matrix
@pytest.mark.parametrize("names", [1, 2])
async def test_the_limit_asked_for_rules_over_the_sites_own(
    world: World, name: str, names: int, advisory_rows: Any, eventually: Any
) -> None:
    """C039: a wait lasts to its own deadline despite shorter limits of the site, which apply again afterwards."""
    engine = limited(world, HOSTILE)
    wanted = [f"{name}:{n}" for n in range(names)]
    waiter = world.other()
    async with connection(world, world.engine()) as holder, connection(world, engine, waiter) as work:
        await world.call(lock(holder, *wanted).acquire)
        waiting = asyncio.create_task(waiter.call(lock(work, *wanted).acquire, timeout=10))
        await waits(advisory_rows, eventually)
        began = time.monotonic()
        await eventually(lambda: time.monotonic() - began > 0.6)
        assert not waiting.done()
        await world.call(holder.rollback)
        await waiting
        assert [await value(waiter, work, f"SHOW {setting}") for setting in HOSTILE] == list(HOSTILE.values())
        with pytest.raises(DBAPIError, match="statement timeout"):
            await run(waiter, work, "SELECT pg_sleep(10)")


@pytest.mark.matrix
@pytest.mark.parametrize("names", [1, 2])
async def test_a_timeout_longer_than_the_sites_own_is_kept(world: World, name: str, names: int) -> None:
    """C039: never free, the wait ends with our timeout at our deadline, and the site's limits are in force again."""
    engine = limited(world, HOSTILE)
    wanted = [f"{name}:{n}" for n in range(names)]
    async with connection(world, world.engine()) as holder, connection(world, engine) as work:
        await world.call(lock(holder, *wanted).acquire)
        await run(world, work, "SELECT 1")
        began = time.monotonic()
        with pytest.raises(LockTimeoutError):
            await world.call(lock(work, *wanted).acquire, timeout=0.7)
        assert 0.7 <= time.monotonic() - began < FAR
        assert [await value(world, work, f"SHOW {setting}") for setting in HOSTILE] == list(HOSTILE.values())
        with pytest.raises(DBAPIError, match="statement timeout"):
            await run(world, work, "SELECT pg_sleep(10)")


async def test_a_wait_for_ever_has_no_limit_of_anybody(
    world: World, name: str, advisory_rows: Any, eventually: Any
) -> None:
    """C039: `math.inf` waits despite the limits that are set for the role."""
    engine, waiter = limited(world, HOSTILE), world.other()
    async with connection(world, world.engine()) as holder, connection(world, engine, waiter) as work:
        await world.call(lock(holder, name).acquire)
        waiting = asyncio.create_task(waiter.call(lock(work, name).acquire, timeout=float("inf")))
        await waits(advisory_rows, eventually)
        began = time.monotonic()
        await eventually(lambda: time.monotonic() - began > 0.6)
        await world.call(holder.rollback)
        await waiting


async def test_settings_of_the_transaction_survive_every_outcome(
    world: World, name: str, advisory_rows: Any, eventually: Any
) -> None:
    """What the caller had set is set after a grant, a granted wait and a timeout, and after rolling back to a savepoint."""
    engine, waiter = world.engine(), world.other()

    async def settings() -> list[str]:
        return [await value(waiter, work, f"SHOW {one}") for one in ("lock_timeout", "statement_timeout")]

    async with connection(world, engine) as holder, connection(world, engine, waiter) as work:
        await world.call(lock(holder, name).acquire)
        await run(waiter, work, "SET LOCAL lock_timeout = '1234ms'")
        await run(waiter, work, "SET LOCAL statement_timeout = '4321ms'")
        mine = await settings()
        assert mine == ["1234ms", "4321ms"]
        await waiter.call(lock(work, name + ":free").acquire)
        assert await settings() == mine
        with pytest.raises(LockTimeoutError):
            await waiter.call(lock(work, name).acquire, timeout=0.05)
        assert await settings() == mine
        await run(waiter, work, "SAVEPOINT before")
        waiting = asyncio.create_task(waiter.call(lock(work, name).acquire, timeout=10))
        await waits(advisory_rows, eventually)
        await world.call(holder.rollback)
        await waiting
        assert await settings() == mine
        await run(waiter, work, "ROLLBACK TO before")
        assert await settings() == mine
        await waiter.call(work.commit)
        assert await settings() == ["0", "0"]


# ---------------------------------------------------------------- other ends of a wait


async def test_a_deadlock_with_a_row_lock_raises_deadlock_error(
    world: World, name: str, journal: str, admin: psycopg.Connection[Any], advisory_rows: Any, eventually: Any
) -> None:
    """In a deadlock of a lock and a row, the server aborts one transaction, and the other continues."""
    engine, mine, theirs = world.engine(), world.other(), world.other()
    admin.execute(f"INSERT INTO {journal} VALUES (0)")
    async with connection(world, engine, mine) as work, connection(world, engine, theirs) as other:
        await run(mine, work, "SET LOCAL deadlock_timeout = '100ms'")
        await run(theirs, other, "SET LOCAL deadlock_timeout = '1min'")
        await run(mine, work, f"UPDATE {journal} SET n = 1")
        await theirs.call(lock(other, name).acquire)
        waiting = asyncio.create_task(run(theirs, other, f"UPDATE {journal} SET n = 2"))
        await eventually(lambda: admin.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone())
        with pytest.raises(DeadlockError) as caught:
            await mine.call(lock(work, name).acquire, timeout=20)
        assert caught.value.sqlstate == "40P01"
        assert caught.value.retryable
        with pytest.raises(DBAPIError, match="aborted"):
            await run(mine, work, "SELECT 1")
        await mine.call(work.rollback)
        await waiting
        await theirs.call(other.commit)
        assert admin.execute(f"SELECT n FROM {journal}").fetchone() == (2,)


async def test_a_lost_connection_is_the_callers_own_error(
    world: World, name: str, admin: psycopg.Connection[Any], advisory_rows: Any, eventually: Any
) -> None:
    """A backend killed in mid-wait is SQLAlchemy's error, never a grant and never a timeout; the session recovers."""
    engine, waiter = world.engine(), world.other()
    async with connection(world, engine) as holder, connection(world, engine, waiter) as work:
        await world.call(lock(holder, name).acquire)
        waiting = asyncio.create_task(waiter.call(lock(work, name).acquire, timeout=20))
        await waits(advisory_rows, eventually)
        (pid,) = [row.pid for row in advisory_rows() if not row.granted]
        admin.execute("SELECT pg_terminate_backend(%s)", [pid])
        with pytest.raises(DBAPIError) as caught:
            await waiting
        assert caught.value.connection_invalidated
        assert not isinstance(caught.value, PgfenceError)
        await waiter.call(work.rollback)
        await world.call(holder.rollback)
        assert await waiter.call(lock(work, name).try_acquire)


async def test_a_killed_holder_is_forgotten(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """After a lost connection the new transaction requests the same lock again."""
    engine = world.engine()
    async with session(world, engine) as work:
        await world.call(lock(work, name).acquire)
        pid = await value(world, work, "SELECT pg_backend_pid()")
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        with pytest.raises(DBAPIError):
            await run(world, work, "SELECT 1")
        await world.call(work.rollback)
        with statements(engine) as sent:
            await world.call(lock(work, name).acquire)
        assert len(sent) == 1
        assert await world.call(lock(work, name).is_held)


@pytest.mark.async_only
async def test_a_cancelled_wait_leaves_nothing(world: World, name: str, advisory_rows: Any, eventually: Any) -> None:
    """A task cancelled in mid-wait loses its connection, and so neither waits nor holds."""
    engine, waiter = world.engine(), world.other()
    async with connection(world, engine) as holder, connection(world, engine, waiter) as work:
        await world.call(lock(holder, name).acquire)
        waiting = asyncio.create_task(waiter.call(lock(work, name).acquire, timeout=20))
        await waits(advisory_rows, eventually)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually(lambda: len(advisory_rows()) == 1)
        await world.call(holder.rollback)
        assert advisory_rows() == []
