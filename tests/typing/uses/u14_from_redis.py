"""14 From redis-py Lock."""

from __future__ import annotations

from redis import Redis

from app import engine
from pgfence import Lease


def release_n(redis: Redis) -> None:
    with redis.lock("billing", timeout=60):  # Redis outside
        with Lease(engine, "billing", ttl=60).hold() as lease:  # N+1 drops Redis
            lease.renew(ttl=120)
            lease.check()


def release_n_plus_1() -> None:
    with Lease(engine, "billing", ttl=60).hold() as lease:
        lease.renew(ttl=120)
        lease.check()
    print(Lease(engine, "billing", ttl=60).is_held())
