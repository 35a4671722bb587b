"""Store the names of session locks for operators, on the connection that has just acquired the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._locks.errors import build_collision_error
from pgfence._locks.name_recorder import recorder_of
from pgfence._process.callbacks import log
from pgfence._sql.encoding import TextError
from pgfence._sql.errors import is_connection_lost
from pgfence._sql.lock_names import list_new_names, note_sql, record_names
from pgfence._sql.storage import table_names_of
from pgfence.errors import KeyCollisionError

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from pgfence._connections.connection import LockConnection
    from pgfence._sql.advisory import LockSql

UNTRANSLATED = (TextError, KeyCollisionError)
"""Errors of an acquire call that are raised unchanged."""


async def note_names(engine: Engine, session: LockConnection, sql: LockSql, limit: float) -> None:
    """Store the names of a lock that this process has not stored yet, if the table of names exists.

    Nothing is sent on the caller's own connection. The engine's `NameRecorder` stores those names later.

    Raises:
        KeyCollisionError: a key belongs to another name.
    """
    if not session.ours:
        # On the caller's connection, which may soon be in a transaction, only the statements of the lock are sent.
        recorder = recorder_of(engine)
        recorder.reject_collisions(sql.keys)
        recorder.add(engine, sql.keys, session.driver.raw)
        return
    if not session.facts.has_names:
        return
    place = table_names_of(engine)
    if not (new := list_new_names(engine.dialect, place, sql.keys)):
        return
    # The keys are noted before the statement is sent, so that a cancelled statement is not sent again. Otherwise a caller
    # with a short time limit, whose connection is closed by each cancel, might never get the lock.
    known = record_names(engine.dialect, place, new)
    args = (list(new), list(new.values()))
    try:
        other: str | None = await session.fetch_value(engine, note_sql(place, sql.style), args, limit=limit)
    except Exception as error:
        if session.dead or is_connection_lost(error):
            raise
        # Only operators need names, so an error must not prevent the lock.
        log.debug("the names of locks cannot be stored: %s", error)
        other = None
    if other is not None:
        known.difference_update(new)
        raise build_collision_error(new.values(), other)
