"""A system whose kernel reports no hang-up of a connection: there a query finds that it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pgfence.keys import LockKey
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script

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
def test_without_kernel_events_a_query_finds_the_loss(
    driver: str, name: str, dsn: str, script: Callable[..., Script], admin: psycopg.Connection[Any]
) -> None:
    """As on macOS and Windows: each hold is probed in turn, responses leave it held, a killed backend is lost."""
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
