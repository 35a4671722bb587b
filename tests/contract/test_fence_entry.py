"""The statement that enters a gate bypasses SQLAlchemy, with the same hooks, errors and cancellation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgfence import LockTimeoutError, StaleFencingTokenError, configure
from pgfence.fence import fence
from support.leases import lease
from support.transactions import connection, lock, run, sqlstate_of, statements, value

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")


def root(engine: Any) -> Any:
    """Return the sync engine behind an engine."""
    return getattr(engine, "sync_engine", engine)


async def seen_by(world: World, engine: Any, name: str) -> list[str]:
    """Return the statements that a listener on the engine sees in one fenced transaction."""
    with statements(engine) as sent:
        async with connection(world, engine) as work:
            await world.call(fence, work, name, 1)
    return [statement for statement in sent if "enter_gate" in statement]


async def test_hooks_see_the_entry_also_when_they_come_later(world: World, name: str) -> None:
    """A tracer of the engine sees each entry, also on connections that were fenced before it was registered."""
    engine = world.engine(pool_size=1, max_overflow=0)
    async with connection(world, engine) as work:
        await world.call(fence, work, name, 1)
    assert len(await seen_by(world, engine, name)) == 1


@pytest.mark.twins
async def test_leases_leave_no_mark_on_the_engine(world: World, name: str) -> None:
    """Statements of an engine that leases and fences use look for listeners no more than before; its disposal is noticed."""
    engine = world.engine()
    async with world.enter(lease(world, engine, name).hold()) as held, world.enter(held.begin(engine)) as work:
        await run(world, work, "SELECT 1")
    assert not root(engine)._has_events


async def test_an_entry_that_fails_says_what_sqlalchemy_says(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The error is SQLAlchemy's, with statement and SQLSTATE, and the connection is usable after a rollback."""
    engine, other = world.engine(), world.other()
    async with connection(world, engine) as work, connection(world, engine, other) as older:
        await other.call(fence, older, name, 1)
        await run(world, work, "SET LOCAL statement_timeout = 300")
        with pytest.raises(DBAPIError) as caught:
            await world.call(fence, work, name, 2, after_reads=True)
        assert sqlstate_of(caught.value.orig) == "57014"
        assert "enter_gate_v1" in str(caught.value.statement)
        assert not caught.value.connection_invalidated
        await other.call(older.commit)
        await world.call(work.rollback)
        await world.call(fence, work, name, 2)
        await world.call(work.commit)


