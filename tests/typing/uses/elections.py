"""What checkers must infer of elections, semaphores and reader/writer locks."""

from typing_extensions import assert_type

from app import async_engine, engine, get_async_engine, get_engine
from pgfence import (
    AsyncElection,
    AsyncHeld,
    AsyncMember,
    AsyncPermit,
    AsyncReadWriteLock,
    AsyncSemaphore,
    AsyncTerm,
    AsyncWriteHeld,
    Election,
    Held,
    Holder,
    Member,
    Permit,
    ReadWriteLock,
    Semaphore,
    Term,
    WriteHeld,
    monitoring,
)


def only_the_leader(pause: bool) -> None:
    member = Election(engine, "scheduler").stand(on_gained=print, on_lost=lambda: pause)
    assert_type(member, Member)
    assert_type(member.term, Term | None)
    assert_type(Election(get_engine, "scheduler").campaign(timeout=1), Term)
    with Election(engine, "scheduler").lead() as term:
        assert_type(term, Term)
    assert_type(Semaphore(engine, "a", permits=2, ttl=30).try_acquire(), Permit | None)
    assert_type(ReadWriteLock(engine, "a").read.acquire(), Held)
    assert_type(ReadWriteLock(get_engine, "a").write.acquire(), WriteHeld)
    assert_type(monitoring.ask_to_resign(engine, "scheduler", reason="deploy"), Holder | None)
    Semaphore(async_engine, "a", permits=2, ttl=30)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def only_the_leading_task() -> None:
    async with AsyncElection(async_engine, "scheduler").stand() as member:
        assert_type(member, AsyncMember)
        assert_type(member.term, AsyncTerm | None)
    assert_type(await AsyncElection(get_async_engine, "scheduler").campaign(), AsyncTerm)
    assert_type(await AsyncSemaphore(async_engine, "a", permits=2, ttl=30).acquire(), AsyncPermit)
    assert_type(await AsyncReadWriteLock(async_engine, "a").read.acquire(), AsyncHeld)
    assert_type(await AsyncReadWriteLock(get_async_engine, "a").write.acquire(), AsyncWriteHeld)
    assert_type(await monitoring.ask_to_resign(async_engine, "scheduler", reason="deploy"), Holder | None)
