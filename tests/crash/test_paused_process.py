"""The holder's own process is stopped, suspended or starved."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence._process import monitor
from pgfence.errors import LockLostError
from pgfence.testing._processes import pause
from support.locking import freed, is_free, labelled, lock, sessions, terminate
from support.programs import holder
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.processes import Script
    from support.servers import OwnServer
    from support.worlds import World

# A reader on a thread of its own: the loop of an async holder has to be free for the answer to its question.
OBSERVER = """
from pgfence._process import monitor
monitor.PAUSE = 1.0

def tell(line):
    os.write(1, f"{line}\\n".encode())  # whole, whichever thread speaks

def observe():
    seen = None
    while seen != "lost":
        if held.state != seen:
            seen = held.state
            tell(seen)
        time.sleep(0.001)

held.on_lost(lambda: tell(f"told {held.loss_reason}"))
threading.Thread(target=observe, daemon=True).start()
while True:
    await asyncio.sleep(0.05)
"""
PAUSED = 3.0


async def paused(holding: Script) -> None:
    """Stop a process for longer than a tick and its pause limit, and let it go on."""
    holding.kill(signal.SIGSTOP)
    began = time.monotonic()
    await eventually(lambda: time.monotonic() - began > PAUSED)
    holding.kill(signal.SIGCONT)


async def test_after_a_pause_nothing_is_trusted_until_the_server_responds(
    world: World, name: str, script: Callable[..., Script], private_server: OwnServer
) -> None:
    """On waking the state is unknown as long as the server does not respond, and held after its response."""
    holding = script(holder(world, OBSERVER), world.url_of(private_server.dsn), name)
    holding.wait_for("held")
    with psycopg.connect(private_server.dsn, autocommit=True) as admin:
        (pid,) = admin.execute("SELECT pid FROM pg_locks WHERE locktype = 'advisory'").fetchone()
        with pause(pid):
            await paused(holding)
            assert holding.read_line() == "unknown"
        assert holding.read_line() == "held"
        assert not is_free(admin, name)
        holding.kill()
        await freed(admin, name)


async def test_a_process_that_lost_its_lock_while_paused_notices_on_waking(
    world: World,
    name: str,
    script: Callable[..., Script],
    admin: psycopg.Connection[Any],
    advisory_rows: Callable[[], list[Any]],
) -> None:
    """Terminated while it was stopped: lost and notified at once when it runs again, with the true reason."""
    holding = script(holder(world, OBSERVER), world.url, name)
    holding.wait_for("held")
    (row,) = advisory_rows()
    holding.kill(signal.SIGSTOP)
    terminate(admin, row.pid)
    assert is_free(admin, name)
    await paused(holding)
    said = {holding.read_line(), holding.read_line()}
    if "unknown" in said:
        said = said - {"unknown"} | {holding.read_line()}
    assert said == {"lost", "told killed"}


@pytest.mark.twins
async def test_the_probe_after_a_pause_disturbs_no_statement(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Asked around the very moment of a release, a hundred times: nothing is called lost that was not, no error, no leak."""
    one = lock(world, world.engine(), name)
    for turn in range(100):
        held = await world.call(one.acquire)
        monitor.MONITOR._tick(time.monotonic(), paused=True)
        for _ in range(turn % 4):
            await asyncio.sleep(0)
        await world.call(held.release)
        assert (held.state, held.lost) == ("released", False)
        assert is_free(admin, name)


@pytest.mark.twins
async def test_a_question_that_finds_no_server_is_a_loss(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Asked after a pause of a session that has ended: lost, with the error on release."""
    held = await world.call(lock(world, labelled(world, name), name).acquire)
    (session,) = sessions(admin, name)
    terminate(admin, session.pid)
    monitor.MONITOR._tick(time.monotonic(), paused=True)
    await eventually(lambda: held.state == "lost")
    with pytest.raises(LockLostError):
        await world.call(held.release)


@pytest.mark.twins
async def test_a_pause_says_nothing_about_what_is_not_held(world: World, name: str) -> None:
    """Warm sessions, released handles and lent connections are not asked; they work afterwards."""
    engine = world.engine()
    held = await world.call(lock(world, engine, name).acquire)
    await world.call(held.release)
    async with world.enter(lock(world, engine, name).connect()):
        monitor.MONITOR._tick(time.monotonic(), paused=True)
    assert held.state == "released"
    async with world.enter(lock(world, engine, name).hold(timeout=5)) as again:
        assert again.state == "held"
