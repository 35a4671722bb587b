"""PgBouncer in session mode: it is a pooler like any other until it is declared; then everything works and nothing is set."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psycopg
import pytest

from pgfence import configure
from pgfence.errors import LockLostError, LockTimeoutError, PoolerError, UnreachableError
from support.locking import background, elsewhere, freed, give, is_free, lock, run, terminate, waits
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

SITE = {"statement_timeout": "47s", "lock_timeout": "46s", "idle_in_transaction_session_timeout": "45s"}
ASKED = (
    *SITE,
    "idle_session_timeout",
    "default_transaction_isolation",
    "tcp_user_timeout",
    "client_connection_check_interval",
)


@pytest.fixture
def through(pgbouncer: Callable[..., str]) -> str:
    """The DSN through a session pooler."""
    return pgbouncer("session")


def declared(world: World, through: str, **kwargs: Any) -> Any:
    """Return an engine whose pooler was declared."""
    engine = world.engine(dsn=through, **kwargs)
    configure(engine, pooler="session")
    return engine


async def test_it_is_rejected_until_the_pooler_is_declared(
    world: World, name: str, through: str, advisory_rows: Callable[[], list[Any]]
) -> None:
    """C019: the mode cannot be proven from outside: rejected, and the message says how to declare it."""
    for word in ("auto", "direct"):
        engine = world.engine(dsn=through)
        configure(engine, pooler=word)
        with pytest.raises(PoolerError, match=r"(?s)lock_engine=.*pooler=\"session\"") as caught:
            await world.call(lock(world, engine, name).acquire)
        assert caught.value.mode == "unknown"
        assert f":{urlsplit(through).port}/" in str(caught.value)
    assert advisory_rows() == []


@pytest.mark.twins
async def test_a_database_that_the_pooler_does_not_know_is_not_retried(
    world: World, name: str, pgbouncer: Callable[..., str]
) -> None:
    """PgBouncer's own rejection counts as that of a server; the message names the pooler, for that is where to look."""
    through = pgbouncer("session")
    engine = world.engine(dsn=f"{through.rpartition('/')[0]}/no_such_database")
    with pytest.raises(UnreachableError, match=f":{urlsplit(through).port}/no_such_database: ") as caught:
        await world.call(lock(world, engine, name).acquire, timeout=60)
    assert (caught.value.retryable, caught.value.http_status) == (False, 500)


async def test_it_works_once_it_is_declared(
    world: World, name: str, through: str, admin: psycopg.Connection[Any]
) -> None:
    """Acquired, exclusive, released, several names, work on the lock's own connection."""
    engine = declared(world, through)
    one = lock(world, engine, name, f"{name}!")
    for _ in range(5):
        async with world.enter(one.hold(timeout=5)) as held:
            assert not is_free(admin, name)
            assert not is_free(admin, f"{name}!")
            held.check()
        assert is_free(admin, name)
    async with world.enter(one.connect(timeout=5)) as connection:
        assert await run(world, connection, "SELECT 1") == 1
        await world.call(connection.rollback)
        assert not is_free(admin, name)
    await freed(admin, name)
    await freed(admin, f"{name}!")


async def test_long_waits_work_through_it(
    world: World, name: str, through: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """Granted after several slices, the loud first and the quiet later ones; timed out likewise, with nothing held."""
    one = lock(world, declared(world, through), name)
    waiter = world.other()
    with elsewhere(dsn, name) as holder:
        began = time.monotonic()
        with pytest.raises(LockTimeoutError):
            await waiter.call(one.acquire, timeout=1.7)
        assert 1.6 < time.monotonic() - began < FAR
        async with background(waiter.call(one.acquire, timeout=20)) as waiting:
            began = time.monotonic()
            await eventually(lambda: time.monotonic() - began > 1.7 and waits(admin, name)())
            assert give(holder, name)
            held = await waiting
        assert not is_free(admin, name)
    await waiter.call(held.release)
    assert is_free(admin, name)


async def test_nothing_is_set_behind_it(
    world: World, name: str, pgbouncer: Callable[..., str], role: Callable[..., str], dsn: str
) -> None:
    """The pooler's session keeps what the site has set: while the lock is waited for and held, and for its next client."""
    through = pgbouncer("session", role(settings=SITE))
    before = shown(through)
    assert {key: before[key] for key in SITE} == SITE
    engine = declared(world, through)
    one = lock(world, engine, name)
    with elsewhere(dsn, name), pytest.raises(LockTimeoutError):
        await world.call(one.acquire, timeout=1.2)
    async with world.enter(one.connect(timeout=5)) as connection:
        assert {key: await run(world, connection, f"SHOW {key}") for key in ASKED} == before
        await world.call(connection.rollback)
    await world.call(engine.dispose)
    assert shown(through) == before


def shown(through: str) -> dict[str, str]:
    """What the next client of the pooler finds."""
    with psycopg.connect(through, autocommit=True) as client:
        return {key: client.execute(f"SHOW {key}").fetchone()[0] for key in ASKED}


@pytest.mark.twins
async def test_the_end_of_the_server_session_is_noticed(
    world: World, name: str, through: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """C042: PgBouncer closes its client's connection with it; then a new lock works."""
    one = lock(world, declared(world, through), name)
    held = await world.call(one.acquire)
    (row,) = advisory_rows()
    terminate(admin, row.pid)
    await eventually(lambda: held.lost)
    with pytest.raises(LockLostError):
        await world.call(held.release)
    async with world.enter(one.hold(timeout=10)):
        assert not is_free(admin, name)
    await freed(admin, name)
