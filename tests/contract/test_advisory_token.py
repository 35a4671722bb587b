"""AdvisoryLock(token=True): a session lock whose grant brings a fencing token."""

from __future__ import annotations

import asyncio
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine, event, text

import pgfence
from pgfence import AdvisoryLock, AsyncOnce, Once, monitoring, schema
from pgfence.config import configure
from pgfence.errors import (
    LockLostError,
    LockNotHeldError,
    LockTimeoutError,
    SchemaError,
    StaleFencingTokenError,
    TransactionStateError,
)
from pgfence.fence import fence
from pgfence.fence.handles import AsyncFencedHeld, FencedHeld
from pgfence.keys import LockKey, qualify_name
from support import leases
from support.locking import background, elsewhere, is_free, lock, run, standing, terminate, waits
from support.rows import every_row
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.servers import OwnServer
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


def row(admin: psycopg.Connection[Any], name: str, prefix: str = "pgfence_") -> Any:
    """The lease's row of a name: its token, and whether it is held as a lease."""
    return admin.execute(
        f"SELECT token, lease_id IS NOT NULL AND released_at IS NULL FROM {prefix}lease WHERE name = %s", [name]
    ).fetchone()


def hold_as_lease(admin: psycopg.Connection[Any], name: str, ttl: float = 60) -> int:
    """Acquire a lease of the name, as another process would."""
    found = admin.execute(
        "SELECT granted, token FROM pgfence_acquire_lease_v2(%s, gen_random_uuid()::text, %s, 0, 0, NULL,"
        " 'worker-7', 'host-1', 7, 'close', NULL, 'lease')",
        [name, ttl],
    ).fetchone()
    assert found is not None and found[0]
    return int(found[1])


