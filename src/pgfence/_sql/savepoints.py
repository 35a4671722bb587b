"""Record which locks a transaction has acquired, and which of them a ROLLBACK TO SAVEPOINT releases.

Requesting the same key again in one transaction must cost nothing, but a rollback to a savepoint that is older than the lock
releases the lock. Therefore SAVEPOINT, RELEASE and ROLLBACK TO are observed on each Connection with a transaction lock, whether
SQLAlchemy sends them or the application sends them as plain text. Any other statement that contains a word such as ROLLBACK or
COMMIT clears the record. The next request then queries the server again, which is always correct and takes one round trip.

One listener observes all connections of a dialect, because adding one to each Connection costs more than the lock.

Statements that bypass SQLAlchemy, on the driver's own connection, are not observed. If such a statement has ended the whole
transaction, the driver reports the end, and the record is cleared.

The record belongs to the Connection, and to one transaction at a time.
"""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import event

from pgfence._sql.postponed import send_postponed

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable
    from weakref import ref

    from sqlalchemy import Connection
    from sqlalchemy.engine import RootTransaction
    from sqlalchemy.engine.interfaces import ExecutionContext

    from pgfence.keys import LockKey

_HARMLESS = ("SELECT", "INSERT", "UPDATE", "DELETE", "WITH")
_NAME = r'\s+(?P<name>"[^"]+"|[A-Za-z_]\w*)\s*;?\s*'
# The pattern is not compiled here, because that takes longer than creating a module, and most programs send no savepoint on such
# a connection.
_SAVEPOINT = r"(?i)\s*SAVEPOINT" + _NAME
_RELEASE = r"(?i)\s*RELEASE(?:\s+SAVEPOINT(?=\s))?" + _NAME
_ROLLBACK_TO = r"(?i)\s*ROLLBACK(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT(?=\s))?" + _NAME
_READING = "_pgfence_reading"
_RECORDS = "_pgfence_records"
_ENDS = r"(?i)\b(?:ROLLBACK|ABORT|COMMIT|RELEASE|END|PREPARE)\b"


class TransactionRecord:
    """The keys that one transaction has acquired, with their modes, and its open savepoints."""

    __slots__ = ("__weakref__", "_keys", "_root", "_savepoints", "first")

    def __init__(self) -> None:
        self._root: ref[RootTransaction] | None = None
        self._keys: dict[Hashable, Any] = {}
        self._savepoints: list[tuple[str, dict[Hashable, Any]]] = []
        self.first = False
        """Whether only requests of pgfence have been sent in this transaction."""

    @classmethod
    def of(cls, connection: Connection) -> Self:
        """Return the record of the connection's current transaction.

        The record is empty if nothing is known about the transaction.
        """
        # getattr is used and not vars(), because creating the Connection's __dict__ would slow down all its attributes.
        records: dict[type[TransactionRecord], Any] | None = getattr(connection, _RECORDS, None)
        if records is None:
            records = {}
            setattr(connection, _RECORDS, records)
            read_along(connection)
        record: Self | None = records.get(cls)
        if record is None:
            record = records[cls] = cls()
        record._belong_to(connection.get_transaction())
        if len(connection.dialect.dispatch.do_execute) > 1:
            # Another listener executes statements in SQLAlchemy's place, and may hide some of them.
            record.forget()
        return record

    def _belong_to(self, root: RootTransaction | None) -> None:
        if self._root is None or root is None or self._root() is not root:
            self.forget()
            self._root = None if root is None else weakref.ref(root)

    def is_shared(self, key: LockKey) -> bool | None:
        """Return True if a key is held in shared mode, False if in exclusive mode, and None if it is not held or not known."""
        shared: bool | None = self._keys.get(key)
        return shared

    def add(self, keys: Iterable[LockKey], *, shared: bool) -> None:
        """Record the keys that the server has granted."""
        self._keys.update(dict.fromkeys(keys, shared))

    def find_open(self) -> tuple[ref[RootTransaction] | None, list[Hashable]]:
        """Return the transaction, or None if it has ended, and the keys that it holds. Any thread may call this."""
        root = None if (current := self._root) is None else current()
        return (None, []) if root is None or not root.is_active else (current, list(self._keys))

    def forget(self) -> None:
        self._keys.clear()
        self._savepoints.clear()
        self.first = False

    def read(self, statement: str) -> None:
        """Update the record for a statement that is about to be sent."""
        if found := re.fullmatch(_SAVEPOINT, statement):
            self._savepoints.append((found["name"], self._keys.copy()))
        elif found := re.fullmatch(_ROLLBACK_TO, statement):
            self._roll_back_to(found["name"])
        elif found := re.fullmatch(_RELEASE, statement):
            self._cut(found["name"])
        elif re.search(_ENDS, statement):
            self.forget()

    def _cut(self, name: str) -> dict[Hashable, Any] | None:
        """Remove the newest savepoint with this name, and the savepoints inside it.

        Return the keys that were held when it was set.
        """
        while self._savepoints:
            found, keys = self._savepoints.pop()
            if found == name:
                return keys
        return None

    def _roll_back_to(self, name: str) -> None:
        keys = self._cut(name)
        if keys is None:  # the savepoint is older than the record
            self.forget()
            return
        self._keys = keys
        self._savepoints.append((name, keys.copy()))


def mark_sent(connection: Connection) -> None:
    """Record that a statement bypassed SQLAlchemy, so that the next statement is not the first of the transaction."""
    for record in getattr(connection, _RECORDS, {}).values():
        record.first = False


def read_along(connection: Connection) -> None:
    """Observe the statements of an engine from now on."""
    dialect = vars(connection.dialect)
    if _READING not in dialect:
        event.listen(connection.engine, "do_execute", _read)
        event.listen(connection.engine, "do_executemany", _read)
        event.listen(connection.engine, "do_execute_no_params", _read_bare)
        # The mark is set last, so that the listeners are in place when another thread finds the mark. Adding a listener twice is
        # harmless.
        dialect[_READING] = True


def _read(_cursor: object, statement: str, _parameters: object, context: ExecutionContext) -> None:
    harmless = statement.startswith(_HARMLESS) and ";" not in statement
    if not harmless or "set_config" in statement:
        send_postponed(context.root_connection)
    records = getattr(context.root_connection, _RECORDS, None)
    if records is None:
        return
    for record in records.values():
        record.first = False
        if not harmless:
            record.read(statement)


def _read_bare(cursor: object, statement: str, context: ExecutionContext) -> None:
    _read(cursor, statement, None, context)
