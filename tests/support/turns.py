"""Contenders for one session lock that wait as different processes do, and how to see that one of them sleeps."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg

from pgfence._sql.ticket_queue import AWAKE, find_queue
from pgfence.keys import LockKey
from support.locking import background, elsewhere, give, has_ticket, labelled, lock, sessions, take, waits
from support.waiting import FAR, blocking, eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from support.worlds import World

_ASLEEP = (
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = %s AND state = 'idle' AND xact_start IS NULL"
    " AND query LIKE 'SELECT CASE WHEN pg_catalog.pg_try_advisory_lock_shared(CAST(%%')"
)


def is_asleep(admin: psycopg.Connection[Any], label: str) -> Callable[[], bool]:
    """Return a condition: a session with this application_name is idle since it looked whether its queue moves."""
    return lambda: admin.execute(_ASLEEP, [label]).fetchone()[0]


class Front:
    """Raw sessions with the first tickets of a lock's queue, each of which waits for the lock."""

    def __init__(self, dsn: str, admin: psycopg.Connection[Any], name: str, stack: ExitStack) -> None:
        self._key, base = LockKey.of(name), find_queue((LockKey.of(name),))
        self._pool = stack.enter_context(ThreadPoolExecutor())
        tickets = [LockKey.raw(base + n) for n in range(AWAKE)]
        self.sessions = [stack.enter_context(elsewhere(dsn, ticket)) for ticket in tickets]
        self._waits = [self._pool.submit(take, session, name) for session in self.sessions]
        stack.callback(self.leave)
        blocking(waits(admin, name, AWAKE))

    def stop(self) -> None:
        """Let none of them wait any more, as if all their processes were stopped. They keep their tickets."""
        for session, wait in zip(self.sessions, self._waits, strict=True):
            session.cancel()
            with suppress(psycopg.errors.QueryCanceled):
                wait.result(20)

    def leave(self) -> None:
        """Let all of them give up, and return their tickets."""
        self.stop()
        for session in self.sessions:
            session.execute("SELECT pg_advisory_unlock_all()")


@contextmanager
def front(dsn: str, admin: psycopg.Connection[Any], name: str) -> Iterator[Front]:
    """Let as many sessions wait for a lock as never sleep. The lock must be held. Whoever comes after them may sleep."""
    with ExitStack() as stack:
        yield Front(dsn, admin, name, stack)


class Sleeper:
    """A contender that sleeps behind the first waiters of a queue, while another session holds the lock."""

    def __init__(self, holder: Any, ahead: Front, contender: World, task: asyncio.Task[Any], name: str) -> None:
        self.holder, self.ahead = holder, ahead
        self._contender, self._task, self._name = contender, task, name

    async def is_served(self) -> None:
        """Release the lock, and wait until the contender has acquired and released it."""
        give(self.holder, self._name)
        await self._contender.call((await asyncio.wait_for(self._task, FAR)).release)


@asynccontextmanager
async def sleeping(
    world: World, dsn: str, admin: psycopg.Connection[Any], name: str, *, timeout: float
) -> AsyncIterator[Sleeper]:
    """Let a contender of another process wait for the lock, and begin the block when it sleeps."""
    contender = world.other()
    with elsewhere(dsn, name) as holder, front(dsn, admin, name) as ahead:
        work = contender.call(lock(world, labelled(world, name), name).acquire, timeout=timeout)
        async with background(work) as task:
            await eventually(is_asleep(admin, name))
            yield Sleeper(holder, ahead, contender, task, name)


class Waiters:
    """Contenders with an engine each, as different processes have."""

    def __init__(self, world: World, stack: AsyncExitStack, admin: psycopg.Connection[Any], *names: Any) -> None:
        self.world, self.stack, self.admin, self.names = world, stack, admin, names
        self.label = f"turns-{secrets.token_hex(6)}"
        self.served: list[int] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.overtaken = False

    def labelled(self, number: int) -> str:
        return f"{self.label}-{number}"

    async def add(self, **kwargs: Any) -> int:
        """Start a contender that waits, and return its number once it has its ticket."""
        number = len(self.tasks)
        engine = labelled(self.world, self.labelled(number))
        work = self._contend(number, lock(self.world, engine, *self.names, **kwargs))
        self.tasks.append(await self.stack.enter_async_context(background(work)))
        with_ticket = has_ticket(self.admin, self.labelled(number), *self.names)
        await eventually(lambda: self._watch(number) or with_ticket())
        return number

    def _watch(self, number: int) -> None:
        """Note whether a new waiter waits for the key itself, together with the waiter that has the first ticket."""
        self.overtaken = self.overtaken or (number > 0 and waits(self.admin, self.names[0], 2)())

    async def settle(self) -> None:
        """Wait until each waiter has begun more slices, so that rejoining the server's queue would change the order."""
        begun: dict[int, set[Any]] = {number: set() for number in range(len(self.tasks))}

        def look() -> bool:
            for number, starts in begun.items():
                starts.update(one.xact_start for one in sessions(self.admin, self.labelled(number)))
            return all(len(starts - {None}) > 2 for starts in begun.values())

        await eventually(look)

    async def _contend(self, number: int, wanted: Any) -> None:
        other = self.world.other()
        held = await other.call(wanted.acquire, timeout=60)
        self.served.append(number)
        await other.call(held.release)

    async def finish(self) -> list[int]:
        await asyncio.wait_for(asyncio.gather(*self.tasks), FAR)
        return self.served
