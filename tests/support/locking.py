"""What the tests of session locks have in common: how to make one, and how to see it from outside."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psycopg
from sqlalchemy import event, text

from pgfence import AdvisoryLock, AsyncAdvisoryLock
from pgfence._holds.registry import ManagerRegistry
from pgfence._sql.ticket_queue import find_queue
from pgfence.keys import LockKey, resolve
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterator

    from support.worlds import Contender, World

_BY_PID = (
    "SELECT pid, state, query, backend_xmin, xact_start FROM pg_stat_activity WHERE application_name = %s ORDER BY pid"
)


def lock(world: World, engine: Any, *names: Any, **kwargs: Any) -> Any:
    """Return the world's session lock on an engine or connection."""
    return world.pick(AdvisoryLock, AsyncAdvisoryLock)(engine, *names, **kwargs)


def labelled(world: World, label: str, **kwargs: Any) -> Any:
    """Return an engine whose sessions are found by `sessions(admin, label)`."""
    arguments = (
        {"server_settings": {"application_name": label}} if world.name == "asyncpg" else {"application_name": label}
    )
    return world.engine(connect_args=arguments, **kwargs)


def limited(world: World, limits: dict[str, str], **kwargs: Any) -> Any:
    """Return an engine with the site's short limits, as a hook of the pool sets them.

    Those of a role hold while a connection is opened too, and a busy machine may need longer for that.
    """
    engine = world.engine(**kwargs)

    @event.listens_for(getattr(engine, "sync_engine", engine), "connect")
    def limit(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        for name, value in limits.items():
            cursor.execute(f"SET {name} = '{value}'")
        cursor.close()
        connection.commit()

    return engine


def sessions(admin: psycopg.Connection[Any], label: str) -> list[Any]:
    """Return the sessions with this application_name as named tuples: pid, state, query, backend_xmin, xact_start."""
    return admin.cursor(row_factory=psycopg.rows.namedtuple_row).execute(_BY_PID, [label]).fetchall()


@contextmanager
def elsewhere(dsn: str, *names: str | LockKey, label: str = "elsewhere") -> Iterator[psycopg.Connection[Any]]:
    """Hold keys in a session that has nothing to do with pgfence, as another process would."""
    with psycopg.connect(dsn, autocommit=True, application_name=label) as connection:
        for name in names:
            take(connection, name)
        yield connection


def take(connection: psycopg.Connection[Any], name: str | LockKey) -> None:
    """Take a key on a raw connection, waiting for it."""
    connection.execute(f"SELECT pg_advisory_lock({_literal(name)})")


def give(connection: psycopg.Connection[Any], name: str | LockKey) -> bool:
    """Give a key back on a raw connection, and say whether it was held there."""
    return connection.execute(f"SELECT pg_advisory_unlock({_literal(name)})").fetchone()[0]


def is_free(connection: psycopg.Connection[Any], name: str | LockKey) -> bool:
    """Say whether a raw connection gets a key at once; it gives it back."""
    granted = connection.execute(f"SELECT pg_try_advisory_lock({_literal(name)})").fetchone()[0]
    return granted and give(connection, name)


def _literal(name: str | LockKey) -> str:
    key = LockKey.of(name) if isinstance(name, str) else name
    if key.space == "bigint":
        return f"'{key.value}'::bigint"
    low = key.value & 0xFFFFFFFF
    return f"'{key.value >> 32}'::int, '{low - (1 << 32) if low >> 31 else low}'::int"


def waits(admin: psycopg.Connection[Any], name: str | LockKey, count: int = 1) -> Callable[[], bool]:
    """Return a condition: so many sessions wait in the server for a key, now."""
    value = (LockKey.of(name) if isinstance(name, str) else name).value
    query = (
        "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        " AND (classid::bigint << 32 | objid::bigint) = %s"
    )
    return lambda: admin.execute(query, [value]).fetchone()[0] >= count


def has_ticket(admin: psycopg.Connection[Any], label: str, *names: str | LockKey) -> Callable[[], bool]:
    """Return a condition: a session with this application_name has a ticket in the queue of a lock."""
    base = find_queue(resolve(names, ""))
    query = (
        "SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND granted"
        " AND mode = 'ExclusiveLock' AND objsubid = 1 AND application_name = %s"
        " AND (classid::bigint << 32 | objid::bigint) BETWEEN %s AND %s)"
    )
    return lambda: admin.execute(query, [label, base, base + 2**20 - 1]).fetchone()[0]


def standing(engine: Any) -> int:
    """Return how many contenders of this process wait behind another one, in the lines of one engine."""
    found = ManagerRegistry.of(getattr(engine, "sync_engine", engine)).values()
    return len(
        {
            id(ticket)
            for domain in found
            if hasattr(domain, "queue")
            for line in domain.queue._lines.values()
            for ticket in list(line)[1:]
        }
    )


def remembered(engine: Any) -> int:
    """Return for how many keys the lock manager of an engine keeps a queue."""
    (manager,) = ManagerRegistry.of(getattr(engine, "sync_engine", engine)).values()
    return len(manager.queue)


def terminate(admin: psycopg.Connection[Any], pid: int) -> None:
    """End a backend as an operator does."""
    assert admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid]).fetchone()[0]


async def run(world: Contender, connection: Any, statement: str, **kwargs: Any) -> Any:
    """Run a statement on a Connection or AsyncConnection, and return its first column of the first row, if any."""
    result = await world.call(connection.execute, text(statement), kwargs)
    return result.scalar() if result.returns_rows else None


@asynccontextmanager
async def background(work: Coroutine[Any, Any, Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Run something beside the block; what is left of it at the end is cancelled."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def freed(connection: psycopg.Connection[Any], name: str | LockKey) -> None:
    """Wait until a key is free, seen from a raw connection."""
    await eventually(lambda: is_free(connection, name))
