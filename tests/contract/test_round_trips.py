"""How often a transaction waits for the server: BEGIN shares a round trip with the first statement of pgfence."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError, OperationalError

from pgfence import AsyncTransactionLock, TransactionLock
from pgfence.errors import StaleFencingTokenError
from pgfence.fence import fence
from support.fences import guarded, overtake
from support.leases import lease
from support.moments import SoftLimit, Stop, interrupted, torn_connections
from support.proxy import CountingProxy
from support.transactions import connection, lock, run, session, sqlstate_of, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.worlds import World

pytestmark = [pytest.mark.usefixtures("tables")]

PIPELINED = ("psycopg", "psycopg_async")
WARM = 8  # statements are prepared by then
PREPARED = "SELECT count(*) FROM pg_prepared_statements WHERE strpos(statement, 'try_' || 'advisory') > 0"
UPDATE = "UPDATE {} SET amount = amount + 1 WHERE id = 1"


@pytest.fixture
def counting(dsn: str) -> Iterator[CountingProxy]:
    proxy = CountingProxy(dsn)
    yield proxy
    proxy.close()


async def count(counting: CountingProxy, work: Callable[[], Any]) -> int:
    """Return the round trips of a piece of work that has run before."""
    for _ in range(WARM):
        await work()
    before = counting.trips
    await work()
    return counting.trips - before


def listen(engine: Any, what: str, heard: Callable[..., None]) -> None:
    event.listen(getattr(engine, "sync_engine", engine), what, heard)


# ---------------------------------------------------------------- counted


@pytest.mark.every_driver
async def test_a_lock_and_one_update_cost_three_round_trips(
    world: World, name: str, admin: psycopg.Connection[Any], dsn: str, counting: CountingProxy
) -> None:
    """One for BEGIN with the lock, one for the UPDATE, one for COMMIT; other drivers send BEGIN separately."""
    engine, begin = world.engine(dsn=counting.dsn), world.pick(TransactionLock, AsyncTransactionLock).begin
    with guarded(admin, dsn, name) as table:
        admin.execute(f"DROP TRIGGER pgfence_fence ON {table}".encode())
        for names in ([name], [name, name + "2"]):

            async def work(names: Any = names) -> None:
                async with world.enter(begin(engine, *names)) as inside:
                    await world.call(inside.execute, text(UPDATE.format(table)))

            assert await count(counting, work) == (3 if world.name in PIPELINED else 4)


@pytest.mark.every_driver
async def test_a_fenced_update_costs_three_round_trips(
    world: World, name: str, admin: psycopg.Connection[Any], dsn: str, counting: CountingProxy
) -> None:
    """One for BEGIN with the gate, one for the UPDATE, one for COMMIT; other drivers send BEGIN separately."""
    engine = world.engine(dsn=counting.dsn)
    with guarded(admin, dsn, name) as table:
        async with world.enter(lease(world, world.engine(), name).hold()) as held:

            async def work() -> None:
                async with world.enter(held.begin(engine)) as inside:
                    await world.call(inside.execute, text(UPDATE.format(table)))

            assert await count(counting, work) == (3 if world.name in PIPELINED else 4)


@pytest.mark.every_driver
async def test_a_lock_first_in_a_session_shares_the_trip_of_begin(
    world: World, name: str, counting: CountingProxy
) -> None:
    """In a Session too, a lock shares the round trip of BEGIN, also with a timeout, and in the next transaction."""
    engine = world.engine(dsn=counting.dsn)
    expected = 2 if world.name in PIPELINED else 3
    async with session(world, engine) as work:

        async def acquire() -> None:
            await world.call(lock(work, name).acquire, timeout=5)
            await world.call(work.commit)

        async def try_acquire() -> None:
            assert await world.call(lock(work, name, shared=True).try_acquire)
            await world.call(work.rollback)

        assert await count(counting, acquire) == expected
        assert await count(counting, try_acquire) == expected


@pytest.mark.twins
async def test_a_lock_later_in_a_transaction_costs_one_round_trip(
    world: World, name: str, counting: CountingProxy
) -> None:
    """Where BEGIN was sent already, in a savepoint or not, nothing is sent twice."""
    engine = world.engine(dsn=counting.dsn)
    async with connection(world, engine) as work:
        for number in range(WARM):
            await run(world, work, "SELECT 1")
            before = counting.trips
            await world.call(lock(work, f"{name}:{number}").acquire)
            assert counting.trips - before == 1
            async with world.enter(work.begin_nested()):
                before = counting.trips
                await world.call(lock(work, f"{name}:nested:{number}").acquire)
                assert counting.trips - before == 1
            await world.call(work.rollback)


# ---------------------------------------------------------------- who listens


@pytest.mark.parametrize("world", PIPELINED, indirect=True)
@pytest.mark.parametrize(
    "hook", ["before_cursor_execute", "after_cursor_execute", "before_execute", "begin", "do_execute", "echo"]
)
async def test_with_listeners_begin_is_sent_separately(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], counting: CountingProxy, hook: str
) -> None:
    """Listeners and the log see each statement start and end, so none shares its round trip with another one."""
    heard: list[str] = []
    engine = world.engine(dsn=counting.dsn, echo=hook == "echo")
    if hook != "echo":
        listen(engine, hook, lambda *args: heard.append(str(args)))
    overtake(admin, name, 1)

    async def work() -> None:
        async with connection(world, engine) as inside:
            await world.call(lock(inside, name).acquire)
            await world.call(inside.commit)
            await world.call(fence, inside, name, 1)
            await world.call(inside.commit)

    assert await count(counting, work) == 6
    if hook not in ("echo", "begin", "before_execute"):
        assert [one for one in heard if "pg_try_advisory" in one]
        assert [one for one in heard if "enter_gate" in one]


class TracedCursor(psycopg.Cursor[Any]):
    """A cursor as instrumentation puts in the driver's place."""

    seen: list[str] = []  # noqa: RUF012

    def execute(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(f"> {query}")
        try:
            return super().execute(query, *args, **kwargs)
        finally:
            self.seen.append(f"< {query}")


class TracedConnection(psycopg.Connection[Any]):
    """A connection of another class, for which nothing is known."""


def traced_execute(self: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    TracedCursor.seen.append(f"> {query}")
    return ORIGINAL(self, query, *args, **kwargs)


ORIGINAL = psycopg.Cursor.execute


@pytest.mark.parametrize("world", ["psycopg"], indirect=True)
@pytest.mark.parametrize("way", ["cursor factory", "patched method", "class of connections"])
async def test_instrumented_cursors_see_each_statement(
    world: World, name: str, counting: CountingProxy, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cursor that measures statements sees those of pgfence, from start to end, and BEGIN is sent separately."""
    options: dict[str, Any] = {}
    if way == "cursor factory":
        options["connect_args"] = {"cursor_factory": TracedCursor}
    elif way == "class of connections":
        options["creator"] = lambda: TracedConnection.connect(counting.dsn)
    else:
        traced_execute.__module__ = ORIGINAL.__module__
        monkeypatch.setattr(psycopg.Cursor, "execute", traced_execute)
    engine = world.engine(dsn=counting.dsn, **options)
    TracedCursor.seen.clear()

    async def work() -> None:
        async with connection(world, engine) as inside:
            await world.call(lock(inside, name).acquire)

    assert await count(counting, work) == 3
    if way != "class of connections":
        assert [one for one in TracedCursor.seen if "pg_try_advisory" in one]


@pytest.mark.parametrize("world", PIPELINED, indirect=True)
async def test_notices_and_notifications_arrive_as_usual(
    world: World, name: str, admin: psycopg.Connection[Any], eventually: Any
) -> None:
    """The driver's handlers are called for notices and notifications that arrive with the responses."""
    engine, heard = world.engine(pool_size=1, max_overflow=0), []
    async with connection(world, engine) as work:
        raw = await world.call(work.get_raw_connection) if world.is_async else work.connection
        raw.driver_connection.add_notify_handler(lambda found: heard.append(found.payload))
        await run(world, work, f'LISTEN "{name}"')
        await world.call(work.commit)
        admin.execute("SELECT pg_notify(%s, 'before')", [name])
        await world.call(lock(work, name).acquire)
        await world.call(work.rollback)
        await run(world, work, f'UNLISTEN "{name}"')
        await world.call(work.commit)
    assert heard == ["before"]


# ---------------------------------------------------------------- settings of the transaction


@pytest.mark.parametrize("world", PIPELINED, indirect=True)
async def test_begin_carries_the_settings_of_the_transaction(world: World, name: str, counting: CountingProxy) -> None:
    """BEGIN has the Connection's isolation level, read-only and deferrable modes, and the next user's are its own."""
    engine = world.engine(dsn=counting.dsn, pool_size=1, max_overflow=0)
    shown = " || ".join(f"current_setting('transaction_{one}')" for one in ("isolation", "read_only", "deferrable"))
    everything = {"isolation_level": "SERIALIZABLE", "postgresql_readonly": True, "postgresql_deferrable": True}
    options: list[tuple[str, dict[str, Any]]] = [
        ("serializableonon", everything),
        ("read committedoffoff", {}),
        ("repeatable readoffoff", {"isolation_level": "REPEATABLE READ"}),
    ]
    for expected, chosen in options * 3:
        async with connection(world, engine.execution_options(**chosen)) as work:
            before = counting.trips
            await world.call(lock(work, name, stale_snapshot_ok=True).acquire)
            trips = counting.trips - before
            assert (await value(world, work, f"SELECT {shown}"), trips) == (expected, 1)


@pytest.mark.parametrize("world", PIPELINED, indirect=True)
@pytest.mark.parametrize("threshold", [None, 0, 5])
async def test_statements_are_prepared_as_the_driver_is_set(world: World, name: str, threshold: int | None) -> None:
    """Psycopg's prepare_threshold counts for statements that share a round trip too."""
    engine = world.engine(connect_args={"prepare_threshold": threshold}, pool_size=1, max_overflow=0)
    for _ in range(WARM):
        async with connection(world, engine) as work:
            await world.call(lock(work, name).acquire)
            await world.call(work.commit)
            found = await value(world, work, PREPARED)
            await world.call(work.commit)
    assert found == (0 if threshold is None else 1)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("world", PIPELINED, indirect=True)
@pytest.mark.parametrize("observed", [False, True], ids=["together", "separately"])
async def test_an_error_leaves_the_transaction_aborted_until_its_rollback(
    world: World, name: str, admin: psycopg.Connection[Any], observed: bool
) -> None:
    """A rejected entry aborts the transaction, which a rollback ends; the same whether BEGIN was sent with it or not."""
    engine = world.engine(pool_size=1, max_overflow=0)
    if observed:
        listen(engine, "after_cursor_execute", lambda *_: None)
    overtake(admin, name, 7)
    async with connection(world, engine) as work:
        for _ in range(WARM):
            with pytest.raises(StaleFencingTokenError) as caught:
                await world.call(fence, work, name, 3)
            assert caught.value.newest == 7
            with pytest.raises(DBAPIError) as then:
                await run(world, work, "SELECT 1")
            assert sqlstate_of(then.value) == "25P02"
            await world.call(work.rollback)
            await world.call(fence, work, name, 7)
            await world.call(work.commit)


@pytest.mark.parametrize("world", PIPELINED, indirect=True)
@pytest.mark.parametrize("observed", [False, True], ids=["together", "separately"])
async def test_a_text_that_cannot_be_sent_leaves_the_transaction_open(world: World, name: str, observed: bool) -> None:
    """The statement fails before it is sent, and BEGIN is not lost over it: the transaction works on."""
    engine = world.engine(pool_size=1, max_overflow=0, connect_args={"client_encoding": "LATIN1"})
    if observed:
        listen(engine, "after_cursor_execute", lambda *_: None)
    async with connection(world, engine) as work:
        for _ in range(3):
            with pytest.raises(ValueError, match="set client_encoding to UTF8"):
                await world.call(fence, work, f"{name}\u20ac", 1)
            assert await value(world, work, "SELECT 1") == 1
            await world.call(work.rollback)
            await world.call(lock(work, name).acquire)
            await world.call(work.commit)


@pytest.mark.parametrize("world", PIPELINED, indirect=True)
@pytest.mark.parametrize("observed", [False, True], ids=["together", "separately"])
async def test_a_connection_lost_at_begin_is_replaced(
    world: World, name: str, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture, observed: bool
) -> None:
    """A session that the server has ended is reported as such, without a warning of the driver, and discarded."""
    engine = world.engine(pool_size=1, max_overflow=0)
    if observed:
        listen(engine, "after_cursor_execute", lambda *_: None)
    async with connection(world, engine) as work:
        pid = await value(world, work, "SELECT pg_backend_pid()")
        await world.call(work.commit)
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        with pytest.raises(OperationalError) as caught:
            await world.call(lock(work, name).acquire)
        assert caught.value.connection_invalidated
        await world.call(work.rollback)
        await world.call(lock(work, name).acquire)
    assert not [one for one in caplog.records if one.name == "psycopg"]


@pytest.mark.parametrize("world", PIPELINED, indirect=True)
async def test_a_connection_cut_while_it_waits_is_replaced(
    world: World, name: str, admin: psycopg.Connection[Any], counting: CountingProxy, eventually: Any
) -> None:
    """A gate that is waited for with BEGIN in the same round trip: a cut in the middle is an error of the connection."""
    engine = world.engine(dsn=counting.dsn, pool_size=1, max_overflow=0)
    overtake(admin, name, 1)
    waiter = world.other()
    with psycopg.connect(admin.info.dsn, password=admin.info.password) as inside:
        inside.execute("SELECT pgfence_enter_gates_v1(ARRAY[%s], ARRAY[1::bigint])", [name])
        async with connection(world, engine, waiter) as work:
            waiting = asyncio.create_task(waiter.call(fence, work, name, 2))
            await eventually(lambda: waits_at_gate(admin))
            counting.cut()
            with pytest.raises(OperationalError):
                await waiting
            await waiter.call(work.rollback)
            await waiter.call(lock(work, name).acquire)


def waits_at_gate(admin: psycopg.Connection[Any]) -> bool:
    return bool(
        admin.execute(
            "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%enter_gate%' AND wait_event_type = 'Lock'"
        ).fetchall()
    )


# ---------------------------------------------------------------- interrupts


@pytest.mark.parametrize("world", ["psycopg_async"], indirect=True)
async def test_a_cancelled_task_closes_the_connection(
    world: World, name: str, admin: psycopg.Connection[Any], eventually: Any
) -> None:
    """A task that is cancelled while it waits at a gate gets its cancel, and the pool another connection."""
    engine = world.engine(pool_size=1, max_overflow=0)
    overtake(admin, name, 1)
    waiter = world.other()
    with psycopg.connect(admin.info.dsn, password=admin.info.password) as inside:
        inside.execute("SELECT pgfence_enter_gates_v1(ARRAY[%s], ARRAY[1::bigint])", [name])
        async with connection(world, engine, waiter) as work:
            waiting = asyncio.create_task(waiter.call(fence, work, name, 2))
            await eventually(lambda: waits_at_gate(admin))
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
    await eventually(lambda: not waits_at_gate(admin))
    async with connection(world, engine) as work:
        await world.call(lock(work, name).acquire)


@pytest.mark.parametrize("world", ["psycopg"], indirect=True)
@pytest.mark.parametrize("kind", [Stop, SoftLimit])
async def test_an_interrupt_at_any_moment_is_what_comes_out(world: World, name: str, kind: type[BaseException]) -> None:
    """If a signal handler raises at any call, its exception propagates, the lock is free, and the pool is usable."""
    engine = world.engine(pool_size=1, max_overflow=0)

    def work() -> None:
        with TransactionLock.begin(engine, name):
            pass

    work()
    moments = 0
    with torn_connections():
        for at in range(1, 400):
            outcome: BaseException | None = None
            with interrupted(at, kind) as interrupt:
                try:
                    work()
                except BaseException as error:
                    outcome = error
            if not interrupt.where:
                assert outcome is None
                break
            moments += 1
            assert isinstance(outcome, kind), (interrupt.where, outcome)
            del outcome
            with suppress(OperationalError):
                work()
            work()
    assert moments > 20
