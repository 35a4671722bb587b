"""The result of a key is sent with COMMIT, or before a statement that must come after it, and is never lost."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.orm import Session as SyncSession
from sqlalchemy.orm import registry

from pgfence import TransactionLock
from pgfence.errors import IdempotencyMisuseError
from pgfence.idempotency import idempotent
from support.keyed import Desk, Receipt
from support.proxy import CountingProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from sqlalchemy.orm import Session

    from support.worlds import World

PIPELINED = ("psycopg", "psycopg_async")
WARM = 8  # statements are prepared by then

pytestmark = [pytest.mark.usefixtures("tables")]
pipelined = pytest.mark.parametrize("world", PIPELINED, indirect=True)


@pytest.fixture
def counting(dsn: str) -> Iterator[CountingProxy]:
    proxy = CountingProxy(dsn)
    yield proxy
    proxy.close()


@pytest.fixture
def desk(world: World, admin: psycopg.Connection[Any], counting: CountingProxy) -> Iterator[Desk]:
    """Sessions of a world on one connection, and effects."""
    here = Desk(world, admin, dsn=counting.dsn, pool_size=1, max_overflow=0)
    yield here
    here.close()


async def run_sync(desk: Desk, work: Any) -> Any:
    """Do work with a sync Session, in its own greenlet where the world is async, and close the Session."""
    async with desk.world.enter(desk.session()) as session:
        return await desk.on(session, work)


def key(desk: Desk, session: Session, name: str, **options: Any) -> Any:
    return idempotent(session, name, scope=desk.scope, result=Receipt, **options)


def pay(desk: Desk, session: Session, name: str) -> Receipt:
    """Do the work of a key, or return its result."""
    receipt: Receipt = key(desk, session, name).run(lambda: desk.charge(name)(session))
    return receipt


async def stored(desk: Desk, name: str) -> bool:
    """Return whether a key has a result."""

    def look(session: Session) -> bool:
        with key(desk, session, name) as op:
            found: bool = op.replayed
            if not found:
                op.complete(Receipt(name))
        session.rollback()
        return found

    return bool(await run_sync(desk, look))


# ---------------------------------------------------------------- counted


async def test_a_key_around_one_insert_costs_three_round_trips(
    world: World, desk: Desk, counting: CountingProxy
) -> None:
    """The claim is sent with BEGIN and the result with COMMIT; other drivers send all five statements separately."""
    for number in range(WARM):
        before = counting.trips
        await desk.pay(f"k{number}")
        trips = counting.trips - before
    assert trips == (3 if world.name in PIPELINED else 5)
    assert await stored(desk, "k3")


@pipelined
async def test_what_the_commit_flushes_comes_before_the_result(
    world: World, desk: Desk, counting: CountingProxy
) -> None:
    """An instance that the work has only added is inserted at the COMMIT, and does not cost the result another trip."""

    class Effect:
        def __init__(self, key: str) -> None:
            self.key = key

    registry().map_imperatively(Effect, desk.table, primary_key=[desk.table.c.key])

    def work(session: Session, name: str) -> int:
        def add() -> Receipt:
            session.add(Effect(key=name))
            return Receipt(name)

        before = counting.trips
        key(desk, session, name).run(add)
        session.commit()
        return counting.trips - before

    trips = [await run_sync(desk, lambda session, n=n: work(session, f"k{n}")) for n in range(WARM)]
    assert trips[-1] == 3
    assert desk.effects() == WARM
    assert await stored(desk, "k1")


# ---------------------------------------------------------------- sent earlier


@pipelined
@pytest.mark.parametrize(
    "then",
    [
        "SAVEPOINT s",
        "SET LOCAL lock_timeout = '1s'",
        "SET CONSTRAINTS ALL IMMEDIATE",
        "SELECT set_config('a.b', 'c', true)",
    ],
)
async def test_what_must_come_after_the_result_sends_it_first(desk: Desk, then: str) -> None:
    """Savepoints and settings find the key finished, as if the result had been stored at the end of the block."""

    def work(session: Session) -> None:
        pay(desk, session, "k")
        session.execute(text(then))
        session.commit()

    await run_sync(desk, work)
    assert await stored(desk, "k")


@pipelined
async def test_a_savepoint_rolled_back_after_the_block_keeps_the_result(desk: Desk) -> None:
    """The result is stored before the savepoint is set, so that a rollback to it takes only what came later."""

    def work(session: Session) -> None:
        pay(desk, session, "k")
        with session.begin_nested() as savepoint:
            desk.charge("later")(session)
            savepoint.rollback()
        session.commit()

    await run_sync(desk, work)
    assert (desk.effects("k"), desk.effects("later")) == (1, 0)
    assert await stored(desk, "k")


@pipelined
async def test_several_keys_of_one_transaction_keep_their_results(desk: Desk) -> None:
    """Keys one after the other, nested keys, and the same key again, which is replayed, keep their results."""

    def work(session: Session) -> None:
        for name in ("one", "one", "two", "one"):
            assert pay(desk, session, name) == Receipt(name)
        with key(desk, session, "outer") as outer:
            with key(desk, session, "inner") as inner:
                assert not (outer.replayed or inner.replayed)
                inner.complete(Receipt("inner"))
            outer.complete(Receipt("outer"))
        session.commit()

    await run_sync(desk, work)
    assert [await stored(desk, name) for name in ("one", "two", "outer", "inner")] == [True] * 4
    assert desk.effects("one") == 1


# ---------------------------------------------------------------- not committed


@pipelined
async def test_a_rollback_drops_the_result(desk: Desk) -> None:
    """Nothing of a transaction that is rolled back reaches the next one on the same connection."""

    def work(session: Session) -> None:
        pay(desk, session, "k")
        session.rollback()
        pay(desk, session, "other")
        session.commit()

    await run_sync(desk, work)
    assert (desk.effects("k"), desk.effects("other")) == (0, 1)
    assert (await stored(desk, "k"), await stored(desk, "other")) == (False, True)


@pytest.mark.parametrize("world", ["psycopg"], indirect=True)
async def test_a_session_dropped_without_an_end_leaves_nothing_behind(world: World, desk: Desk) -> None:
    """Its connection is returned through a pool that resets it with another engine's dialect, and serves the next user."""
    create_engine(desk.engine.url, pool=desk.engine.pool)

    def drop() -> None:
        session = desk.session()
        pay(desk, session, "k")
        del session
        gc.collect()

    await world.call(drop)
    assert await desk.pay("other") == Receipt("other")
    assert (desk.effects("k"), desk.effects("other")) == (0, 1)


