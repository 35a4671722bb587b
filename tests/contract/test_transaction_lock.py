"""TransactionLock excludes others, costs one statement, and ends with its transaction."""

from __future__ import annotations

import asyncio
import gc
import random
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession

from pgfence.config import configure
from pgfence.errors import LockTimeoutError, TransactionStateError
from pgfence.keys import LockKey, resolve
from pgfence.transaction import AsyncTransactionLock, TransactionLock
from support.rows import every_row
from support.transactions import connection, factory, lock, run, scoped, session, statements, value

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins

FREE_WAYS = pytest.mark.parametrize(
    "way",
    [("try_acquire", {}), *(("acquire", {"timeout": t}) for t in (None, 0, 5, float("inf")))],
    ids=lambda way: f"{way[0]}-{way[1].get('timeout', '')}",
)


# ---------------------------------------------------------------- cost


@pytest.mark.every_driver
@pytest.mark.matrix
@FREE_WAYS
async def test_a_free_lock_costs_one_statement(world: World, name: str, way: tuple[str, dict[str, Any]]) -> None:
    """With or without a timeout, first in its transaction or not, a free lock is one statement."""
    engine = world.engine()
    method, kwargs = way
    async with session(world, engine) as work:
        for extra in (name, name + ":later"):
            with statements(engine) as sent:
                assert await world.call(getattr(lock(work, extra), method), **kwargs) in (True, None)
            assert len(sent) == 1


@pytest.mark.every_driver
@pytest.mark.matrix
@FREE_WAYS
async def test_several_free_names_cost_one_statement_if_the_lock_is_first(
    world: World, name: str, way: tuple[str, dict[str, Any]]
) -> None:
    """Several names are one statement if the lock comes first in a transaction, and three with a savepoint later."""
    engine = world.engine()
    method, kwargs = way
    names = [f"{name}:{n}" for n in range(4)]
    async with session(world, engine) as work:
        with statements(engine) as sent:
            await world.call(getattr(lock(work, *names[:2], LockKey.pair(-7, -8)), method), **kwargs)
        assert len(sent) == 1
        with statements(engine) as sent:
            await world.call(getattr(lock(work, *names), method), **kwargs)
        assert [statement.split()[0] for statement in sent] == ["SAVEPOINT", "SELECT", "RELEASE"]


async def test_the_same_lock_again_in_one_transaction_costs_nothing(world: World, name: str) -> None:
    """A held key is granted again without a statement, also in shared mode, and only new names are requested."""
    engine = world.engine()
    async with session(world, engine) as work:
        await world.call(lock(work, name).acquire)
        with statements(engine) as sent:
            await world.call(lock(work, name).acquire, timeout=0)
            assert await world.call(lock(work, name, name).try_acquire)
            assert await world.call(lock(work, name, shared=True).try_acquire)
        assert sent == []
        with statements(engine) as sent:
            await world.call(lock(work, name, name + ":more").acquire)
        assert len(sent) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("opener", [session, connection])
async def test_a_new_transaction_asks_again(world: World, name: str, opener: Any) -> None:
    """The next transaction on the same session and connection requests the lock again."""
    engine = world.engine(pool_size=1, max_overflow=0)
    async with opener(world, engine) as work:
        for end in (work.commit, work.rollback, work.commit):
            with statements(engine) as sent:
                await world.call(lock(work, name).acquire)
            assert len(sent) == 1
            await world.call(end)
            await run(world, work, "SELECT 1")


