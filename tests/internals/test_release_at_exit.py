"""A program ends in the middle of an acquire, or drops a lease: the lease is released before the interpreter exits."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.worlds import NAMES

if TYPE_CHECKING:
    import psycopg

pytestmark = pytest.mark.usefixtures("tables")

# Ctrl-C after the server has granted the lease: its response is not recorded yet, the heartbeat has just been started, or the
# handle is not assigned to a variable yet.
PROGRAM = """
import asyncio, sys, warnings
warnings.simplefilter("ignore" if sys.argv[4] == "dropped" else "error")
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from pgfence import AsyncLease, Lease
from pgfence._leases.heartbeat.service import HeartbeatService
from pgfence._leases.manager import LeaseManager

driver, dsn, name, when = sys.argv[1:5]
ASYNC = driver in ("psycopg_async", "asyncpg")
url = "postgresql+" + driver.removesuffix("_async") + "://" + dsn.split("://", 1)[1]
engine = (create_async_engine if ASYNC else create_engine)(url)
keep = HeartbeatService.keep

def interrupt(self, *args):
    if when == "kept":
        keep(self, *args)
    raise KeyboardInterrupt

if when == "kept":
    HeartbeatService.keep = interrupt
elif when == "unrecorded":
    LeaseManager._grant = interrupt
try:
    asyncio.run(AsyncLease(engine, name, ttl=60).acquire()) if ASYNC else Lease(engine, name, ttl=60).acquire()
except KeyboardInterrupt:
    pass
print("ends")
"""


@pytest.mark.parametrize("when", ["unrecorded", "kept", "dropped"])
@pytest.mark.parametrize("driver", NAMES)
def test_a_program_that_ends_at_an_acquire_leaves_no_lease(
    dsn: str, name: str, driver: str, when: str, admin: psycopg.Connection[Any]
) -> None:
    """The release has no connection yet when the program ends. The exit waits for it."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, driver, dsn, name, when],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ends\n")
    told = "" if when != "dropped" else f"the lease {name!r} was dropped without release(); releasing it now\n"
    assert done.stderr == told
    assert admin.execute("SELECT FROM pgfence_lease WHERE name = %s AND released_at IS NULL", [name]).fetchall() == []
