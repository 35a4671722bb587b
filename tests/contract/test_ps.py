"""`ps`: one list of what is held and who waits, by kind, with chains, filters, and what a role may see."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from pgfence import (
    AdvisoryLock,
    Election,
    Lease,
    LockKey,
    Once,
    ReadWriteLock,
    Semaphore,
    TransactionLock,
    idempotent,
    monitoring,
)
from pgfence.config import configure
from pgfence.migrations import migration_lock
from support.attempts import Attempts
from support.locking import elsewhere
from support.servers import role
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future

    from sqlalchemy import Engine

    from pgfence.monitoring import Row
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    """An engine of psycopg, where the driver does not matter."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}", connect_args={"application_name": "app"})
    yield engine
    engine.dispose()


def find(rows: Any, name: str | LockKey) -> Row:
    """Return the only row with a name or key."""
    key = LockKey.of(name) if isinstance(name, str) else name
    (row,) = [row for row in rows if row.label == name or row.holder.key == key]
    return row


@pytest.mark.every_driver
async def test_every_kind_is_in_the_list(
    world: World, name: str, engine: Engine, admin: psycopg.Connection[Any]
) -> None:
    """Every kind is listed with its state and fields, and another program's migration with its name."""
    a, b, c, d, e, f, g = (f"{name}:{letter}" for letter in "abcdefg")
    Attempts(admin, name).claim("k")
    with (
        AdvisoryLock(engine, a).hold() as session,
        AdvisoryLock(engine, b, token=True).hold() as with_token,
        Lease(engine, c, ttl=30, owner="worker-7", purpose="month end").hold() as lease,
        Once(engine, d, every=timedelta(days=1), ttl=30).hold(),
        Semaphore(engine, e, permits=1, ttl=30).hold(),
        Election(engine, f, ttl=30).campaign(timeout=10),
        engine.begin() as connection,
        elsewhere(world.dsn, LockKey.raw(72707369)),
    ):
        TransactionLock(connection, g).acquire()
        rows = await world.call(monitoring.ps, world.engine())
        kinds = {find(rows, x).holder.kind: find(rows, x).state for x in (a, c, d, f"{e}#1", f, g)}
        assert kinds == {
            "session": "idle",
            "lease": "held",
            "slot": "held",
            "permit": "held",
            "term": "held",
            "transaction": "idle in transaction",
        }
        assert find(rows, f"{name}:k").state == "running" and find(rows, f"{name}:k").scope == name
        assert find(rows, LockKey.raw(72707369)).label == "Prisma migration"
        held = find(rows, a).holder
        assert (held.application_name, held.user, held.host is not None) == ("app", engine.url.username, True)
        assert session.state == "held" and held.since is not None
        token = find(rows, b)
        assert (token.holder.token, token.holder.pid is not None, token.state) == (with_token.token, True, "idle")
        owned = find(rows, c).holder
        assert (owned.owner, owned.purpose, owned.token) == ("worker-7", "month end", lease.token)
        assert owned.expires_at is not None and owned.expires_at > datetime.now(UTC)
    rest = await world.call(monitoring.ps, world.engine(), f"{name}:")
    assert [row.label for row in rest] == [f"{name}:k"]


async def test_the_migration_lock_has_a_name(world: World, engine: Engine) -> None:
    """The migration lock is listed by name and kind, even while the migration is in a transaction."""
    key = LockKey.of("alembic_version", namespace="pgfence migrations")
    with engine.connect() as connection, migration_lock(connection, key=key), connection.begin():
        connection.exec_driver_sql("SELECT 1")
        (row,) = await world.call(monitoring.ps, world.engine(), kind="migration")
    assert (row.label, row.holder.kind, row.state) == ("Alembic migration", "migration", "idle in transaction")


@pytest.fixture
def waiters(dsn: str) -> Iterator[Waiters]:
    """Sessions that wait for a lock, as other processes have them."""
    waiting = Waiters(dsn)
    yield waiting
    waiting.close()


class Waiters:
    """Threads with an engine each, that wait for one lock and release it at once."""

    def __init__(self, dsn: str) -> None:
        self._url = f"postgresql+psycopg://{dsn.split('://', 1)[1]}"
        self._pool = ThreadPoolExecutor()
        self._engines: list[Engine] = []
        self._work: list[Future[None]] = []

    def add(self, label: str, *names: str, writes: bool = False) -> None:
        engine = create_engine(self._url, connect_args={"application_name": label})
        self._engines.append(engine)
        lock = ReadWriteLock(engine, *names).write if writes else AdvisoryLock(engine, *names)
        self._work.append(self._pool.submit(lock.wrap(timeout=60)(lambda: None)))

    def close(self) -> None:
        for work in self._work:
            work.result(60)
        self._pool.shutdown()
        for engine in self._engines:
            engine.dispose()