@pytest.mark.every_driver
async def test_thousands_of_names_are_one_statement(world: World, name: str, advisory_rows: Any) -> None:
    """2,000 names and pairs, first in the transaction: acquired by one statement, all or none of them."""
    engine = world.engine()
    keys = [*(f"{name}:{n}" for n in range(1_900)), *(LockKey.pair(-n, n) for n in range(100))]
    ordered = resolve(keys, "")
    async with session(world, engine) as work, connection(world, engine) as other:
        with statements(engine) as sent:
            assert await world.call(lock(work, *keys).try_acquire)
        assert len([statement for statement in sent if "try_advisory" in statement]) == 1
        assert len(advisory_rows()) == 2_000
        assert not await world.call(lock(other, ordered[0]).try_acquire)
        assert not await world.call(lock(other, ordered[-1]).try_acquire)
        await world.call(work.rollback)
        assert advisory_rows() == []


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("position", [1_000, 1_950], ids=["name", "pair"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
async def test_a_rejection_among_thousands_leaves_none(
    world: World, name: str, first: bool, position: int, advisory_rows: Any
) -> None:
    """One of 2,000 keys is held elsewhere: the try keeps no key, and the transaction can go on."""
    engine = world.engine()
    keys = resolve([*(f"{name}:{n}" for n in range(1_900)), *(LockKey.pair(-n, n) for n in range(100))], "")
    async with connection(world, engine) as holder, connection(world, engine) as work:
        await world.call(lock(holder, keys[position]).acquire)
        if not first:
            await run(world, work, "SELECT 1")
        assert not await world.call(lock(work, *keys).try_acquire)
        assert len(advisory_rows()) == 1
        await world.call(holder.rollback)
        assert await world.call(lock(work, *keys).try_acquire)
        assert len(advisory_rows()) == 2_000


# ---------------------------------------------------------------- exclusion


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["session", "scoped", "connection"])
async def test_a_second_transaction_is_kept_out_until_the_first_ends(
    world: World, name: str, kind: str, advisory_rows: Any
) -> None:
    """For every kind of transaction, a second one is rejected while the first is open, and admitted right afterwards."""
    engine = world.engine()
    async with connection(world, engine) as other, connection(world, engine) as plain, session(world, engine) as orm:
        work = {"session": orm, "scoped": scoped(world, engine), "connection": plain}[kind]
        await world.call(lock(work, name).acquire)
        assert await world.call(lock(other, name).try_acquire) is False
        with pytest.raises(LockTimeoutError):
            await world.call(lock(other, name).acquire, timeout=0)
        assert len(advisory_rows()) == 1
        await world.call(work.commit)
        assert advisory_rows() == []
        assert await world.call(lock(other, name).try_acquire) is True
        await world.call(other.rollback)
        assert advisory_rows() == []
        if kind == "scoped":
            await world.call(work.remove)


@pytest.mark.every_driver
async def test_a_waiter_goes_on_when_the_holder_commits(
    world: World, name: str, advisory_rows: Any, eventually: Any
) -> None:
    """The waiter waits in the server, whose deadlock detector sees it, and is granted at the holder's commit."""
    engine = world.engine()
    holder, waiter = world.other(), world.other()
    async with connection(world, engine, holder) as first, connection(world, engine, waiter) as second:
        await holder.call(lock(first, name).acquire)
        waiting = asyncio.create_task(waiter.call(lock(second, name).acquire, timeout=10))
        await eventually(lambda: [row for row in advisory_rows() if not row.granted])
        assert not waiting.done()
        await holder.call(first.commit)
        await waiting
        assert [row.granted for row in advisory_rows()] == [True]


async def test_a_transaction_lock_excludes_a_session_lock(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Both live in PostgreSQL's one space of keys, so other programs on the same key are kept out and respected."""
    key = LockKey.of(name).value
    async with session(world, world.engine()) as work:
        await world.call(lock(work, name).acquire)
        assert admin.execute("SELECT pg_try_advisory_lock(%s)", [key]).fetchone() == (False,)
        await world.call(work.commit)
        assert admin.execute("SELECT pg_try_advisory_lock(%s)", [key]).fetchone() == (True,)
        assert await world.call(lock(work, name).try_acquire) is False
        admin.execute("SELECT pg_advisory_unlock(%s)", [key])


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_a_lock_is_free_right_after_its_transaction(
    world: World, name: str, end: str, advisory_rows: Any
) -> None:
    """C014: one row while the transaction lasts, none after commit, none after rollback."""
    async with connection(world, world.engine()) as work:
        await world.call(lock(work, name, name + ":2").acquire)
        assert len(advisory_rows()) == 2
        await world.call(getattr(work, end))
        assert advisory_rows() == []


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["engine", "connection", "session"])
async def test_autocommit_is_rejected_before_anything_is_sent(world: World, name: str, kind: str) -> None:
    """C014: in autocommit the lock would end with its own statement, so it is an error and nothing is sent."""
    engine = world.engine(isolation_level="AUTOCOMMIT") if kind == "engine" else world.engine()
    async with connection(world, engine) as plain, session(world, engine) as orm:
        if kind == "connection":
            await world.call(plain.execution_options, isolation_level="AUTOCOMMIT")
        if kind == "session":
            await world.call(orm.connection, execution_options={"isolation_level": "AUTOCOMMIT"})
        work = orm if kind == "session" else plain
        advice = world.pick("or AdvisoryLock$", "or AsyncAdvisoryLock$")
        with statements(engine) as sent:
            for call in (lock(work, name).try_acquire, lock(work, name).acquire):
                with pytest.raises(TransactionStateError, match=f"autocommit.*{advice}"):
                    await world.call(call)
        assert sent == []


async def test_hold_does_not_release_at_the_end_of_its_block(world: World, name: str, advisory_rows: Any) -> None:
    """C013: the lock is held until the transaction ends, without a warning at the end of the block."""
    async with session(world, world.engine()) as work:
        async with world.enter(lock(work, name).hold(timeout=20)):
            assert len(advisory_rows()) == 1
        assert len(advisory_rows()) == 1
        await world.call(work.commit)
        assert advisory_rows() == []


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("end", ["commit", "rollback", "COMMIT", "savepoint"])
async def test_leaving_hold_raises_if_its_transaction_ended(world: World, name: str, end: str) -> None:
    """C013: the rest of the block ran without the lock, whether SQLAlchemy, plain SQL or a savepoint ended it."""
    async with connection(world, world.engine()) as work:
        savepoint = await world.call(work.begin_nested) if end == "savepoint" else None
        with pytest.raises(TransactionStateError, match="ended inside the block"):
            async with world.enter(lock(work, name).hold()):
                if savepoint is not None:
                    await world.call(savepoint.rollback)
                elif end == "COMMIT":
                    await run(world, work, end)
                else:
                    await world.call(getattr(work, end))


@pytest.mark.matrix
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_leaving_hold_raises_if_its_session_ended(world: World, name: str, end: str) -> None:
    """C013: leaving hold() raises on a Session too, even if its next transaction has acquired the lock again."""
    async with session(world, world.engine()) as work:
        with pytest.raises(TransactionStateError, match="ended inside the block"):
            async with world.enter(lock(work, name).hold()):
                await world.call(getattr(work, end))
        with pytest.raises(TransactionStateError, match="ended inside the block"):
            async with world.enter(lock(work, name).hold()):
                await world.call(getattr(work, end))
                await world.call(lock(work, name).acquire)


@pytest.mark.every_driver
async def test_leaving_hold_while_the_lock_is_held_is_quiet(world: World, name: str) -> None:
    """A younger savepoint, an aborted transaction and a commit inside an outer transaction leave the lock as it is."""
    async with connection(world, world.engine()) as work:
        async with world.enter(lock(work, name).hold()):
            savepoint = await world.call(work.begin_nested)
            await world.call(savepoint.rollback)
            joined = factory(world, work, join_transaction_mode="create_savepoint")()
            await run(world, joined, "SELECT 1")
            await world.call(joined.commit)
            await world.call(joined.close)
        async with world.enter(lock(work, name).hold()):
            with pytest.raises(DBAPIError):
                await run(world, work, "SELECT 1 / 0")


async def test_what_the_block_raises_wins_over_its_ended_transaction(world: World, name: str) -> None:
    """The block's exception propagates unchanged even if its transaction has ended."""
    async with session(world, world.engine()) as work:
        with pytest.raises(ZeroDivisionError):
            async with world.enter(lock(work, name).hold()):
                await world.call(work.rollback)
                raise ZeroDivisionError


@pytest.mark.parametrize("kind", [TransactionLock, AsyncTransactionLock])
def test_hold_says_so_in_its_first_line(kind: Any) -> None:
    """C013: the first line of its docstring says that it does not release."""
    assert "NOT release" in kind.hold.__doc__.splitlines()[0]


async def test_a_failed_try_returns_false_and_runs_no_block(world: World, name: str) -> None:
    """C018: the result is a plain bool, and entering hold() without the lock raises before the body."""
    engine = world.engine()
    async with connection(world, engine) as first, connection(world, engine) as second:
        await world.call(lock(first, name).acquire)
        answer = await world.call(lock(second, name).try_acquire)
        assert answer is False
        with pytest.raises(LockTimeoutError):
            async with world.enter(lock(second, name).hold(timeout=0)):
                pytest.fail("the body ran without the lock")


def test_an_unawaited_try_is_noticed(name: str) -> None:
    """C018: Python warns about an async try that is not awaited."""
    with pytest.warns(RuntimeWarning, match="never awaited"):
        lock(AsyncSession(), name).try_acquire()
        gc.collect()


# ---------------------------------------------------------------- keys


@pytest.mark.every_driver
@every_row("number", [0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63)])
async def test_a_key_is_the_same_row_as_with_plain_sql(
    world: World, number: int, admin: psycopg.Connection[Any], advisory_rows: Any
) -> None:
    """C025: every signed 64-bit number is one key for every driver, whether it is tried or waited for."""
    async with connection(world, world.engine()) as work, connection(world, world.engine()) as other:
        await world.call(lock(work, LockKey.raw(number)).acquire)
        assert admin.execute(f"SELECT pg_try_advisory_lock('{number}'::bigint)").fetchone() == (False,)
        (mine,) = advisory_rows()
        assert (mine.classid, mine.objid, mine.objsubid) == (number >> 32 & 0xFFFFFFFF, number & 0xFFFFFFFF, 1)
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(lock(other, LockKey.raw(number)).acquire, timeout=0.02)
        assert [holder.key for holder in caught.value.holders] == [LockKey.raw(number)]


