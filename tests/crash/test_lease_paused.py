"""Processes that hold a lease and are stopped, die, or fork."""

from __future__ import annotations

import asyncio
import signal
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event

from pgfence import schema
from pgfence.errors import StandbyError
from support.leases import lease, rival, row
from support.waiting import eventually

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
    if now - last > 1.5:
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
    """C045, C062: stopped, another holder has it after one TTL; woken, the first access is "lost", without I/O."""
    holder = holding(script, dsn, name, 2.0, OBSERVER)
    holder.wait_for("held")
    holder.kill(signal.SIGSTOP)
    stopped = time.monotonic()
    if taken:
        await eventually(lambda: rival(admin, name) == 2)
    await eventually(lambda: time.monotonic() - stopped > 3)
    before = row(admin, name)
    holder.kill(signal.SIGCONT)
    woke, state, reason = holder.read_line().split()
    assert (woke, state) == ("woke", "lost")
    assert reason in {"expired", "cut off"}
    if taken:
        assert row(admin, name)[:-1] == before[:-1]


TTLS = (1.0, 1.4, 1.8, 2.2, 2.6)
SEVERAL = f"""
kept = [Lease(engine, f"{{sys.argv[2]}}:{{ttl}}", ttl=ttl).acquire() for ttl in {TTLS}]
say("held")
park()
"""


@pytest.mark.twins
@pytest.mark.usefixtures("tables")
async def test_a_killed_holder_is_followed_within_half_a_second_of_its_ttl(
    world: World, script: Callable[..., Script], dsn: str, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C085: SIGKILL; by the server's clock a waiter has it when the TTL is over, never before, and at most half a second later.

    Five leases that expire at different moments, of which the median counts: the machine may be busy at one of them.
    """
    holder = holding(script, dsn, name, 30, SEVERAL)
    holder.wait_for("held")
    engine, names = world.engine(), [f"{name}:{ttl}" for ttl in TTLS]
    asked: list[str] = []
    event.listen(getattr(engine, "sync_engine", engine), "after_cursor_execute", lambda *args: asked.append(args[2]))
    waiting = [
        asyncio.create_task(world.other().call(lease(world, engine, each).acquire, timeout=20)) for each in names
    ]
    await eventually(lambda: sum("acquire_lease" in text for text in asked) >= len(names))
    holder.kill()
    over = [row(admin, each).expires_at for each in names]
    granted = await asyncio.gather(*waiting)
    late = [(row(admin, each).acquired_at - end).total_seconds() for each, end in zip(names, over, strict=True)]
    assert min(late) >= 0
    assert statistics.median(late) < 0.5, late
    assert [held.token for held in granted] == [2] * len(TTLS)
    for held in granted:
        await world.call(held.release)


PAUSED = """
import logging
class Said(logging.Handler):
    def emit(self, record):
        if "was stopped for" in record.getMessage():
            say(record.levelname, record.getMessage().partition(",")[0])
logging.getLogger("pgfence.lease").addHandler(Said())
# Its thread must be asleep when the process is stopped: one that has not begun yet finds itself on time.
while not held._manager.heartbeat._wakes_at:
    time.sleep(0.01)
say("held")
while True:
    time.sleep(0.1)
"""


@pytest.mark.usefixtures("tables")
async def test_a_stopped_process_logs_a_warning_while_it_holds(
    script: Callable[..., Script], dsn: str, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A pause that took a quarter of the margin of its lease, or more, is a warning in the log; the lease is held still."""
    holder = holding(script, dsn, name, 20.0, PAUSED)
    holder.wait_for("held")
    stopped = time.monotonic()
    holder.kill(signal.SIGSTOP)
    # It sleeps for a second at most, and warns of what is twice as long as any pause before, which a busy machine makes too.
    await eventually(lambda: time.monotonic() - stopped > 4)
    holder.kill(signal.SIGCONT)
    assert holder.read_line().startswith("WARNING this process was stopped for ")
    assert row(admin, name).token == 1
    assert rival(admin, name) is None


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
    """The child's handle is released from the start; it can acquire its own leases; the parent keeps its lease."""
    holder = holding(script, dsn, name, 1.0, FORK.replace('"child"', '"fork"'))
    assert holder.read_line() == "fork released False"
    assert holder.read_line() == "LockNotHeldError"
    assert holder.read_line() == "renewed held"
    assert holder.read_line() == "held"
    assert holder.read_line() == "released"
    assert rival(admin, name) == 2


async def test_a_standby_is_rejected(world: World, name: str, pair: tuple[OwnServer, Standby]) -> None:
    """No lease can be written there; the error is typed, for every verb that would."""
    primary, copy = pair
    made = schema.create_all(world.engine(dsn=primary.dsn))
    if made is not None:
        await made
    one = lease(world, world.engine(dsn=copy.dsn), name)
    for call in (one.try_acquire, one.acquire):
        with pytest.raises(StandbyError):
            await world.call(call)
