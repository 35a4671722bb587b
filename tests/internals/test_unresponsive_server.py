"""When nobody answers: a hung server, a process that stood still, a system whose kernel tells of no hang-up."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.errors import LockTimeoutError, UnreachableError
from pgfence.keys import LockKey
from support.locking import background, elsewhere, freed, is_free, lock, waits
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script
    from support.worlds import World

SCRIPT = """
import asyncio, inspect, time
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from pgfence import AdvisoryLock, AsyncAdvisoryLock
from pgfence._connections import connection
from pgfence._process import monitor

driver, dsn, name, setting = sys.argv[1:5]
ASYNC = driver in ("psycopg_async", "asyncpg")
exec(setting)
url = "postgresql+" + driver.removesuffix("_async") + "://" + dsn.split("://", 1)[1]
engine = (create_async_engine if ASYNC else create_engine)(url)

async def main():
    lock = (AsyncAdvisoryLock if ASYNC else AdvisoryLock)(engine, name)
    held = lock.acquire()
    held = await held if ASYNC else held
    seen = [held.state]
    say("held")
    while seen[-1] != "lost":
        if held.state != seen[-1]:
            seen.append(held.state)
            say(seen[-1])
        await asyncio.sleep(0.001) if ASYNC else time.sleep(0.001)
    say("seen", *seen)

if ASYNC:
    asyncio.run(main())
else:
    try:
        main().send(None)
    except StopIteration:
        pass
"""


def holder(admin: psycopg.Connection[Any], name: str) -> int:
    query = (
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1"
        " AND (classid::bigint << 32 | objid::bigint) = %s"
    )
    return admin.execute(query, [LockKey.of(name).value]).fetchone()[0]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_paused_process_trusts_nothing_until_the_server_responds(
    driver: str,
    name: str,
    dsn: str,
    script: Callable[..., Script],
    make_proxy: Callable[[str], Any],
    admin: psycopg.Connection[Any],
) -> None:
    """Rule 4: stopped and continued: unknown, then held again after an answer; killed meanwhile: lost, never held again."""
    proxy = make_proxy(dsn)
    proxy.delay(0.05)  # so that the doubt lasts long enough to be seen
    process = script(SCRIPT, driver, proxy.dsn, name, "monitor.PAUSE = 0.2")
    process.wait_for("held")
    process.kill(signal.SIGSTOP)
    time.sleep(1.6)  # longer than a tick and the pause that is forgiven: the length is the subject
    process.kill(signal.SIGCONT)
    process.wait_for("unknown")
    process.wait_for("held")
    assert not is_free(admin, name)
    process.kill(signal.SIGSTOP)
    admin.execute("SELECT pg_terminate_backend(%s, 5000)", [holder(admin, name)])
    time.sleep(1.6)
    process.kill(signal.SIGCONT)
    process.wait_for("lost")
    # A slow machine may stand still more often. What must not be: held again, after the doubt, on a session that is gone.
    assert re.fullmatch(r"seen (unknown )?held( unknown held)+( unknown)? lost", process.read_line())


@pytest.mark.twins
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "psycopg_async", "asyncpg"])
def test_without_kernel_events_a_query_finds_the_loss(
    driver: str, name: str, dsn: str, script: Callable[..., Script], admin: psycopg.Connection[Any]
) -> None:
    """As on macOS and Windows: each hold is asked for in turns, answers leave it held, a killed backend is lost."""
    process = script(
        SCRIPT,
        driver,
        dsn,
        name,
        "monitor.HAS_HANGUP = connection.HAS_HANGUP = False; monitor.TICK = 0.1; connection.PROBE_EVERY = 0.3",
    )
    process.wait_for("held")
    before = admin.execute("SELECT state_change FROM pg_stat_activity WHERE pid = %s", [holder(admin, name)]).fetchone()
    eventually(
        lambda: (
            admin.execute("SELECT state_change FROM pg_stat_activity WHERE pid = %s", [holder(admin, name)]).fetchone()
            != before
        )
    )
    admin.execute("SELECT pg_terminate_backend(%s, 5000)", [holder(admin, name)])
    assert process.read_line() == "lost"
    assert process.read_line() == "seen held lost"


async def test_a_wait_on_a_server_that_falls_silent_ends(
    world: World, name: str, dsn: str, make_proxy: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung server keeps nobody past the end of the slice and its grace: nothing is held, and nobody says it was busy for ever."""
    for module in ("connection", "connection_sync", "connection_async"):
        monkeypatch.setattr(f"pgfence._connections.{module}.WAIT_GRACE", 0.3, raising=False)
    proxy, other = make_proxy(dsn), world.other()
    engine = world.engine(dsn=proxy.dsn)
    with elsewhere(dsn, name) as rival:
        async with background(other.call(lock(world, engine, name).acquire, timeout=1)) as task:
            await eventually(waits(rival, name))
            proxy.black_hole()
            start = time.monotonic()
            with pytest.raises((UnreachableError, LockTimeoutError)):
                await task
            assert time.monotonic() - start < FAR
        proxy.heal()
        proxy.cut()
    async with world.enter(lock(world, engine, name).hold(timeout=5)):
        pass


async def test_a_try_on_a_server_that_falls_silent_ends(
    world: World, name: str, dsn: str, make_proxy: Callable[[str], Any], admin: psycopg.Connection[Any]
) -> None:
    """A warm connection into a black hole: UnreachableError after its budget, never a grant and never a refusal."""
    proxy, other = make_proxy(dsn), world.other()
    engine = world.engine(dsn=proxy.dsn)
    one = lock(world, engine, name)
    await other.call((await other.call(one.acquire)).release)
    proxy.black_hole()
    async with background(other.call(one.try_acquire)) as task:
        await asyncio.sleep(0.3)
        assert not task.done()
        proxy.cut()
        proxy.refuse()
        with pytest.raises(UnreachableError):
            await task
    proxy.heal()
    await freed(admin, name)
    async with world.enter(one.hold(timeout=5)):
        pass