@pipelined
async def test_a_claim_rolled_back_inside_the_block_fails_the_commit(desk: Desk) -> None:
    """If the claim was rolled back, the COMMIT raises, nothing is committed, and the connection stays usable."""

    def work(session: Session) -> None:
        with session.begin_nested() as savepoint:
            block = key(desk, session, "k")
            op = block.__enter__()
            assert not op.replayed
            savepoint.rollback()
        desk.charge("k")(session)
        op.complete(Receipt("k"))
        with pytest.raises(IdempotencyMisuseError, match="no longer claimed"):
            block.__exit__(None, None, None)
            session.commit()
        session.rollback()
        pay(desk, session, "next")
        session.commit()

    await run_sync(desk, work)
    assert (desk.effects("k"), desk.effects("next")) == (0, 1)
    assert not await stored(desk, "k")


@pipelined
async def test_a_connection_is_usable_after_a_rejected_commit(desk: Desk) -> None:
    """As after any COMMIT that failed, the server is in no transaction, because SQLAlchemy sends no ROLLBACK then."""

    def work(session: Session) -> None:
        connection = session.connection()
        with session.begin_nested() as savepoint:
            block = key(desk, session, "k")
            op = block.__enter__()
            savepoint.rollback()
        op.complete(Receipt("k"))
        with pytest.raises(IdempotencyMisuseError):
            block.__exit__(None, None, None)
            connection.commit()
        connection.rollback()
        assert connection.exec_driver_sql("SELECT 1").scalar() == 1

    await run_sync(desk, work)


@pipelined
async def test_an_aborted_transaction_is_not_committed(desk: Desk) -> None:
    """After an error that the caller swallows, COMMIT rolls back as in PostgreSQL, and the key is free."""

    def work(session: Session) -> None:
        pay(desk, session, "k")
        with pytest.raises(DBAPIError):
            session.connection().exec_driver_sql("SELECT 1 / 0")
        session.connection().commit()

    await run_sync(desk, work)
    assert desk.effects() == 0
    assert not await stored(desk, "k")