@pytest.mark.every_driver
@every_row("pair", [(0, 0), (1, 2), (-1, -5), (2**31 - 1, -(2**31)), (-(2**31), 2**31 - 1)])
async def test_a_pair_is_the_same_row_as_with_plain_sql(
    world: World, pair: tuple[int, int], advisory_rows: Any
) -> None:
    """C025: a pair lives in the other key space, whether it is tried or waited for."""
    async with connection(world, world.engine()) as work, connection(world, world.engine()) as other:
        await world.call(lock(work, LockKey.pair(*pair)).acquire)
        (row,) = advisory_rows()
        assert (row.classid, row.objid, row.objsubid) == (pair[0] & 0xFFFFFFFF, pair[1] & 0xFFFFFFFF, 2)
        assert await world.call(lock(other, LockKey.raw(LockKey.pair(*pair).value)).try_acquire)
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(lock(other, LockKey.pair(*pair)).acquire, timeout=0.02)
        assert [holder.key for holder in caught.value.holders] == [LockKey.pair(*pair)]


async def test_an_invalid_name_is_rejected_in_the_constructor(world: World) -> None:
    """C025: keys out of range and unusable names raise before anything is sent to the server."""
    async with session(world, world.engine()) as work:
        for bad, error in (
            ((2**63,), ValueError),
            ((-(2**63) - 1,), ValueError),
            ((True,), TypeError),
            ((1.0,), TypeError),
        ):
            with pytest.raises(error):
                lock(work, *(LockKey.raw(part) for part in bad))
        for names, error in (((), ValueError), (("",), ValueError), (("a\x00",), ValueError), ((5,), TypeError)):
            with pytest.raises(error):
                lock(work, *names)


