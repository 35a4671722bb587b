"""What a transaction holds by its own requests, and what a ROLLBACK TO SAVEPOINT takes away again.

The same key asked for again in one transaction must cost nothing, yet PostgreSQL drops a transaction lock when a savepoint
older than the lock is rolled back to. So each Connection on which a transaction lock was taken is read along: SAVEPOINT,
RELEASE and ROLLBACK TO, whoever writes them, SQLAlchemy or the user in plain text. What is not understood, or does not look
harmless, makes the record forget; then the server is asked again, which is always right and costs one round trip.

One listener reads for all connections of a dialect: to add one to each Connection costs more than the lock.

Not seen are statements that go past SQLAlchemy, on the driver's own connection. If such a statement has ended the whole
transaction, the driver knows, and the record is dropped too.

The record lives and dies with the Connection, and belongs to one transaction of it at a time.
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
_SAVEPOINT = re.compile(r"\s*SAVEPOINT" + _NAME, re.IGNORECASE)
_RELEASE = re.compile(r"\s*RELEASE(?:\s+SAVEPOINT(?=\s))?" + _NAME, re.IGNORECASE)
_ROLLBACK_TO = re.compile(r"\s*ROLLBACK(?:\s+(?:WORK|TRANSACTION))?\s+TO(?:\s+SAVEPOINT(?=\s))?" + _NAME, re.IGNORECASE)
_READING = "_pgfence_reading"
_RECORDS = "_pgfence_records"
_ENDS = re.compile(r"\b(?:ROLLBACK|ABORT|COMMIT|RELEASE|END|PREPARE)\b", re.IGNORECASE)


class TransactionRecord:
    """The keys that one transaction took, each with its mode, and its open savepoints."""

    __slots__ = ("_keys", "_root", "_savepoints", "first")

    def __init__(self) -> None:
        self._root: ref[RootTransaction] | None = None
        self._keys: dict[Hashable, Any] = {}
        self._savepoints: list[tuple[str, dict[Hashable, Any]]] = []
        self.first = False
        """Nothing has been sent in this transaction but requests of ours."""

    @classmethod
    def of(cls, connection: Connection) -> Self:
        """Return the record of the connection's present transaction, empty where nothing is known of it."""
        # Not by vars(): that would give the Connection a dict of its own, and make all its attributes slow.
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
            # Somebody executes statements in SQLAlchemy's place, and may keep some from us.
            record.forget()
        return record

    def _belong_to(self, root: RootTransaction | None) -> None:
        if self._root is None or root is None or self._root() is not root:
            self.forget()
            self._root = None if root is None else weakref.ref(root)

    def is_shared(self, key: LockKey) -> bool | None:
        """Return whether a key is held shared (True) or exclusive (False); None: not held, or not known."""
        shared: bool | None = self._keys.get(key)
        return shared

    def add(self, keys: Iterable[LockKey], *, shared: bool) -> None:
        """Note what the server has granted."""
        self._keys.update(dict.fromkeys(keys, shared))

    def forget(self) -> None:
        """Know of nothing any more."""
        self._keys.clear()
        self._savepoints.clear()
        self.first = False

    def read(self, statement: str) -> None:
        """Take notice of a statement that is about to be sent and may be about savepoints or the end of the transaction."""
        if found := _SAVEPOINT.fullmatch(statement):
            self._savepoints.append((found["name"], self._keys.copy()))
        elif found := _ROLLBACK_TO.fullmatch(statement):
            self._roll_back_to(found["name"])
        elif found := _RELEASE.fullmatch(statement):
            self._cut(found["name"])
        elif _ENDS.search(statement):
            self.forget()

    def _cut(self, name: str) -> dict[Hashable, Any] | None:
        """End the newest savepoint of that name and those within it; return what was held when it was set."""
        while self._savepoints:
            found, keys = self._savepoints.pop()
            if found == name:
                return keys
        return None

    def _roll_back_to(self, name: str) -> None:
        keys = self._cut(name)
        if keys is None:  # older than the record
            self.forget()
            return
        self._keys = keys
        self._savepoints.append((name, keys.copy()))


def mark_sent(connection: Connection) -> None:
    """Note a statement that goes past SQLAlchemy: what is sent after it is not the first one of the transaction."""
    for record in getattr(connection, _RECORDS, {}).values():
        record.first = False


def read_along(connection: Connection) -> None:
    """Read the statements of an engine from now on."""
    dialect = vars(connection.dialect)
    if _READING not in dialect:
        event.listen(connection.engine, "do_execute", _read)
        event.listen(connection.engine, "do_executemany", _read)
        event.listen(connection.engine, "do_execute_no_params", _read_bare)
        # Last: whoever finds it here need not wait for anything. To listen twice is to listen once.
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
