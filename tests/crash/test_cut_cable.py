"""C045: the holder's machine vanishes. The kernel's budgets on both ends decide, the client's before the server's."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence.errors import LockLostError
from support import transactions
from support.locking import is_free, labelled, lock, run
from support.waiting import eventually
from support.worlds import NAMES, World

if TYPE_CHECKING:
    from support.network import FarServer

CLIENT_SECONDS, SERVER_SECONDS = 20, 30
SERVER = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
    "tcp_user_timeout": "30000",
    "client_connection_check_interval": "5s",
}


def kernel(fd: int) -> dict[str, int]:
    """Return the kernel's settings for a socket."""
    with closing(socket.socket(fileno=os.dup(fd))) as ours:
        tcp = {name: ours.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}")) for name in OPTIONS}
        return tcp | {"KEEPALIVE": ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}


OPTIONS = ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")


@pytest.mark.matrix
@pytest.mark.parametrize("form", ["hold", "connect"])
async def test_opening_and_closing_a_connection_have_their_budgets(world: World, name: str, form: str) -> None:
    """C045: keepalive and user timeout on both ends; the client gives up at 20 s, the server at 30 s."""
    manager = getattr(lock(world, world.engine(), name), form)()
    async with world.enter(manager) as entered:
        handle = entered if form == "hold" else held_on(entered)
        ours = kernel(handle._hold.session.driver.fileno())
        assert ours == {"KEEPIDLE": 5, "KEEPINTVL": 5, "KEEPCNT": 3, "USER_TIMEOUT": 20_000, "KEEPALIVE": 1}
        assert ours["KEEPIDLE"] + ours["KEEPINTVL"] * ours["KEEPCNT"] == CLIENT_SECONDS
        if form == "connect":
            assert {key: await run(world, entered, f"SHOW {key}") for key in SERVER} == SERVER
            await world.call(entered.rollback)
    server = {key: int(value.removesuffix("s")) for key, value in SERVER.items()}
    last_word = server["tcp_keepalives_idle"] + server["tcp_keepalives_interval"] * server["tcp_keepalives_count"]
    assert last_word == server["tcp_user_timeout"] / 1000 == SERVER_SECONDS >= CLIENT_SECONDS + 5


def held_on(connection: Any) -> Any:
    from pgfence import held

    return held(connection)


async def test_the_users_own_sockets_are_left_alone(world: World, name: str) -> None:
    """A lock on the caller's own connection sets nothing on its socket."""
    engine = world.engine()
    async with transactions.connection(world, engine) as connection:
        one = lock(world, connection, name)
        held = await world.call(one.acquire)
        before = kernel(held._hold.session.driver.fileno())
        assert before["USER_TIMEOUT"] == 0
        await world.call(held.release)


async def work(world: World, busy: Any, one: Any) -> None:
    """Run a statement that takes longer than any budget, on the lock's own connection."""
    async with busy.enter(one.connect()) as connection:
        await run(busy, connection, "SELECT pg_sleep(300)")


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_holder_that_is_cut_off_is_notified_before_its_lock_is_free(
    name: str, dsn: str, far_server: FarServer
) -> None:
    """C045: notified "cut off" in under 25 s on every driver; only after about 30 s does the server free the lock."""
    worlds = [World(each, dsn) for each in NAMES]
    locks = [lock(world, labelled(world, name, dsn=far_server.dsn), f"{name} {world.name}") for world in worlds]
    holders = [await world.call(one.acquire) for world, one in zip(worlds, locks, strict=True)]
    busy = worlds[0].other()
    working = asyncio.ensure_future(
        work(worlds[0], busy, lock(worlds[0], worlds[0].engine(dsn=far_server.dsn), f"{name} busy"))
    )
    near = f"host={far_server.folder} port={far_server.port} user=postgres dbname=postgres"
    with psycopg.connect(near, autocommit=True) as admin:
        assert not any(is_free(admin, f"{name} {world.name}") for world in worlds)
        await eventually(lambda: not is_free(admin, f"{name} busy"), deadline=10)
        told: dict[str, float] = {}
        for world, holder in zip(worlds, holders, strict=True):
            holder.on_lost(lambda world=world: told.setdefault(world.name, time.monotonic()))
        cut = time.monotonic()
        await asyncio.to_thread(far_server.network.cut)
        freed: dict[str, float] = {}

        working.add_done_callback(lambda _: told.setdefault("busy", time.monotonic()))

        def all_over() -> bool:
            for each in [*NAMES, "busy"]:
                if each not in freed and is_free(admin, f"{name} {each}"):
                    freed[each] = time.monotonic()
            return len(freed) == len(told) == len(worlds) + 1

        await eventually(all_over, deadline=60, pause=0.2)
        print({each: (round(told[each] - cut, 1), round(freed[each] - cut, 1)) for each in told})
        assert max(told.values()) - cut < 25
        assert told["busy"] < freed["busy"]
        with pytest.raises(Exception, match=r"(?i)connection|timed out"):
            await working
        for world, holder in zip(worlds, holders, strict=True):
            assert told[world.name] < freed[world.name]
            assert (holder.state, holder.loss_reason) == ("lost", "cut off"), world.name
            with pytest.raises(LockLostError, match="cannot be reached"):
                await world.call(holder.release)
        assert max(freed.values()) - cut < SERVER_SECONDS + 8
    await asyncio.to_thread(far_server.network.heal)
    for world, one in zip(worlds, locks, strict=True):
        async with world.enter(one.hold(timeout=20)) as again:
            again.check()
        await world.close()
