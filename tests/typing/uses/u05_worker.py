"""5 Long asyncio worker, lease and fence."""

from __future__ import annotations

from collections.abc import AsyncIterator

from sqlalchemy.ext.asyncio import AsyncSession

from app import AsyncSessionLocal, async_engine
from guarded import Entry
from pgfence import AsyncHeldLease, AsyncLease, fenced


async def chunks(after: int) -> AsyncIterator[list[int]]:
    for first in range(after + 1, 6, 2):
        yield [first, first + 1]


async def write(session: AsyncSession, period: str, chunk: list[int]) -> None:
    session.add_all([Entry(id=i, book=period) for i in chunk])


async def main(period: str) -> None:
    async with AsyncLease(
        async_engine, f"close:{period}", ttl=60, purpose="billing", heartbeat="progress"
    ).hold() as lease:
        done = lease.last_checkpoint
        async for chunk in chunks(after=done if isinstance(done, int) else 0):
            async with lease.begin(AsyncSessionLocal) as session:  # gate first, commit last
                await write(session, period, chunk)
                await lease.checkpoint(session, chunk[-1])
            lease.progress()


async def in_my_own_transaction(period: str, lease: AsyncHeldLease) -> None:
    async with AsyncSessionLocal.begin() as session, fenced(session, f"close:{period}", lease.token):
        await write(session, period, [3])
    lease.check()
    print(lease.remaining(), lease.state, lease.last_checkpoint)
