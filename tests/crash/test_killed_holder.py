"""A holder's process is killed, alone or with a forked child that lives on."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from support.locking import background, freed, is_free, lock, waits
from support.processes import alive
from support.programs import IMPORTS, holder
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from pgfence.testing._proxy import Proxy
    from support.processes import Script
    from support.worlds import World

FORKED = {
    "alone": "say('held'); park()",
    "with a living child": "fork_child(); say('held'); park()",
    "on the caller's own connection": """
await held.release()
connection = await engine.connect()
held = await AsyncAdvisoryLock(connection, sys.argv[2]).acquire()
fork_child(); say('held'); park()
""",
    "on connect()": """
await held.release()
manager = lock.connect()
connection = await manager.__aenter__()
fork_child(); say('held'); park()
""",
}


@pytest.mark.matrix
@pytest.mark.parametrize("body", FORKED.values(), ids=[how.replace(" ", "-") for how in FORKED])
async def test_a_killed_holder_frees_its_lock_for_the_next_at_once(
    world: World, name: str, script: Callable[..., Script], admin: psycopg.Connection[Any], body: str
) -> None:
    """C012: SIGKILL ends the server session, also while a child forked from the holder lives on; a waiter has it in no time."""
    holding = script(holder(world, body), world.url, name)
    holding.wait_for("held")
    waiter = world.other()
    async with background(waiter.call(lock(world, world.engine(), name).acquire, timeout=20)) as waiting:
        await eventually(waits(admin, name))
        holding.kill()
        held = await waiting
    assert held.state == "held"
    assert holding.child is None or alive(holding.child)
    await waiter.call(held.release)


SYNC_OPENING = """
held = []
thread = threading.Thread(target=lambda: held.append(AdvisoryLock(create_engine(sys.argv[1]), sys.argv[2]).acquire()))
thread.start()
say("opening"); park()
fork_child(); say("forked")
thread.join()
say("held"); signal.pause()
"""
ASYNC_OPENING = """
async def main():
    task = asyncio.ensure_future(AsyncAdvisoryLock(create_async_engine(sys.argv[1]), sys.argv[2]).acquire())
    say("opening")
    await asyncio.to_thread(park)
    fork_child(); say("forked")
    held = await task
    say("held"); signal.pause()

asyncio.run(main())
"""


@pytest.mark.twins
async def test_a_fork_while_connecting_does_not_keep_a_dead_holders_lock(
    world: World, name: str, script: Callable[..., Script], proxy: Proxy, admin: psycopg.Connection[Any]
) -> None:
    """C012: forked while a connection is being opened, a child has a copy of a socket that is not registered yet."""
    proxy.delay(1)
    holding = script(IMPORTS + world.pick(SYNC_OPENING, ASYNC_OPENING), world.url_of(proxy.dsn), name)
    holding.wait_for("opening")
    await eventually(lambda: proxy.connections() >= 1)
    holding._popen.stdin.close()
    holding.wait_for("forked")
    proxy.delay(0)
    holding.wait_for("held")
    assert not is_free(admin, name)
    holding.kill()
    assert alive(holding.child)
    await freed(admin, name)


CHILDREN = """
import gc

def drop():
    nonlocal held, lock, engine
    del held, lock, engine
    gc.collect()

for end in ({ends}):
    child = os.fork()
    if child == 0:
        seen = [held.state, held.lost]
        for wrong in (held.check, {release}):
            try:
                wrong()
            except LockNotHeldError:
                seen.append("refused")
        say(*seen)
        end()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    say("its end:", os.waitstatus_to_exitcode(status))
    held.check()
await held.release()
say("released")
"""
# Started by hand: a coroutine that was never awaited would warn.
RELEASE = ("held.release", "lambda: held.release().send(None)")
# A loop is one thing in the kernel for both processes: whatever its child closes, its parent loses, with any library.
ENDS = (
    ("lambda: None", "drop", "lambda: engine.dispose()", "sys.exit"),
    ("lambda: None", "drop"),
)


@pytest.mark.twins
async def test_a_forked_child_holds_nothing_and_harms_nothing(
    world: World, name: str, script: Callable[..., Script], admin: psycopg.Connection[Any]
) -> None:
    """C012: in the child the handle is released from the start; however the child ends, the parent still holds."""
    ends = world.pick(*ENDS)
    body = CHILDREN.format(release=world.pick(*RELEASE), ends=", ".join(ends))
    holding = script(holder(world, body), world.url, name)
    for _ in ends:
        assert holding.read_line() == "released False refused refused"
        assert holding.read_line() == "its end: 0"
    holding.wait_for("released")
    assert holding.go_on() == 0
    assert is_free(admin, name)


@pytest.mark.twins
async def test_a_killed_child_leaves_the_lock_with_its_parent(
    world: World, name: str, script: Callable[..., Script], admin: psycopg.Connection[Any]
) -> None:
    """C012: the child's end closes its copies of the parent's sockets, no more."""
    holding = script(
        holder(world, "fork_child(); say('held'); park(); held.check(); await held.release()"), world.url, name
    )
    holding.wait_for("held")
    os.kill(holding.child, signal.SIGKILL)
    await eventually(lambda: not alive(holding.child))
    assert not is_free(admin, name)
    assert holding.go_on() == 0
    assert is_free(admin, name)
