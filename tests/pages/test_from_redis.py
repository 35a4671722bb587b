"""The page about redis-py: what of its program runs without a Redis server."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import pages
from support.servers import database

PROGRAM = """
import redis
from from_redis_lock import Lease, engine, release_n, release_n_plus_1

done = []
nowhere = redis.Redis(port=1, retry=None)
try:
    release_n(nowhere, lambda: done.append("n"))
except redis.ConnectionError:
    release_n_plus_1(lambda: done.append("n+1"))
print(done, Lease(engine, "billing", ttl=60).is_held())
with Lease(engine, "billing", ttl=60).hold() as lease:
    print(lease.token)
"""


def test_the_release_without_redis_holds_the_lease_alone(dsn: str) -> None:
    """The second release runs; the first, whose Redis is away, has not got as far as the lease."""
    pytest.importorskip("redis")
    with database(dsn, "redis") as own:
        pages.install(own)
        command = [sys.executable, "-W", "error", "-c", PROGRAM]
        environment = pages.environment(own)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.stdout == "['n+1'] False\n2\n", done.stderr
