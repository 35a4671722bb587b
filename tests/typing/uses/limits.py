"""At most ten calls at once, and at most a hundred a minute; one worker for each partition."""

from app import engine, get_async_engine, get_engine
from pgfence import AsyncHeldLease, AsyncPartitions, AsyncRateLimit, AsyncSemaphore, RateLimit, ReadWriteLock


async def call_provider() -> int:
    async with AsyncSemaphore(get_async_engine, "provider", permits=10, ttl=30).hold(timeout=5) as permit:
        await AsyncRateLimit(get_async_engine, "provider", limit=100, per=60).wait(timeout=5)
        return permit.token


def try_provider() -> bool:
    return RateLimit(get_engine, "provider", limit=100, per=60).try_take()


def reload_config() -> None:
    lock = ReadWriteLock(engine, "config")
    with lock.read.hold(timeout=1):
        pass
    with lock.write.hold(timeout=1) as held:
        held.downgrade().release()


async def serve(partition: int, lease: AsyncHeldLease) -> None:
    print(partition, lease.token)


async def consume() -> None:
    async with AsyncPartitions(get_async_engine, "orders", 64).join(serve) as worker:
        print(sorted(worker.owned))