@pytest.mark.one_driver
@pytest.mark.parametrize("count", [1, 2])
def test_waiters_are_listed_behind_their_holder_with_their_wait(
    name: str, dsn: str, engine: Engine, waiters: Waiters, count: int
) -> None:
    """The wait counts from its beginning, not from that of its slice; each one waits behind another one or the holder."""
    names = [f"{name}:{n}" for n in range(count)]
    keys = {LockKey.of(each) for each in names}

    def look() -> list[monitoring.Waiter]:
        return [waiter for row in monitoring.ps(engine) if row.holder.key in keys for waiter in row.waiters]

    with elsewhere(dsn, *names) as holder:
        for label in ("first", "second", "third"):
            waiters.add(label, *names)
            eventually(lambda label=label: label in {waiter.who.application_name for waiter in look()})
        # Longer than two slices, each of which would begin anew.
        eventually(lambda: [w.waiting >= timedelta(seconds=2) for w in look()] == [True] * 3)
        first, second, third = sorted(look(), key=lambda waiter: str(waiter.who.application_name))
        assert first.blocked_by == (holder.info.backend_pid,)
        ahead = {first.who.backend_pid, third.who.backend_pid, holder.info.backend_pid}
        assert set(second.blocked_by) <= ahead and second.blocked_by
        # The tickets and the clocks of the queue are not listed.
        assert {row.holder.key for row in monitoring.ps(engine, kind=["session", "transaction"])} == keys


@pytest.mark.one_driver
def test_waiting_writers_are_listed_behind_the_reader(name: str, engine: Engine, waiters: Waiters) -> None:
    """With the wait of each; of the other keys that they hold while they wait, only the turnstile is listed."""
    with ReadWriteLock(engine, name).read.hold():
        for label in ("one", "two"):
            waiters.add(label, name, writes=True)

        def look() -> list[timedelta]:
            return [waiter.waiting for waiter in find(monitoring.ps(engine), name).waiters]

        eventually(lambda: [wait >= timedelta(seconds=2) for wait in look()] == [True, True])
        held = find(monitoring.ps(engine), name)
        assert {waiter.who.application_name for waiter in held.waiters} == {"one", "two"}
        others = [row for row in monitoring.ps(engine, kind=["session", "transaction"]) if row.label != name]
        assert [row.holder.application_name in {"one", "two"} for row in others] in ([], [True])


@pytest.mark.one_driver
def test_a_holder_that_waits_itself_shows_the_chain(name: str, dsn: str, engine: Engine) -> None:
    """Its state is "waiting", and the processes follow that it waits for, the nearest first."""
    table = f'"{name}"'
    with (
        psycopg.connect(dsn) as last,
        psycopg.connect(dsn) as middle,
        psycopg.connect(dsn) as first,
        ThreadPoolExecutor() as pool,
    ):
        last.execute(f"CREATE TABLE {table} (i int PRIMARY KEY); INSERT INTO {table} VALUES (1), (2)")
        last.commit()
        last.execute(f"UPDATE {table} SET i = 10 WHERE i = 1")
        middle.execute(f"UPDATE {table} SET i = 20 WHERE i = 2")
        first.execute("SELECT pg_advisory_xact_lock(%s)", [LockKey.of(name).value])
        pids = [each.info.backend_pid for each in (middle, last)]
        work = [pool.submit(middle.execute, f"UPDATE {table} SET i = 11 WHERE i = 1")]
        eventually(lambda: engine_blocks(engine, pids[0]))
        work.append(pool.submit(first.execute, f"UPDATE {table} SET i = 21 WHERE i = 2"))
        eventually(lambda: find(monitoring.ps(engine), name).blocked_by == tuple(pids))
        assert find(monitoring.ps(engine, state="waiting"), name).holder.kind == "transaction"
        last.rollback()
        work[0].result(30)
        middle.rollback()
        work[1].result(30)
        first.rollback()
        last.execute(f"DROP TABLE {table}")
        last.commit()


def engine_blocks(engine: Engine, pid: int) -> bool:
    """Return whether a session waits for another one."""
    with engine.connect() as connection:
        return bool(connection.exec_driver_sql("SELECT pg_blocking_pids(%s)", (pid,)).scalar_one())


@pytest.mark.one_driver
def test_the_two_locks_of_an_idempotency_key_are_one_row(name: str, engine: Engine) -> None:
    """A claim in an open transaction is one row without a name; an equal request that waits is listed at it."""
    with Session(engine) as one, Session(engine) as two, ThreadPoolExecutor() as pool:
        with idempotent(one, "k", scope=name) as op:
            equal = pool.submit(idempotent(two, "k", scope=name, timeout=30).run, lambda: 2)

            def look() -> tuple[int, ...]:
                rows = monitoring.ps(engine, kind="idempotency", state="idle in transaction")
                return tuple(len(row.waiters) for row in rows)

            eventually(lambda: look() == (1,))
            assert list(monitoring.ps(engine, kind="transaction")) == []
            op.complete(1)
        one.commit()
        assert equal.result(30) == 1


