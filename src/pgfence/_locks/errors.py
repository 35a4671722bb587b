"""What an error means to a contender for a session lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._connections.connect import lost_connection
from pgfence._connections.connection import ConnectionGoneError, LockConnection
from pgfence._holds.events import format_names
from pgfence._sql.sqlstate import DEADLOCK_DETECTED, OUT_OF_MEMORY, sqlstate
from pgfence.errors import CapacityError, DeadlockError, TransactionStateError

if TYPE_CHECKING:
    from pgfence._sql.advisory import LockSql


def translate_error(session: LockConnection, error: Exception, sql: LockSql) -> Exception:
    """Return what an error while contending means. Nothing is known to be held after it: the session is closed."""
    state = sqlstate(error)
    if told := sql.meaning(error):
        return told
    if state == DEADLOCK_DETECTED:
        return DeadlockError("PostgreSQL ended this wait as the victim of a deadlock: try again", sqlstate=state)
    if state == OUT_OF_MEMORY:
        facts = session.facts
        return CapacityError(
            "the server's lock table is full: hold fewer locks at a time or raise max_locks_per_transaction",
            used=facts.locks_used,
            limit=facts.lock_limit,
            sqlstate=state,
        )
    if lost_connection(session, error):
        gone = ConnectionGoneError()
        gone.__cause__ = error
        return gone
    return error


def in_transaction(names: tuple[str, ...], *, closed: bool = False) -> TransactionStateError:
    """The caller's connection is in a transaction while its lock is to be given back."""
    if closed:
        return TransactionStateError(
            f"the block of {format_names(names)} ended inside a transaction: whoever takes the lock next would not see its writes."
            " The connection was closed and the transaction is rolled back. Commit inside the block"
        )
    return TransactionStateError(
        f"{format_names(names)} cannot be released inside a transaction: whoever takes the lock next would not see its writes."
        " Commit or roll back first, then release; the lock is still held"
    )