async def test_a_name_lives_in_the_configured_namespace(world: World, name: str) -> None:
    """The engine's namespace applies to names, an argument overrides it, and a LockKey keeps its own."""
    engine = world.engine()
    configure(engine, namespace="shop")
    ways = (({}, "shop"), ({"namespace": "other"}, "other"), ({"namespace": ""}, ""))
    async with session(world, engine) as work:
        for kwargs, namespace in ways:
            await world.call(lock(work, name, **kwargs).acquire)
            (holder,) = await world.call(lock(work, LockKey.of(name, namespace=namespace)).holders)
            assert holder.key == LockKey.of(name, namespace=namespace)


async def test_grants_and_refusals_are_reported_to_on_event(world: World, name: str) -> None:
    """`configure(on_event=...)` receives each grant and each refusal, and nothing that cost no request."""
    engine = world.engine()
    heard: list[tuple[str, str | None]] = []
    configure(engine, on_event=lambda event: heard.append((event.event, event.name)))
    async with connection(world, engine) as one, connection(world, engine) as two:
        await world.call(lock(one, name).acquire)
        await world.call(lock(one, name).acquire)
        assert await world.call(lock(two, name).try_acquire) is False
        with pytest.raises(LockTimeoutError):
            await world.call(lock(two, name).acquire, timeout=0)
    assert heard == [("acquired", name), ("refused", name), ("refused", name)]


