"""An asyncio worker that closes a book: a lease, a fence and a checkpoint."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import AsyncHeldLease, AsyncLease, fenced

engine = create_async_engine("postgresql+asyncpg://")
SessionLocal = async_sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Entry(Base):
    __tablename__ = "entry"
    book: Mapped[str] = mapped_column(primary_key=True)
    id: Mapped[int] = mapped_column(primary_key=True)


async def chunks(after: int) -> AsyncIterator[list[int]]:
    for first in range(after + 1, 6, 2):
        yield [first, first + 1]


async def write(session: AsyncSession, book: str, chunk: list[int]) -> None:
    session.add_all([Entry(book=book, id=id_) for id_ in chunk])


async def main(book: str) -> None:
    lease = AsyncLease(engine, f"close:{book}", ttl=60, heartbeat="progress")
    async with lease.hold() as held:
        done = held.last_checkpoint
        async for chunk in chunks(after=done if isinstance(done, int) else 0):
            async with held.begin(SessionLocal) as session:
                # The previous holder may have committed this chunk while we waited.
                if await session.get(Entry, (book, chunk[0])) is None:
                    await write(session, book, chunk)
                    await held.checkpoint(session, chunk[-1])
            held.progress()


async def write_in_own_transaction(book: str, held: AsyncHeldLease) -> None:
    async with SessionLocal.begin() as session:
        async with fenced(session, f"close:{book}", held.token):
            await write(session, book, [3])
    held.check()  # raises LockLostError if the lease has been lost since


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
