"""C012: a forked child holds no lease of its parent, leaves the parent's heartbeat alone, and has its own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.worlds import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script

pytestmark = pytest.mark.usefixtures("tables")

# The parent holds a lease that was renewed once, so that threads and a connection are there when it forks.
FORKS = """
import asyncio, inspect, os, sys, time, warnings
warnings.simplefilter("error")
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from pgfence.errors import LockNotHeldError
from pgfence.lease import AsyncLease, Lease

driver, dsn, name = sys.argv[1:4]
ASYNC = driver in ("psycopg_async", "asyncpg")
url = "postgresql+" + driver.removesuffix("_async") + "://" + dsn.split("://", 1)[1]
engine = (create_async_engine if ASYNC else create_engine)(url)

def lease(which, **terms):
    return (AsyncLease if ASYNC else Lease)(engine, which, **terms)

async def call(function, *args, **kwargs):
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result

async def until(condition):
    for _ in range(500):
        if condition():
            return
        await call(asyncio.sleep, 0.01) if ASYNC else time.sleep(0.01)
    raise AssertionError("never")

async def renewed_twice(held):
    for _ in range(2):
        before = held.expires_at
        await until(lambda: held.expires_at > before)

async def child(held):
    assert held.state == "released"
    try:
        held.check()
    except LockNotHeldError:
        pass
    if not ASYNC:  # a loop does not survive a fork
        own = await call(lease(name + ":child", ttl=2).acquire)
        await renewed_twice(own)
        await call(own.release)

async def main():
    held = await call(lease(name, ttl=2).acquire)
    await renewed_twice(held)
    pid = os.fork()
    if pid == 0:
        try:
            await child(held)
        except BaseException as error:
            say("failed", type(error).__name__, error)
            os._exit(1)
        os._exit(0)
    await renewed_twice(held)
    say("forked", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    await renewed_twice(held)
    say("parent", held.state)
    await call(held.release)

if ASYNC:
    asyncio.run(main())
else:
    try:
        main().send(None)
    except StopIteration:
        pass
say("end")
"""


@pytest.mark.parametrize("driver", NAMES)
def test_a_forked_child_leaves_the_parents_heartbeat_alone(
    script: Callable[..., Script], dsn: str, name: str, driver: str, admin: psycopg.Connection[Any]
) -> None:
    """The parent's lease is renewed before, during and after the child's life, and the child has its own heartbeat."""
    running = script(FORKS, driver, dsn, name)
    assert [running.read_line() for _ in range(3)] == ["forked 0", "parent held", "end"]
    assert running.go_on() == 0
    held = admin.execute(
        "SELECT count(*) FROM pgfence_lease WHERE starts_with(name, %s) AND released_at IS NULL", (name,)
    ).fetchone()
    assert held == (0,)


ENDS = """
import asyncio, sys, warnings
warnings.simplefilter("error")
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from pgfence.lease import AsyncLease, Lease

driver, dsn, name = sys.argv[1:4]
ASYNC = driver in ("psycopg_async", "asyncpg")
url = "postgresql+" + driver.removesuffix("_async") + "://" + dsn.split("://", 1)[1]
engine = (create_async_engine if ASYNC else create_engine)(url)
kept = []

def renewed(held):
    before = held.expires_at
    return lambda: held.expires_at > before

async def main():
    held = await AsyncLease(engine, name, ttl=1.5).acquire()
    kept.append(held)
    done = renewed(held)
    while not done():
        await asyncio.sleep(0.01)

if ASYNC:
    asyncio.run(main())
else:
    import time
    held = Lease(engine, name, ttl=1.5).acquire()
    kept.append(held)
    done = renewed(held)
    while not done():
        time.sleep(0.01)
print("ends")
"""


@pytest.mark.parametrize("driver", NAMES)
def test_a_program_that_ends_during_a_renewal_prints_nothing(dsn: str, name: str, driver: str) -> None:
    """The interpreter exits soon, without output and with code 0, although heartbeat threads are running."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS, driver, dsn, name], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