@pipelined
@pytest.mark.parametrize("then", ["ROLLBACK TO SAVEPOINT a", "ROLLBACK"])
async def test_an_aborted_transaction_can_be_rolled_back_in_plain_text(desk: Desk, then: str) -> None:
    """The result that waits is not sent into it: the ROLLBACK works, and nothing of the key is stored."""

    def work(session: Session) -> None:
        session.execute(text("SAVEPOINT a"))
        pay(desk, session, "k")
        with pytest.raises(DBAPIError):
            session.connection().exec_driver_sql("INSERT INTO no_such_table VALUES (1)")
        session.execute(text(then))
        session.rollback()

    await run_sync(desk, work)
    assert not await stored(desk, "k")


@pytest.mark.parametrize("world", ["psycopg"], indirect=True)
async def test_a_detached_connection_takes_locks_and_keys(world: World, desk: Desk, name: str) -> None:
    """On a detached connection, transactions begin and end with pgfence's statements as on any other."""

    def work(_session: Session) -> None:
        connection = world.engine().connect()
        connection.detach()
        with SyncSession(connection) as session:
            TransactionLock(session, name).acquire()
            pay(desk, session, "k")
            session.commit()
        connection.close()

    await run_sync(desk, work)
    assert await stored(desk, "k")


@pipelined
async def test_an_error_of_the_commit_itself_stores_no_result(desk: Desk) -> None:
    """A deferred constraint that the COMMIT finds violated is SQLAlchemy's error, and the next transaction works."""
    desk.admin.execute(f"ALTER TABLE {desk.table.name} ADD UNIQUE (key) DEFERRABLE INITIALLY DEFERRED".encode())

    def work(session: Session) -> None:
        pay(desk, session, "k")
        desk.charge("k")(session)
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        pay(desk, session, "other")
        session.commit()

    await run_sync(desk, work)
    assert (desk.effects("k"), desk.effects("other")) == (0, 1)
    assert not await stored(desk, "k")


@pipelined
async def test_an_error_of_a_deferred_trigger_stays_what_it_is(desk: Desk) -> None:
    """A trigger of the application that divides by zero at COMMIT is not taken for a lost claim."""
    table = desk.table.name
    desk.admin.execute(
        f"CREATE FUNCTION {table}_fails() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN PERFORM 1 / 0; RETURN NULL; END$$".encode()
    )
    desk.admin.execute(
        f"CREATE CONSTRAINT TRIGGER fails AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED"
        f" FOR EACH ROW EXECUTE FUNCTION {table}_fails()".encode()
    )

    def work(session: Session) -> None:
        pay(desk, session, "k")
        with pytest.raises(DBAPIError, match="division by zero"):
            session.commit()
        session.rollback()

    try:
        await run_sync(desk, work)
        assert not await stored(desk, "k")
    finally:
        desk.admin.execute(f"DROP FUNCTION {table}_fails() CASCADE".encode())


@pipelined
async def test_a_connection_lost_before_the_commit_stores_nothing(desk: Desk) -> None:
    """The session ends right before COMMIT: an error of the connection, and another connection for the next transaction."""
    pids: list[int] = []

    def kill(_: Any) -> None:
        if pids:
            desk.admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pids.pop()])

    event.listen(getattr(desk.engine, "sync_engine", desk.engine), "commit", kill)

    def work(session: Session) -> None:
        pay(desk, session, "k")
        pids.append(session.connection().exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
        with pytest.raises(OperationalError) as caught:
            session.commit()
        assert caught.value.connection_invalidated
        session.rollback()
        pay(desk, session, "k")
        session.commit()

    await run_sync(desk, work)
    assert desk.effects() == 1


# ---------------------------------------------------------------- who listens


@pipelined
@pytest.mark.parametrize("hook", ["after_cursor_execute", "before_execute", "echo"])
async def test_with_listeners_the_result_is_sent_separately(
    world: World, admin: psycopg.Connection[Any], counting: CountingProxy, hook: str
) -> None:
    """Listeners and the log see the statement that stores the result, at the end of the block."""
    desk = Desk(world, admin, dsn=counting.dsn, echo=hook == "echo")
    if hook != "echo":
        event.listen(getattr(desk.engine, "sync_engine", desk.engine), hook, lambda *_: None)
    try:
        for number in range(WARM):
            before = counting.trips
            await desk.pay(f"k{number}")
            trips = counting.trips - before
        assert trips == 5
    finally:
        desk.close()
