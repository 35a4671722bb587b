"""The server crashes, is away for a while, and comes back."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence.errors import LockLostError, UnreachableError
from support.locking import background, is_free, labelled, lock, run, sessions, waits
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from support.servers import OwnServer
    from support.worlds import World


def connect(server: OwnServer) -> psycopg.Connection[Any]:
    return psycopg.connect(server.dsn, autocommit=True, application_name="admin")


async def test_a_crash_tells_holder_and_waiter_and_the_engine_lives_on(
    world: World, name: str, private_server: OwnServer
) -> None:
    """C046: the holder has lost it, the waiter's session cannot be replaced while the server is away; afterwards all is new."""
    engine = labelled(world, name, dsn=private_server.dsn)
    one = lock(world, engine, name)
    warm = await world.call(lock(world, engine, f"{name}!").acquire)
    held = await world.call(one.acquire)
    told: list[str] = []
    held.on_lost(lambda: told.append(held.state))
    await world.call(warm.release)
    waiter = world.other()
    other = lock(world, labelled(world, f"{name} waiter", dsn=private_server.dsn), name)
    async with background(waiter.call(other.acquire, timeout=30)) as waiting:
        with connect(private_server) as admin:
            await eventually(waits(admin, name))
        began = time.monotonic()
        await asyncio.to_thread(private_server.stop, "immediate")
        await eventually(lambda: held.lost and told)
        assert (held.state, held.loss_reason, told) == ("lost", "killed", ["lost"])
        with pytest.raises(UnreachableError, match=r"(?s)no session|session ended") as caught:
            await waiting
        assert time.monotonic() - began < FAR
        assert caught.value.retryable
    for call in (lambda: world.call(one.try_acquire), lambda: world.call(one.holders)):
        with pytest.raises(UnreachableError) as caught:
            await call()
        assert private_server.password not in str(caught.value)
    private_server.start()
    with pytest.raises(LockLostError):
        await world.call(held.release)
    async with world.enter(one.hold(timeout=20)) as again:
        again.check()
        with connect(private_server) as admin:
            assert not is_free(admin, name)
            assert len(sessions(admin, name)) == 1
    with connect(private_server) as admin:
        assert is_free(admin, name)


async def test_work_on_the_holders_connection_ends_with_the_server(
    world: World, name: str, private_server: OwnServer
) -> None:
    """C044: after a restart the lent connection writes nothing more, though its engine would find a server."""
    with connect(private_server) as admin:
        admin.execute("CREATE TABLE IF NOT EXISTS written (what text)")
    with pytest.raises(LockLostError):
        async with world.enter(
            lock(world, labelled(world, name, dsn=private_server.dsn), name).connect()
        ) as connection:
            private_server.restart("immediate")
            for _ in range(2):
                with pytest.raises(Exception):  # noqa: B017 each driver has its own
                    await run(world, connection, "INSERT INTO written VALUES ('stale')")
                try:
                    await world.call(connection.rollback)
                except Exception:  # a dead connection may refuse
                    continue
    with connect(private_server) as admin:
        assert admin.execute("SELECT count(*) FROM written").fetchone() == (0,)
