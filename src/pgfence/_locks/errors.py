"""Translate errors raised while acquiring or releasing a session lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._connections.connection import ConnectionGoneError, LockConnection
from pgfence._holds.hold import format_names
from pgfence._sql.errors import is_connection_lost, translate_error
from pgfence.errors import KeyCollisionError, TransactionStateError
from pgfence.keys import unqualify_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pgfence._sql.advisory import LockSql

NO_CONNECTION = ": all connections for locks are in use. Increase max_lock_connections, or hold fewer locks at a time"


def translate_lock_error(session: LockConnection, error: Exception, sql: LockSql) -> Exception:
    """Return the exception for an error while contending for a lock. The caller closes the connection, so nothing is held."""
    context = sql.context._replace(lock_table=(session.facts.locks_used, session.facts.lock_limit))
    if told := translate_error(error, sql.row and sql.row[0], context):
        return told
    if session.dead or is_connection_lost(error):
        gone = ConnectionGoneError()
        gone.__cause__ = error
        return gone
    return error


def build_in_transaction_error(names: tuple[str, ...], *, closed: bool = False) -> TransactionStateError:
    """Return the error for releasing a lock on the caller's own connection while it is in a transaction."""
    if closed:
        return TransactionStateError(
            f"the block of {format_names(names)} ended inside a transaction, whose writes the next holder would not see. The"
            " connection was closed and the transaction was rolled back. Commit inside the block"
        )
    return TransactionStateError(
        f"{format_names(names)} cannot be released inside a transaction, whose writes the next holder would not see. Commit or"
        " roll back first, then release; the lock is still held"
    )


def build_collision_error(names: Iterable[str], other: str) -> KeyCollisionError:
    """Return the error for stored names, one of which has the key of another stored name."""
    names, other = tuple(map(unqualify_name, names)), unqualify_name(other)
    mine = ", ".join(map(repr, names))
    return KeyCollisionError(
        f"a 64-bit key of the lock on {mine} is also the key of the lock name {other!r}, so the locks exclude each other. Nothing"
        " was acquired. Rename one of them, or use another namespace",
        names=(*names, other),
    )
