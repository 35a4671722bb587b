"""Turn a writer's lock into a reader's lock. At every moment, one of the two locks is held."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pgfence._connections.connection import RELEASE_BUDGET
from pgfence._holds.hold import Hold
from pgfence._holds.queue import QueueEntry
from pgfence._process.lifecycle import MUTEX
from pgfence._sql.errors import is_connection_lost
from pgfence._sql.read_write import ReadSql, build_downgrade
from pgfence.errors import LockNotHeldError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._locks.manager import LockManager, SessionHold

HandleT = TypeVar("HandleT")


async def downgrade(
    manager: LockManager, hold: SessionHold, make: Callable[[LockManager, SessionHold], HandleT]
) -> HandleT:
    """Turn a writer's hold into a reader's hold on the same connection, and return the reader's handle.

    Raises:
        LockNotHeldError: the lock was released before, or this is a forked child.
        LockLostError: the lock was lost before or during the call.
    """
    hold.check()
    try:
        await _replace_lock(manager, hold)
        mine, _ = manager._begin_release(hold)
        if not mine:
            raise hold.not_held_error()
        sql, session = ReadSql(hold.sql.keys, hold.sql.style), hold.session
        entry = QueueEntry(sql.places, hold.owner, manager.queue, no_handoff=True)
        reader = Hold(hold.names, sql, entry, session)
        with MUTEX:
            hold.owner.holds.append(reader)
            session.hold = entry.hold = reader
        # The next writer of this process may wait in the server now, and the next reader is admitted.
        hold.entry.leave()
        if session.dead is not None:  # the connection died after the statement, before the reader's hold was attached
            session.on_connection_lost(session.dead)
        hold.emit(manager.config.events, "released")
        reader.emit(manager.config.events, "acquired", waited=0.0)
        return make(manager, reader)
    except LockNotHeldError:
        raise
    except BaseException:
        manager.carrier.run_cleanup(lambda: _end_hold(manager, hold))
        raise


async def _replace_lock(manager: LockManager, hold: SessionHold) -> None:
    """Send the statement that unlocks for the writer and locks for the reader."""
    session = hold.session
    text, args = build_downgrade(hold.sql.keys, hold.sql.style)
    if not session.turn.acquire(False):
        await session.wait_for_probe()
    try:
        hold.check()  # again: another thread may have released the lock, and its connection may serve another holder
        kept = await session.fetch_value(manager.engine, text, args, limit=RELEASE_BUDGET)
    except Exception as error:
        if not (session.dead or is_connection_lost(error)):
            raise
        hold.reason = hold.reason or session.dead or "killed"
        raise hold.lost_error() from error
    finally:
        session.turn.release()
    if not kept:
        hold.reason = "killed"
        raise hold.lost_error()


def _end_hold(manager: LockManager, hold: SessionHold) -> None:
    """End the hold and its connection, which may hold either lock. Calling it again does nothing."""
    manager._begin_release(hold)
    manager._finish_interrupted_release(hold)