async def test_a_connection_that_breaks_at_the_entry_is_given_up(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C014: a session that was ended is noticed by the entry, as by any statement, and leaves the pool."""
    engine = world.engine(pool_size=1, max_overflow=0)
    async with connection(world, engine) as work:
        backend = await value(world, work, "SELECT pg_backend_pid()")
        await world.call(work.commit)
        admin.execute("SELECT pg_terminate_backend(%s, 10000)", [backend])
        with pytest.raises(DBAPIError) as caught:
            await world.call(fence, work, name, 1)
        assert caught.value.connection_invalidated
    async with connection(world, engine) as work:
        await world.call(fence, work, name, 1)
        await world.call(work.commit)


@pytest.mark.async_only
async def test_an_entry_that_is_cancelled_leaves_no_connection_behind(
    world: World, name: str, admin: psycopg.Connection[Any], eventually: Callable[..., Any]
) -> None:
    """A task that is cancelled at the gate closes its connection, so that no other task reads the response."""
    engine = world.engine(pool_size=1, max_overflow=0)
    waiting = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
    with admin.transaction():
        admin.execute("SELECT pgfence_enter_gate_v1(%s, 1)", [name])
        async with connection(world, engine) as work:
            backend = await value(world, work, "SELECT pg_backend_pid()")
            await world.call(work.rollback)
            task = asyncio.ensure_future(world.call(fence, work, name, 2))
            await eventually(lambda: admin.execute(waiting, [backend]).rowcount == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    async with connection(world, engine) as work:
        assert await value(world, work, "SELECT pg_backend_pid()") != backend
        await world.call(work.rollback)
        await world.call(fence, work, name, 2)


async def test_a_wait_at_the_gate_puts_the_settings_back(world: World, name: str) -> None:
    """The settings after a wait at the gate are those from before the wait."""
    engine = world.engine()
    for token, own in ((1, "0"), (2, "7s")):
        async with connection(world, engine) as work:
            await run(world, work, f"SET lock_timeout = '{own}'")
            await world.call(work.commit)
            await world.call(fence, work, name, token)
            assert await value(world, work, "SHOW lock_timeout") == own
            await world.call(work.commit)


@pytest.mark.twins
async def test_the_default_timeout_at_the_gate_applies_to_newer_holders_only(world: World, name: str) -> None:
    """A newer holder gives up and its transaction is aborted. An older writer waits for the newer one, and is rejected."""
    engine, other = world.engine(), world.other()
    configure(engine, default_timeout=0.3)
    async with (
        connection(world, engine) as inside,
        connection(world, engine) as newer,
        connection(world, engine) as old,
    ):
        await world.call(fence, inside, name, 1)
        with pytest.raises(LockTimeoutError):
            await world.call(fence, newer, name, 2)
        with pytest.raises(DBAPIError) as aborted:
            await run(world, newer, "SELECT 1")
        assert sqlstate_of(aborted.value) == "25P02"
        await world.call(newer.rollback)
        await world.call(inside.commit)
        await world.call(fence, newer, name, 2)
        waiting = asyncio.ensure_future(other.call(fence, old, name, 1))
        assert not (await asyncio.wait([waiting], timeout=1))[0]
        await world.call(newer.commit)
        with pytest.raises(StaleFencingTokenError):
            await waiting


@pytest.mark.twins
async def test_all_writers_in_the_gate_are_named_as_holders(world: World, name: str) -> None:
    """C056: if several writers with one token are inside, all of them are named."""
    engine, other = world.engine(), world.other()
    inside = set()
    async with connection(world, engine) as one, connection(world, engine, other) as two:
        await world.call(fence, one, name, 1)
        await world.call(one.commit)
        for who, work in ((world, one), (other, two)):
            await who.call(fence, work, name, 1)
            inside.add(await value(who, work, "SELECT pg_backend_pid()"))
        async with connection(world, engine) as newer:
            await run(world, newer, "SET lock_timeout = 50")
            await world.call(newer.commit)
            with pytest.raises(LockTimeoutError, match="idle in transaction: SELECT pg_backend_pid") as caught:
                await world.call(fence, newer, name, 2)
    assert {holder.backend_pid for holder in caught.value.holders} >= inside
    assert caught.value.sqlstate == "PF003"


async def test_a_listener_that_executes_itself_cannot_hide_a_rollback(world: World, name: str) -> None:
    """C017: statements that a listener executes are not seen, so nothing counts as held or entered that might not be."""
    engine = world.engine()

    def instead(cursor: Any, statement: str, parameters: Any, _context: Any) -> bool:
        cursor.execute(statement, parameters)
        return True

    event.listen(root(engine), "do_execute", instead)
    async with connection(world, engine) as work, connection(world, engine) as other:
        await run(world, work, "SELECT 1")
        await run(world, work, "SAVEPOINT a")
        await world.call(lock(work, name).acquire)
        await run(world, work, "ROLLBACK TO a")
        await world.call(lock(work, name).acquire)
        assert await world.call(lock(other, name).try_acquire) is False


@pytest.mark.twins
async def test_a_handle_names_an_object_that_has_no_transaction(world: World, name: str) -> None:
    """An engine, or a connection of the other kind, raises TypeError instead of an error of an attribute."""
    engine, other = world.engine(), root(world.engine())
    async with world.enter(lease(world, engine, name).hold()) as held:
        for enter in (held.fence, lambda work: held.checkpoint(work, {})):
            with pytest.raises(TypeError, match="a fence needs a transaction"):
                await world.call(enter, engine)
            if world.is_async:
                with pytest.raises(TypeError, match="use the sync class"):
                    await world.call(enter, Session(other))
            else:
                with pytest.raises(TypeError, match="use the async class"):
                    enter(AsyncSession())


@pytest.mark.twins
async def test_a_checkpoint_waits_at_its_gate_for_the_default_timeout(world: World, name: str) -> None:
    """While a former holder is inside the gate, checkpoint() waits as long as fence() does."""
    engine, quick = world.engine(), world.engine()
    configure(quick, default_timeout=0.2)
    former = await world.call(lease(world, engine, name).acquire)
    async with connection(world, engine) as inside:
        await world.call(former.fence, inside)
        await world.call(former.release)
        async with world.enter(lease(world, engine, name).hold()) as held, connection(world, quick) as work:
            with pytest.raises(LockTimeoutError, match=r"within 0\.2 s"):
                await world.call(held.checkpoint, work, {})