@pytest.mark.every_driver
async def test_a_grant_brings_a_token_that_is_committed(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The handle's token is the one committed in the name's row, and the next grant has a larger token."""
    one = lock(world, world.engine(), name, token=True)
    held = await world.call(one.try_acquire)
    assert type(held) is world.pick(FencedHeld, AsyncFencedHeld)
    assert (held.token, held.state, held.keys) == (1, "held", (LockKey.of(name),))
    assert row(admin, name) == (1, False)
    assert not is_free(admin, name)
    await world.call(held.release)
    assert is_free(admin, name)
    async with world.enter(one.hold()) as again:
        assert again.token == 2
    assert row(admin, name) == (2, False)


@pytest.mark.every_driver
async def test_lock_and_token_cost_one_round_trip(world: World, name: str) -> None:
    """One statement acquires lock and token, and one statement releases the lock."""
    engine = world.engine()
    one = lock(world, engine, name, token=True)
    await world.call((await world.call(one.try_acquire)).release)
    seen: list[str] = []
    event.listen(getattr(engine, "sync_engine", engine), "before_cursor_execute", lambda *a: seen.append(a[2]))
    held = await world.call(one.acquire, timeout=5)
    assert held.token == 2
    await world.call(held.release)
    assert ["lock_with_token_v2" in sent for sent in seen] == [True, False]
    assert "pg_advisory_unlock" in seen[1]


async def test_a_plain_lock_excludes_one_with_a_token_and_brings_none(world: World, name: str, dsn: str) -> None:
    """Both kinds share the key: they exclude each other, and only one of them has a token."""
    engine = world.engine()
    plain = await world.call(lock(world, engine, name).acquire)
    assert not hasattr(plain, "token")
    assert await world.other().call(lock(world, engine, name, token=True).try_acquire) is None
    assert await world.other().call(lock(world, world.engine(), name, token=True).try_acquire) is None
    await world.call(plain.release)
    with elsewhere(dsn, name), pytest.raises(LockTimeoutError) as caught:
        await world.call(lock(world, engine, name, token=True).acquire, timeout=0.3)
    assert [holder.application_name for holder in caught.value.holders] == ["elsewhere"]


@pytest.mark.every_driver
async def test_a_waiter_gets_the_lock_and_a_larger_token(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A wait ends with the grant at once after the release in another session."""
    first, second = world.engine(), world.engine()
    held = await world.call(lock(world, first, name, token=True).acquire)
    waiting = lock(world, second, name, token=True)
    async with background(world.other().call(waiting.acquire, timeout=20)) as task:
        await eventually(waits(admin, name))
        await world.call(held.release)
        later = await task
    assert later.token == held.token + 1
    await world.call(later.release)


async def test_a_lock_with_a_token_is_never_handed_over_locally(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Waiters of one process each request the lock from the server, so no two grants have the same token."""
    engine = world.engine()
    with_token, plain = lock(world, engine, name, token=True), lock(world, engine, name)
    tokens: list[int] = []
    held = await world.call(with_token.acquire)
    tokens.append(held.token)

    async def turn(which: Any) -> None:
        place = world.other()
        mine = await place.call(which.acquire, timeout=20)
        tokens.append(getattr(mine, "token", 0))
        await place.call(mine.release)

    order = [plain, with_token, with_token, plain, with_token]
    tasks = []
    for count, which in enumerate(order, start=1):
        tasks.append(asyncio.create_task(turn(which)))
        await eventually(lambda count=count: standing(engine) == count)
    await world.call(held.release)
    await asyncio.gather(*tasks)
    assert tokens == [1, 0, 2, 3, 0, 4]
    assert row(admin, name)[0] == 4


def test_a_wait_writes_no_line_into_the_servers_log(name: str, make_server: Callable[..., OwnServer]) -> None:
    """The server function catches its own timeouts: a wait of several slices leaves no ERROR behind."""
    server = make_server(
        settings={"logging_collector": "on", "log_directory": "log", "log_filename": "server.log"},
    )
    query = "SELECT count(*) FROM regexp_matches(pg_read_file('log/server.log'), 'ERROR:', 'g')"
    engine = create_engine(f"postgresql+psycopg://{server.dsn.split('://', 1)[1]}")
    schema.create_all(engine)
    with elsewhere(server.dsn, name) as other:
        before = other.execute(query).fetchone()
        with pytest.raises(LockTimeoutError):
            AdvisoryLock(engine, name, token=True).acquire(timeout=1.7)
        assert other.execute(query).fetchone() == before
    engine.dispose()


async def test_a_lease_of_the_same_name_keeps_it_busy_and_its_token(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """While a lease of the name is held, its token does not change, and a waiter polls a few times a second."""
    engine = world.engine()
    token = hold_as_lease(admin, name)
    seen: list[str] = []
    event.listen(getattr(engine, "sync_engine", engine), "before_cursor_execute", lambda *a: seen.append(a[2]))
    one = lock(world, engine, name, token=True)
    assert await world.call(one.try_acquire) is None
    with pytest.raises(LockTimeoutError, match="worker-7 on host-1") as caught:
        await world.call(one.acquire, timeout=1.2)
    assert [(holder.kind, holder.token) for holder in caught.value.holders] == [("lease", token)]
    assert [holder.owner for holder in await world.call(one.holders)] == ["worker-7"]
    assert sum("lock_with_token_v2" in sent for sent in seen) <= 7
    assert row(admin, name) == (token, True)
    admin.execute("UPDATE pgfence_lease SET expires_at = 'epoch', free_at = 'epoch' WHERE name = %s", [name])
    async with world.enter(one.hold(timeout=5)) as held:
        assert held.token == token + 1


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["lease", "slot"])
async def test_no_lease_or_slot_is_granted_beside_it(world: World, name: str, kind: str) -> None:
    """While the lock is held, a lease or slot of the name is not granted; afterwards it gets the next token."""
    engine, other = world.engine(), world.engine()
    asked = (
        leases.lease(world, other, name)
        if kind == "lease"
        else world.pick(Once, AsyncOnce)(other, name, every=timedelta(days=1))
    )
    async with world.enter(lock(world, engine, name, token=True).hold()) as held:
        assert await world.call(asked.try_acquire) is None
        with pytest.raises(LockTimeoutError) as caught:
            await world.call(asked.acquire, timeout=0.1)
        seen = [caught.value.holders, await world.call(asked.holders)]
        seen.append(await world.call(lock(world, engine, name, token=True).holders))
        for (holder,) in seen:
            assert (holder.kind, holder.token, holder.pid) == ("session lock", held.token, os.getpid())
            assert (holder.host, holder.expires_at) == (socket.gethostname(), None)
            assert holder.backend_pid == held._hold.session.pid
    async with world.enter(asked.hold()) as lease:
        assert lease.token == held.token + 1
        assert await world.call(lock(world, engine, name, token=True).try_acquire) is None


async def test_a_lease_is_free_when_the_session_of_the_lock_ends(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A waiter for a lease gets it when the lock is released, and at once when the lock's session has ended."""
    engine = world.engine()
    asked = leases.lease(world, engine, name)
    seen: list[str] = []
    event.listen(getattr(engine, "sync_engine", engine), "before_cursor_execute", lambda *a: seen.append(a[2]))
    for ending in ("released", "killed"):
        held = await world.call(lock(world, world.engine(), name, token=True).acquire)
        seen.clear()
        async with background(world.other().call(asked.acquire, timeout=30)) as waiting:
            await eventually(lambda: sum("acquire_lease" in sent for sent in seen) > 1)
            assert not waiting.done()
            if ending == "released":
                await world.call(held.release)
            else:
                terminate(admin, held._hold.session.pid)
            lease = await waiting
        assert lease.token == held.token + 1
        await world.call(lease.release)


async def test_a_lost_lock_has_its_token(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """After the session has ended, the handle is lost, and the error has the token that is no longer valid."""
    engine = world.engine()
    held = await world.call(lock(world, engine, name, token=True).acquire)
    terminate(admin, held._hold.session.pid)
    await eventually(lambda: held.lost)
    with pytest.raises(LockLostError) as caught:
        await world.call(held.release)
    assert (caught.value.token, held.token) == (1, 1)
    async with world.enter(lock(world, engine, name, token=True).hold()) as again:
        assert again.token == 2


async def test_events_carry_the_token(world: World, name: str) -> None:
    """on_event receives the grant and the release with the token; without token=True, the token is None."""
    engine = world.engine()
    told: list[tuple[str, int | None]] = []
    configure(engine, on_event=lambda e: told.append((e.event, e.token)))
    async with world.enter(lock(world, engine, name, token=True).hold()):
        pass
    async with world.enter(lock(world, engine, name).hold()):
        pass
    assert told == [("acquired", 1), ("released", 1), ("acquired", None), ("released", None)]


async def test_connect_lends_the_connection_with_its_token(world: World, name: str) -> None:
    """The handle of a lent connection has the token, and enters gates."""
    async with world.enter(lock(world, world.engine(), name, token=True).connect(timeout=5)) as connection:
        assert pgfence.held(connection).token == 1


@pytest.mark.every_driver
async def test_on_the_callers_connection(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """On the caller's connection, outside a transaction, the lock works the same, and the connection stays usable."""
    async with world.enter(world.engine().connect()) as connection:
        held = await world.call(lock(world, connection, name, token=True).acquire, timeout=5)
        assert (held.token, is_free(admin, name)) == (1, False)
        assert row(admin, name) == (1, False)
        assert await run(world, connection, "SELECT 1") == 1
        await world.call(connection.commit)
        await world.call(held.release)
        assert is_free(admin, name)


@pytest.mark.matrix
@pytest.mark.every_driver
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
async def test_a_strict_default_isolation_is_no_obstacle(
    world: World, name: str, admin: psycopg.Connection[Any], role: Callable[..., str], isolation: str
) -> None:
    """After SQLSTATE 40001, which only the caller's connection can cause, a retry gets one lock and one token."""
    login = role(settings={"default_transaction_isolation": isolation})
    user = login.split("//")[1].split(":")[0]
    admin.execute(f"GRANT SELECT, INSERT, UPDATE ON pgfence_lease, pgfence_gate TO {user}")
    async with world.enter(lock(world, world.engine(), name, token=True).hold()):
        pass
    try:
        async with world.enter(world.engine(dsn=login).connect()) as connection:
            with psycopg.connect(world.dsn) as other:
                other.execute("UPDATE pgfence_lease SET token = 10 WHERE name = %s", [name])
                work = world.call(lock(world, connection, name, token=True).acquire, timeout=20)
                async with background(work) as task:
                    await eventually(lambda: blocks(admin, other.info.backend_pid))
                    other.commit()
                    held = await task
            assert held.token == 11
            await world.call(held.release)
            assert is_free(admin, name)
    finally:
        admin.execute(f"REVOKE ALL ON pgfence_lease, pgfence_gate FROM {user}")


def blocks(admin: psycopg.Connection[Any], pid: int) -> bool:
    """Whether another session waits for this server process."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
    return admin.execute(query, [pid]).fetchone()[0] > 0


async def test_a_row_that_stays_locked_counts_as_busy(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """After two seconds for the name's row a try fails; nothing is held, and the next one succeeds."""
    engine = world.engine()
    one = lock(world, engine, name, token=True)
    async with world.enter(one.hold()):
        pass
    with psycopg.connect(world.dsn) as other:
        other.execute("SELECT 1 FROM pgfence_lease WHERE name = %s FOR UPDATE", [name])
        assert await world.call(one.try_acquire) is None
        assert is_free(admin, name)
    async with world.enter(one.hold()) as held:
        assert held.token == 2


@pytest.mark.every_driver
async def test_missing_tables_are_an_error_with_the_command(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Without the tables the error names the command and nothing is held; locks without a token still work."""
    engine = world.engine()
    configure(engine, prefix="absent_")
    with pytest.raises(SchemaError, match="pgfence install --prefix absent_") as caught:
        await world.call(lock(world, engine, name, token=True).acquire, timeout=5)
    assert caught.value.__cause__ is not caught.value
    with pytest.raises(SchemaError):
        await world.call(lock(world, engine, name, token=True).holders)
    assert is_free(admin, name)
    async with world.enter(lock(world, engine, name).hold()):
        pass


@pytest.mark.every_driver
async def test_a_role_without_rights_gets_the_grant_in_the_error(
    world: World, name: str, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """The error for a role that may not write the row contains the missing GRANT, and nothing is held."""
    engine = world.engine(dsn=role())
    with pytest.raises(SchemaError, match="GRANT"):
        await world.call(lock(world, engine, name, token=True).acquire, timeout=5)
    assert is_free(admin, name)


@pytest.mark.every_driver
async def test_a_read_only_session_of_the_caller_is_rejected(
    world: World, name: str, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """The caller's connection keeps its settings: if it is read-only, no token can be drawn, and nothing is held."""
    login = role(settings={"default_transaction_read_only": "on"})
    user = login.split("//")[1].split(":")[0]
    admin.execute(f"GRANT SELECT, INSERT, UPDATE ON pgfence_lease, pgfence_gate TO {user}")
    engine = world.engine(dsn=login)
    try:
        async with world.enter(engine.connect()) as connection:
            with pytest.raises(TransactionStateError, match="read-only"):
                await world.call(lock(world, connection, name, token=True).acquire, timeout=5)
        assert is_free(admin, name)
        async with world.enter(lock(world, engine, name, token=True).hold()) as held:
            assert held.token == 1
    finally:
        admin.execute(f"REVOKE ALL ON pgfence_lease, pgfence_gate FROM {user}")


async def test_namespace_prefix_and_schema_say_where_the_token_stands(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The row is found under namespace and name, in the tables of this engine or tenant."""
    engine = world.engine()
    configure(engine, namespace="shop", prefix="tok%en_")
    tenant = engine.execution_options(schema_translate_map={None: "token_tenant"})
    for one in (engine, tenant):
        await world.call(schema.create_all, one)
        async with world.enter(lock(world, one, name, token=True).hold()) as held:
            assert held._hold.stored == qualify_name(name, "shop")
            token = held.token
    async with world.enter(lock(world, engine, name, namespace="other", token=True).hold()):
        pass
    assert token == 1
    query = 'SELECT name FROM {}"tok%%en_lease" WHERE name LIKE %s ORDER BY name'
    found = [admin.execute(query.format(where), [f"%{name}"]).fetchall() for where in ("", "token_tenant.")]
    assert found == [
        [(qualify_name(name, "other"),), (qualify_name(name, "shop"),)],
        [(qualify_name(name, "shop"),)],
    ]


async def test_in_a_decorator_each_call_has_its_name_and_token(world: World, name: str) -> None:
    """wrap() binds the name's template, and current() finds the fenced handle inside."""
    kind: Any = world.pick(FencedHeld, AsyncFencedHeld)
    one = lock(world, world.engine(), f"{name}:{{tenant}}", token=True)
    tokens: list[tuple[tuple[str, ...], int]] = []

    def note() -> None:
        handle = pgfence.current(kind)
        tokens.append((handle.names, handle.token))

    if world.is_async:

        @one.wrap(timeout=5)
        async def work(tenant: str) -> None:
            note()
    else:

        @one.wrap(timeout=5)
        def work(tenant: str) -> None:
            note()

    for tenant in ("red", "blue", "red"):
        await world.call(work, tenant)
    assert tokens == [((f"{name}:red",), 1), ((f"{name}:blue",), 1), ((f"{name}:red",), 2)]


@every_row(
    ("names", "error"),
    [
        (("a", "b"), ValueError),
        ((), ValueError),
        ((LockKey.raw(1),), TypeError),
        ((LockKey.of("a"),), TypeError),
        (("x" * 256,), ValueError),
    ],
)
async def test_a_token_belongs_to_one_name_that_is_text(
    world: World, names: tuple[Any, ...], error: type[Exception]
) -> None:
    """The constructor rejects several names, a LockKey, and a name that is too long for the table."""
    with pytest.raises(error):
        lock(world, world.engine(), *names, token=True)


async def test_many_contenders_get_one_token_each(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Eight contenders over two engines: each grant has a different token, in the order of the grants."""
    tokens: list[int] = []

    async def work(engine: Any) -> None:
        place = world.other()
        for _ in range(5):
            async with place.enter(lock(world, engine, name, token=True).hold(timeout=30)) as held:
                tokens.append(held.token)

    await asyncio.gather(*(work(engine) for engine in [world.engine(), world.engine()] * 4))
    assert tokens == list(range(1, 41))
    assert row(admin, name) == (40, False)


@pytest.mark.async_only
@pytest.mark.every_driver
async def test_a_cancelled_wait_leaves_neither_lock_nor_waiter(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A task that is cancelled while it waits in the server holds nothing, and the next contender gets a token."""
    with elsewhere(world.dsn, name):
        task = asyncio.create_task(lock(world, world.engine(), name, token=True).acquire(timeout=20))
        await eventually(waits(admin, name))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with world.enter(lock(world, world.engine(), name, token=True).hold(timeout=5)) as held:
        assert row(admin, name) == (held.token, False)


@pytest.fixture
def ledger(dsn: str, tables: None, name: str) -> Iterator[str]:
    """A table that PostgreSQL itself fences by the test's name."""
    table = f"token_ledger_{name.rpartition(':')[2]}"
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with engine.begin() as connection:
        connection.execute(text(f"CREATE TABLE {table} (note text)"))
    schema.add_fence(engine, table, resource=name)
    yield table
    with engine.begin() as connection:
        connection.execute(text(f"DROP TABLE {table}"))
    engine.dispose()


async def test_writes_pass_the_fence_until_a_newer_token_is_granted(
    world: World, name: str, admin: psycopg.Connection[Any], ledger: str
) -> None:
    """begin() and fence() enter the gate with the lock's token; after the next grant the old token writes nothing."""
    engine = world.engine()
    write = f"INSERT INTO {ledger} VALUES ('written')"
    held = await world.call(lock(world, engine, name, token=True).acquire)
    async with world.enter(held.begin(engine)) as connection:
        await run(world, connection, write)
    async with world.enter(engine.begin()) as connection:
        await world.call(held.fence, connection)
        await run(world, connection, write)
    terminate(admin, held._hold.session.pid)
    await eventually(lambda: held.lost)
    async with world.enter(lock(world, engine, name, token=True).hold(timeout=5)) as newer:
        with pytest.raises(StaleFencingTokenError) as caught:
            async with world.enter(engine.begin()) as connection:
                await world.call(fence, connection, name, held.token)
        assert (caught.value.token, caught.value.newest) == (held.token, newer.token)
        with pytest.raises(LockLostError):
            async with world.enter(held.begin(engine)) as connection:
                await run(world, connection, write)
        async with world.enter(newer.begin(engine)) as connection:
            await run(world, connection, write)
    with pytest.raises(LockLostError):
        await world.call(held.release)
    with pytest.raises(LockNotHeldError):
        async with world.enter(newer.begin(engine)) as connection:
            await run(world, connection, write)
    assert admin.execute(f"SELECT count(*) FROM {ledger}").fetchone() == (3,)


async def test_on_its_own_connection_the_work_is_fenced_too(
    world: World, name: str, admin: psycopg.Connection[Any], ledger: str
) -> None:
    """On the connection of connect() a transaction enters the gate with the handle's token."""
    async with world.enter(lock(world, world.engine(), name, token=True).connect(timeout=5)) as connection:
        async with world.enter(connection.begin()):
            await world.call(pgfence.held(connection).fence, connection)
            await run(world, connection, f"INSERT INTO {ledger} VALUES ('written')")
    assert admin.execute(f"SELECT count(*) FROM {ledger}").fetchone() == (1,)


async def test_an_evicted_holder_writes_nothing_more(
    world: World, name: str, admin: psycopg.Connection[Any], ledger: str
) -> None:
    """After the eviction the fence rejects the old token, even if no other contender has acquired the lock."""
    engine = world.engine()
    held = await world.call(lock(world, engine, name, token=True).acquire)
    (evicted,) = await world.call(monitoring.evict, world.engine(), name, reason="hung")
    assert (evicted.kind, evicted.token, evicted.pid) == ("session lock", held.token, os.getpid())
    with pytest.raises(StaleFencingTokenError):
        async with world.enter(engine.begin()) as connection:
            await world.call(fence, connection, name, held.token)
    await eventually(lambda: held.lost)
    with pytest.raises(LockLostError):
        await world.call(held.release)
    assert admin.execute(f"SELECT count(*) FROM {ledger}").fetchone() == (0,)