# ---------------------------------------------------------------- modes


async def test_shared_holders_stand_beside_each_other_and_keep_writers_out(world: World, name: str) -> None:
    """Many transactions may hold the lock in shared mode, and none gets it exclusively in the meantime."""
    engine = world.engine()
    async with connection(world, engine) as one, connection(world, engine) as two, connection(world, engine) as three:
        await world.call(lock(one, name, name + ":2", shared=True).acquire)
        await world.call(lock(two, name, shared=True).acquire, timeout=0)
        assert await world.call(lock(three, name).try_acquire) is False
        assert {holder.mode for holder in await world.call(lock(three, name).holders)} == {"shared"}
        await world.call(one.rollback)
        await world.call(two.rollback)
        assert await world.call(lock(three, name).try_acquire) is True
        assert await world.call(lock(one, name, shared=True).try_acquire) is False


async def test_upgrading_a_shared_lock_is_rejected_at_once(world: World, name: str, advisory_rows: Any) -> None:
    """C037: two readers that both want to write would deadlock; both get an error, and both can still read."""
    engine = world.engine()
    async with connection(world, engine) as one, connection(world, engine) as two:
        for reader in (one, two):
            await world.call(lock(reader, name, shared=True).acquire)
        with statements(engine) as sent:
            for reader in (one, two):
                with pytest.raises(TransactionStateError, match="exclusive lock first"):
                    await world.call(lock(reader, name).acquire)
        assert sent == []
        assert [row.mode for row in advisory_rows()] == ["ShareLock", "ShareLock"]


async def test_a_new_reader_stands_behind_a_waiting_writer(
    world: World, name: str, advisory_rows: Any, eventually: Any
) -> None:
    """C037: while a writer waits, a shared try returns False and raises nothing."""
    engine = world.engine()
    writer = world.other()
    async with (
        connection(world, engine) as reads,
        connection(world, engine, writer) as writes,
        connection(world, engine) as late,
    ):
        await world.call(lock(reads, name, shared=True).acquire)
        waiting = asyncio.create_task(writer.call(lock(writes, name).acquire, timeout=10))
        await eventually(lambda: [row for row in advisory_rows() if not row.granted])
        assert await world.call(lock(late, name, shared=True).try_acquire) is False
        await world.call(reads.commit)
        await waiting


# ---------------------------------------------------------------- several names


