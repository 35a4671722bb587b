"""Two releases that replace a lock of redis-py with a lease.

pip install "pgfence[cli,psycopg]" redis
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
pgfence install
"""

from collections.abc import Callable

from redis import Redis
from sqlalchemy import create_engine

from pgfence import Lease

engine = create_engine("postgresql+psycopg://")  # reads PGHOST, PGDATABASE, ...


def release_n(redis: Redis, work: Callable[[], None]) -> None:
    """Hold both locks, and acquire the one in Redis first."""
    with redis.lock("billing", timeout=60), Lease(engine, "billing", ttl=60).hold():
        work()


def release_n_plus_1(work: Callable[[], None]) -> None:
    """Hold only the lease."""
    with Lease(engine, "billing", ttl=60).hold():
        work()