@pytest.mark.one_driver
def test_a_transaction_inside_a_gate_is_listed_by_the_name_of_the_gate(name: str, engine: Engine) -> None:
    """The gate's number in pg_locks is turned back into the resource."""
    with Lease(engine, name, ttl=30).hold() as lease:
        with lease.begin(engine):  # creates the gate
            pass
        with lease.begin(engine):
            (row,) = monitoring.ps(engine, name, kind="gate")
    assert (row.label, row.state, row.holder.mode) == (name, "idle in transaction", "shared")


@pytest.mark.one_driver
def test_filters_and_limit(name: str, dsn: str, engine: Engine) -> None:
    """Prefix, kind and state choose; limit keeps the rows that are waited for, and says that there are more."""
    shop = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    configure(shop, namespace=f"{name}-ns")
    with (
        Lease(engine, f"{name}:a", ttl=30).hold(),
        Lease(engine, f"{name}:b", ttl=30).hold(),
        Lease(shop, "c", ttl=30).hold(),
    ):
        assert [row.label for row in monitoring.ps(engine, f"{name}:")] == [f"{name}:a", f"{name}:b"]
        assert [row.label for row in monitoring.ps(engine, f"{name}-ns:")] == [f"{name}-ns:c"]
        assert [row.label for row in monitoring.ps(shop, "c")] == ["c"]
        assert list(monitoring.ps(engine, name, kind="slot")) == []
        assert list(monitoring.ps(engine, name, state=["lost", "idle"])) == []
        first = monitoring.ps(engine, name, limit=1)
        assert len(first) == 1 and first.limited and not monitoring.ps(engine, name, limit=3).limited
    for wrong in ({"kind": "leases"}, {"state": "stuck"}, {"limit": 0}):
        with pytest.raises(ValueError):
            monitoring.ps(engine, **wrong)
    with pytest.raises(TypeError, match="kind must be a str or a sequence of str, not int"):
        monitoring.ps(engine, kind=7)  # type: ignore[call-overload]
    shop.dispose()


@pytest.mark.one_driver
def test_a_name_that_is_not_free_yet_is_listed(name: str, engine: Engine) -> None:
    """A name that is blocked by min_hold or lock_delay is listed with the time at which it becomes free."""
    Lease(engine, f"{name}:a", ttl=60, min_hold=30).acquire().release()
    (row,) = monitoring.ps(engine, name)
    assert row.state == "min_hold" and row.holder.expires_at > datetime.now(UTC)


@pytest.mark.one_driver
def test_a_role_sees_what_it_may_and_is_told_what_is_missing(
    name: str, dsn: str, engine: Engine, admin: psycopg.Connection[Any]
) -> None:
    """Without any privilege it sees locks and pids; with SELECT the tables; with pg_read_all_stats states and times."""
    with (
        role(admin, dsn, {}) as as_role,
        AdvisoryLock(engine, name).hold(),
        Lease(engine, name, ttl=30).hold(),
        engine.begin() as connection,
    ):
        TransactionLock(connection, f"{name}:t").acquire()
        watcher = create_engine(f"postgresql+psycopg://{as_role.split('://', 1)[1]}")
        user = watcher.url.username
        rows = monitoring.ps(watcher)
        session, transaction = (next(r for r in rows if r.holder.key == LockKey.of(n)) for n in (name, f"{name}:t"))
        assert (session.holder.kind, session.state, session.holder.application_name) == ("session", "idle", "app")
        assert (transaction.holder.kind, transaction.state) == ("transaction", "in transaction")
        assert session.holder.since is None and session.holder.host is None
        assert "pg_read_all_stats" in rows.hidden[0] and "pgfence_lease" in rows.hidden[1]
        admin.execute(
            f'GRANT SELECT ON pgfence_lease, pgfence_gate, pgfence_idempotency_key, pgfence_lock_name TO "{user}"'
        )
        admin.execute(f'GRANT pg_read_all_stats TO "{user}"')
        rows = monitoring.ps(watcher)
        assert rows.hidden == () and find(rows, f"{name}:t").state == "idle in transaction"
        assert any(row.holder.kind == "lease" and row.label == name for row in rows)
        watcher.dispose()


@pytest.mark.one_driver
def test_looking_takes_no_lock_and_waits_for_none(name: str, dsn: str, engine: Engine) -> None:
    """A list is returned with locked rows and in a read-only session, and its session holds no lock afterwards."""
    with Lease(engine, name, ttl=30).hold(), psycopg.connect(dsn) as other:
        other.execute("SELECT FROM pgfence_lease WHERE name = %s FOR UPDATE", [name])
        reading = engine.execution_options(postgresql_readonly=True)
        (row,) = monitoring.ps(reading, name)
    assert row.label == name