async def test_random_subsets_in_random_order_never_deadlock(world: World, name: str, advisory_rows: Any) -> None:
    """C032: 4 contenders, 200 rounds each over random subsets of 10 names with duplicates: no deadlock, nothing left."""
    engine = world.engine()
    owners: dict[str, int] = {}

    async def contend(number: int) -> None:
        who, dice = world.other(), random.Random(number)
        async with connection(world, engine, who) as work:
            for _ in range(200):
                names = [f"{name}:{dice.randrange(10)}" for _ in range(dice.randint(1, 5))]
                if dice.random() < 0.5:
                    await who.call(work.execute, text("SELECT 1"))
                await who.call(lock(work, *names).acquire, timeout=30)
                for one in set(names):
                    assert owners.setdefault(one, number) == number
                for one in set(names):
                    del owners[one]
                await who.call(work.commit)

    await asyncio.gather(*(contend(number) for number in range(4)))
    assert advisory_rows() == []


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("busy", range(3))
async def test_a_failed_request_for_several_names_holds_none(
    world: World, busy: int, first: bool, advisory_rows: Any
) -> None:
    """C032: one of three keys is held elsewhere: try and timed wait fail, the others stay free, the transaction can go on."""
    engine = world.engine()
    keys = [LockKey.raw(11), LockKey.raw(12), LockKey.pair(13, 13)]
    async with connection(world, engine) as holder, connection(world, engine) as work:
        await world.call(lock(holder, keys[busy]).acquire)
        for timeout in (None, 0, 0.2):
            if not first:
                await run(world, work, "SET LOCAL application_name = 'kept'")
            if timeout is None:
                assert await world.call(lock(work, *keys).try_acquire) is False
            else:
                with pytest.raises(LockTimeoutError) as caught:
                    await world.call(lock(work, *keys).acquire, timeout=timeout)
                assert [found.key for found in caught.value.holders] == [keys[busy]]
            assert len(advisory_rows()) == 1
            if not first:
                assert await value(world, work, "SHOW application_name") == "kept"
            await world.call(work.rollback)
        await world.call(holder.rollback)
        assert await world.call(lock(work, *keys).try_acquire) is True
        assert len(advisory_rows()) == 3


async def test_a_name_held_before_stays_held_after_a_failed_request(
    world: World, name: str, advisory_rows: Any
) -> None:
    """A failed request releases only the keys that it acquired itself."""
    engine = world.engine()
    names = [f"{name}:{n}" for n in range(3)]
    async with connection(world, engine) as holder, connection(world, engine) as work:
        await world.call(lock(holder, names[2]).acquire)
        await world.call(lock(work, names[0]).acquire)
        assert await world.call(lock(work, *names).try_acquire) is False
        with pytest.raises(LockTimeoutError):
            await world.call(lock(work, *names).acquire, timeout=0.02)
        assert sorted(row.granted for row in advisory_rows()) == [True, True]
        with statements(engine) as sent:
            await world.call(lock(work, names[0]).acquire)
        assert sent == []


# ---------------------------------------------------------------- no lost update


@pytest.mark.every_driver
async def test_eight_writers_lose_no_update(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C015: 8 contenders read, add one and commit under the lock; every addition is there at the end."""
    admin.execute("CREATE TABLE tally (n int); INSERT INTO tally VALUES (0)")
    engine = world.engine(pool_size=8)
    make = factory(world, engine)

    async def add(number: int) -> None:
        who = world.other()
        begin = world.pick(TransactionLock, AsyncTransactionLock).begin
        for _ in range(10):
            async with who.enter(begin(make, name, timeout=30)) as work:
                seen = await value(who, work, "SELECT n FROM tally")
                await run(who, work, "UPDATE tally SET n = :n", n=seen + 1)

    try:
        await asyncio.gather(*(add(number) for number in range(8)))
        assert admin.execute("SELECT n FROM tally").fetchone() == (80,)
    finally:
        admin.execute("DROP TABLE tally")
