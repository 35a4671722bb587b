"""Processes that hold a lease and stand still, die, or fork."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import schema
from pgfence.errors import StandbyError
from support.leases import lease, rival, row
from support.locking import background
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script
    from support.servers import OwnServer
    from support.standby import Standby
    from support.worlds import World

HOLDER = """
import time
from sqlalchemy import create_engine
from pgfence.lease import Lease
engine = create_engine(sys.argv[1])
held = Lease(engine, sys.argv[2], ttl=float(sys.argv[3])).acquire()
"""
OBSERVER = """
last = time.monotonic()
say("held")
while True:
    now = time.monotonic()
    state = held.state
    if now - last > 0.5:
        say("woke", state, held.loss_reason)
        break
    last = now
    time.sleep(0.001)
park()
"""


def holding(script: Callable[..., Script], dsn: str, name: str, ttl: float, code: str) -> Script:
    url = f"postgresql+psycopg://{dsn.split('://', 1)[1]}"
    return script(HOLDER + code, url, name, str(ttl))


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("taken", [True, False])
async def test_a_process_that_wakes_after_its_ttl_knows_at_once(
    script: Callable[..., Script], dsn: str, name: str, admin: psycopg.Connection[Any], taken: bool
) -> None:
    """C045, C062: stopped, somebody else has it after one TTL; woken, the first look says "lost", with no I/O."""
    holder = holding(script, dsn, name, 1.0, OBSERVER)
    holder.wait_for("held")
    holder.kill(signal.SIGSTOP)
    stopped = time.monotonic()
    if taken:
        await eventually(lambda: rival(admin, name) == 2)
    await eventually(lambda: time.monotonic() - stopped > 1.6)
    before = row(admin, name)
    holder.kill(signal.SIGCONT)
    woke, state, reason = holder.read_line().split()
    assert (woke, state) == ("woke", "lost")
    assert reason in {"expired", "cut off"}
    if taken:
        assert row(admin, name)[:-1] == before[:-1]


@pytest.mark.usefixtures("tables")
async def test_a_killed_holder_is_followed_after_one_ttl(
    world: World, script: Callable[..., Script], dsn: str, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C085: SIGKILL; who waits has it when the TTL is over."""
    holder = holding(script, dsn, name, 1.0, "say('held'); park()")
    holder.wait_for("held")
    one = lease(world, world.engine(), name)
    async with background(world.other().call(one.acquire, timeout=20)) as waiting:
        await eventually(lambda: not waiting.done())
        holder.kill()
        left = row(admin, name).left
        start = time.monotonic()
        held = await waiting
    assert left - 0.1 < time.monotonic() - start < FAR
    assert held.token == 2
    await world.call(held.release)


FORK = """
child = os.fork()
if child == 0:
    say("child", held.state, held.lost)
    try:
        held.release()
    except Exception as error:
        say(type(error).__name__)
    with Lease(engine, sys.argv[2] + ":2", ttl=1).hold() as own:
        before = own.expires_at
        while own.expires_at == before:
            time.sleep(0.01)
        say("renewed", own.state)
    os._exit(0)
os.waitpid(child, 0)
before = held.expires_at
while held.expires_at == before:
    time.sleep(0.01)
say(held.state)
held.release()
say("released")
park()
"""


@pytest.mark.usefixtures("tables")
def test_a_forked_child_has_no_part_in_its_parents_lease(
    script: Callable[..., Script], dsn: str, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The child's handle is released from the start; it can take leases of its own; the parent's goes on."""
    holder = holding(script, dsn, name, 1.0, FORK.replace('"child"', '"fork"'))
    assert holder.read_line() == "fork released False"
    assert holder.read_line() == "LockNotHeldError"
    assert holder.read_line() == "renewed held"
    assert holder.read_line() == "held"
    assert holder.read_line() == "released"
    assert rival(admin, name) == 2


async def test_a_standby_is_refused(world: World, name: str, pair: tuple[OwnServer, Standby]) -> None:
    """No lease can be written there; the error is typed, for every verb that would."""
    primary, copy = pair
    made = schema.create_all(world.engine(dsn=primary.dsn))
    if made is not None:
        await made
    one = lease(world, world.engine(dsn=copy.dsn), name)
    for call in (one.try_acquire, one.acquire):
        with pytest.raises(StandbyError):
            await world.call(call)
