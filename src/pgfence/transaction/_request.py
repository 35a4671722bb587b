"""Acquire transaction locks on a sync Session or Connection; the async class calls this through `run_sync`."""

from __future__ import annotations

import logging
import math
import weakref
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sqlalchemy import Connection, table, update
from sqlalchemy.exc import DBAPIError, UnboundExecutionError

from pgfence._api.misuse import Guided
from pgfence._api.transactions import open_connection
from pgfence._holds.hold import format_names
from pgfence._holds.wait_plan import NESTED_LIMIT, WARN_AFTER, to_milliseconds
from pgfence._locks.name_recorder import recorder_of
from pgfence._locks.own_holds import find_hold_elsewhere
from pgfence._process.clock import Deadline, clock, seconds
from pgfence._process.events import build_log_fields, emit_event
from pgfence._sql import activity, server
from pgfence._sql import transaction as sql
from pgfence._sql.errors import ErrorContext, raise_translated, standby_error
from pgfence._sql.params import style_of
from pgfence._sql.pipeline import find_driver
from pgfence._sql.savepoints import TransactionRecord
from pgfence._sql.sqlstate import IN_FAILED_TRANSACTION, LOCK_NOT_AVAILABLE, sqlstate_of
from pgfence.config import Config, config_of
from pgfence.errors import (
    CapacityError,
    LockTimeoutError,
    PgfenceError,
    TransactionStateError,
)
from pgfence.keys import check_names, list_labels, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy.engine.interfaces import Dialect
    from sqlalchemy.orm import Session

    from pgfence._holds.queue import Contender
    from pgfence._process.clock import Seconds
    from pgfence.keys import LockKey, Name
    from pgfence.types import Holder

log = logging.getLogger("pgfence.transaction")

MANY_KEYS = 100
_WARNED: weakref.WeakSet[Dialect] = weakref.WeakSet()

# This statement only selects the engine of a routing Session, and is never executed. A Session that routes reads must send it to
# the primary.
_WRITE = update(table("pgfence_lock"))


class PreparedCall(NamedTuple):
    """One request, with its connection and the keys that the transaction does not hold yet."""

    connection: Connection
    config: Config
    record: TransactionRecord
    keys: tuple[LockKey, ...]
    first: bool
    """Whether the next statement of the lock is certainly the first one of the transaction on the server."""


class TransactionLockBase(Guided):
    """The implementation of the sync and async classes, on a sync Session or Connection."""

    _absent = dict.fromkeys(
        ("release", "locked", "wrap", "connect"),
        "a transaction lock is released by COMMIT or ROLLBACK. Its methods are begin(), acquire(), try_acquire(), hold(),"
        " holders() and is_held()",
    )

    def __init__(
        self,
        names: Sequence[Name],
        namespace: str | None,
        bind_arguments: Mapping[str, Any] | None,
        *,
        shared: bool,
        expire: bool,
        stale_snapshot_ok: bool,
    ) -> None:
        check_names(names, namespace or "")
        self._resolved: tuple[str, tuple[LockKey, ...]] | None = None
        self._names = names
        self._namespace = namespace
        self._bind_arguments = bind_arguments
        self._shared = shared
        self._expire = expire
        self._stale_snapshot_ok = stale_snapshot_ok

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {format_names(self._list_labels())}>"

    def _list_labels(self) -> tuple[str, ...]:
        return list_labels(self._names)

    # ------------------------------------------------------------ where

    def _connect(self, work: Session | Connection) -> Connection:
        """Return the connection of the transaction, which a Session begins on the primary if necessary."""
        if isinstance(work, Connection):
            connection = work
        else:
            try:
                connection = open_connection(work, {"clause": _WRITE, **(self._bind_arguments or {})})
            except UnboundExecutionError as error:
                error.add_note("A lock has no mapped class: pass one, such as bind_arguments={'mapper': Account}")
                raise
        style_of(connection.dialect)
        server.check_version(connection.dialect)
        return connection

    def _resolve_keys(self, config: Config) -> tuple[LockKey, ...]:
        namespace = config.namespace if self._namespace is None else self._namespace
        resolved = self._resolved
        if resolved is None or resolved[0] != namespace:
            self._resolved = resolved = namespace, resolve(self._names, namespace)
        return resolved[1]

    def _prepare(self, work: Session | Connection) -> PreparedCall:
        """Find the missing keys, and reject states in which the lock would not protect, without an additional round trip."""
        connection = self._connect(work)
        config = config_of(connection)
        state = sql.read_driver_state(connection)
        self._check_mode(state)
        if not connection.in_transaction():
            # The transaction is begun explicitly, because statements that the application's hooks send at BEGIN must come before
            # those of the lock.
            connection.begin()
            state = sql.read_driver_state(connection)
        record = TransactionRecord.of(connection)
        if state.idle:
            # The server has no open transaction, because an earlier one on this connection was ended in plain SQL, which
            # also released its locks.
            record.forget()
        keys = self._find_missing(record, self._resolve_keys(config))
        if keys and self._expire and not isinstance(work, Connection):
            self._reject_unflushed(work)
        return PreparedCall(connection, config, record, keys, state.idle and not sql.has_hooks(connection))

    def _check_mode(self, state: sql.DriverState) -> None:
        if state.autocommit:
            raise self._autocommit_error()
        if state.pipeline:
            raise TransactionStateError(
                "the connection is in psycopg's pipeline mode, in which a result may belong to another statement: leave the"
                " pipeline before you acquire a lock"
            )

    def _autocommit_error(self) -> TransactionStateError:
        return TransactionStateError(
            f"the lock on {format_names(self._list_labels())} was not requested, because the connection is in autocommit, where the lock"
            " would end with its own statement. Use a connection without AUTOCOMMIT, or"
            f" {type(self).__name__.replace('TransactionLock', 'AdvisoryLock')}"
        )

    def _unbegun_error(self) -> TransactionStateError:
        return TransactionStateError(
            f"the lock on {format_names(self._list_labels())} is not held, because the server has no open transaction: SQL text has"
            " ended the transaction, and the driver has not begun another one. Commit and roll back through SQLAlchemy"
        )

    def _find_missing(self, record: TransactionRecord, keys: tuple[LockKey, ...]) -> tuple[LockKey, ...]:
        held = {key: record.is_shared(key) for key in keys}
        if not self._shared and (read := tuple(key.label for key in keys if held[key])):
            raise TransactionStateError(
                f"this transaction holds the shared lock on {format_names(read)}, and cannot acquire the exclusive lock too: two such"
                " transactions would deadlock. Acquire the exclusive lock first, instead of the shared one"
            )
        return tuple(key for key in keys if held[key] is None)

    def _reject_unflushed(self, session: Session) -> None:
        changed = [one for one in session.dirty if session.is_modified(one)] + list(session.deleted)
        if changed:
            kinds = ", ".join(sorted({type(one).__name__ for one in changed}))
            raise TransactionStateError(
                f"the Session has unflushed changes ({kinds}) that may be based on rows read before the lock"
                f" {format_names(self._list_labels())} was acquired, so another transaction's write could be lost. Acquire the lock"
                " first and load the rows afterwards; or flush() changes that other locks protect; or pass expire=False"
            )

    # ------------------------------------------------------------ what

    def _try(self, work: Session | Connection) -> bool:
        began, call = clock(), self._prepare(work)
        if not call.keys or self._take(work, call, Deadline.after(0.0, clock()), began):
            return True
        self._emit_end(call.config, "refused", began)
        return False

    def _acquire(self, work: Session | Connection, timeout: Seconds | None, owner: Contender) -> None:
        began = clock()
        asked = None if timeout is None else seconds(timeout)
        call = self._prepare(work)
        if not call.keys:
            return
        limit = _default_timeout(call.config, owner) if asked is None else asked
        if not self._take(work, call, Deadline.after(limit, began), began, owner):
            self._emit_end(call.config, "timeout" if limit else "refused", began)
            raise self._timeout_error(call, limit, owner)
        if (waited := clock() - began) > WARN_AFTER:
            names = self._list_labels()
            fields = build_log_fields("acquired", ", ".join(names))
            log.warning(
                "waited %.0f s for %s; this transaction now holds it", waited, format_names(names), extra=fields
            )

    def _acquire_for_block(self, work: Session | Connection, timeout: Seconds | None, owner: Contender) -> sql.Stay:
        """Acquire the lock for a block, and return the transaction that must not end before the block does."""
        self._acquire(work, timeout, owner)
        return sql.Stay.of(self._connect(work))

    def _check_held(self, _work: Session | Connection, stay: sql.Stay) -> None:
        """Raise an error unless the transaction still holds the lock.

        A round trip is needed only if a savepoint may have released it.
        """
        if stay.has_ended() or not self._holds(stay.connection):
            raise self._ended_error()

    def _holds(self, connection: Connection) -> bool:
        record = TransactionRecord.of(connection)
        try:
            return all(
                record.is_shared(key) is not None or activity.is_mine(connection, (key,))
                for key in self._resolve_keys(config_of(connection))
            )
        except DBAPIError as error:
            # An aborted transaction keeps its locks until it is rolled back. A lost connection has no locks.
            return sqlstate_of(error) == IN_FAILED_TRANSACTION

    def _take(
        self,
        work: Session | Connection,
        call: PreparedCall,
        deadline: Deadline,
        began: float,
        owner: Contender | None = None,
    ) -> bool:
        if len(call.keys) > MANY_KEYS:
            self._check_capacity(call)
        engine = call.connection.engine
        recorder = recorder_of(engine)
        recorder.watch(call.connection, call.record)
        recorder.reject_collisions(call.keys)
        try:
            granted = self._ask(call, deadline, owner)
        except DBAPIError as error:
            raise_translated(error, None, self._build_error_context())
            raise  # pgfence has no class for this error. The transaction belongs to the caller, who gets the error unchanged.
        if not granted:
            return False
        call.record.add(call.keys, shared=self._shared)
        if granted == "waited":
            recorder.add(engine, call.keys, find_driver(engine.dialect, call.connection.connection))
        # Instances that were loaded while another transaction held the lock may be older than its COMMIT.
        if self._expire and not isinstance(work, Connection):
            work.expire_all()
        self._emit_end(call.config, "acquired", began, contended=granted == "waited")
        return True

    def _emit_end(self, config: Config, event: str, began: float, *, contended: bool = True) -> None:
        if (events := config.events).active:
            names, waited = ", ".join(self._list_labels()), clock() - began
            emit_event(events, event, names, "transaction", waited=waited, contended=contended)

    def _ask(self, call: PreparedCall, deadline: Deadline, owner: Contender | None) -> Literal["free", "waited", False]:
        """Request the locks, and wait if there is time left. A rejected request leaves nothing locked."""
        connection, keys = call.connection, call.keys
        # Only some of several keys may be granted, and only a savepoint can release these.
        guarded = len(keys) > 1 and not call.first
        if guarded:
            sql.set_savepoint(connection)
        answer = sql.ask(connection, keys, shared=self._shared, stale_snapshot_ok=self._stale_snapshot_ok)
        if sql.read_driver_state(connection).idle:
            # The driver reported a transaction that the server does not have, for example after a COMMIT in plain SQL.
            raise self._unbegun_error()
        if answer.taken == len(keys):
            if guarded:
                sql.keep(connection)
            return "free"
        left = deadline.left(clock())
        own = None
        if answer.taken >= 0 and left and owner is not None:
            # Waiting for a session lock that this same thread or task holds on another connection would never end, and
            # PostgreSQL could not detect it: that connection is idle, not waiting.
            own = find_hold_elsewhere(owner, connection, self._list_labels(), keys)
        if guarded and (answer.taken < 0 or own is not None or not left):
            sql.give_back(connection)
        elif not guarded and answer.taken > 0:
            # The transaction contains no work of the caller yet, so a new one can release the keys that were granted.
            sql.begin_anew(connection)
        if answer.taken < 0:
            raise self._refusal_error(answer)
        if own is not None:
            raise own
        if not left:
            return False
        if not guarded:
            sql.set_savepoint(connection)
        return "waited" if self._wait(call, answer, left) else False

    def _wait(self, call: PreparedCall, answer: sql.LockResult, left: float) -> bool:
        limit = 0 if math.isinf(left) else to_milliseconds(left)
        try:
            sql.wait(call.connection, call.keys, answer, shared=self._shared, milliseconds=limit)
        except DBAPIError as error:
            if sqlstate_of(error) != LOCK_NOT_AVAILABLE:
                raise
            # Roll back to the savepoint, because the timeout must not leave the caller's transaction aborted.
            sql.give_back(call.connection)
            return False
        sql.keep(call.connection)
        return True

    # ------------------------------------------------------------ messages

    def _check_capacity(self, call: PreparedCall) -> None:
        used, limit = activity.read_lock_table_use(call.connection)
        judged = server.judge_capacity(used, len(call.keys), limit)
        if isinstance(judged, CapacityError):
            raise judged
        if judged == "warn" and call.connection.dialect not in _WARNED:
            _WARNED.add(call.connection.dialect)
            log.warning(
                "the server's lock table is nearly full: %d of at least %d entries are used. Hold fewer locks at a time, or increase"
                " max_locks_per_transaction",
                used,
                limit,
            )

    def _build_error_context(self) -> ErrorContext:
        names = format_names(self._list_labels())
        return ErrorContext(
            deadlock=f"waiting for {names} caused a deadlock, and PostgreSQL has aborted this transaction: roll back and"
            " retry. Acquire all locks at once, before the first write",
            fewer_locks=f"there was no room for {names}, and PostgreSQL has aborted this transaction. Hold fewer locks at a time",
        )

    def _refusal_error(self, answer: sql.LockResult) -> PgfenceError:
        if answer.taken == sql.STANDBY:
            return standby_error(
                f"a lock on {format_names(self._list_labels())}",
                "; a Session that routes reads to a standby needs bind_arguments",
            )
        return TransactionStateError(
            "the snapshot of this transaction (REPEATABLE READ or SERIALIZABLE) is older than the lock, so the transaction would"
            " not see what the last holder wrote. Use READ COMMITTED for this transaction, for example with"
            " connection.execution_options(isolation_level='READ COMMITTED'); or pass stale_snapshot_ok=True if that is harmless"
        )

    def _ended_error(self) -> TransactionStateError:
        return TransactionStateError(
            f"the transaction that held the lock on {format_names(self._list_labels())} ended inside the block of hold(), or was rolled back"
            " to a savepoint older than the lock: what the block did after that was not protected. Commit or roll back"
            f" after the block, or use {type(self).__name__}.begin(), which commits at its end"
        )

    def _timeout_error(self, call: PreparedCall, limit: float, owner: Contender) -> LockTimeoutError:
        found = activity.find_holders(call.connection, call.keys)
        held_here = tuple(name for hold in owner.holds for name in hold.names)
        by = f"; held by {', '.join(map(str, found))}" if found else ""
        nested = f". This {owner.kind} also holds {format_names(held_here)}" if held_here else ""
        if limit > WARN_AFTER:
            names = self._list_labels()
            fields = build_log_fields("timeout", ", ".join(names))
            log.warning("could not acquire %s after waiting %.0f s%s", format_names(names), limit, by, extra=fields)
        return LockTimeoutError(
            f"could not acquire {format_names(self._list_labels())} within {limit:g} s{by}{nested}",
            names=self._list_labels(),
            keys=call.keys,
            timeout=limit,
            holders=found,
            held_here=held_here,
        )

    def _holders(self, work: Session | Connection) -> list[Holder]:
        connection = self._connect(work)
        return activity.find_holders(connection, self._resolve_keys(config_of(connection)))

    def _is_held(self, work: Session | Connection) -> bool:
        connection = self._connect(work)
        return activity.is_held(connection, self._resolve_keys(config_of(connection)))


def _default_timeout(config: Config, owner: Contender) -> float:
    """Return the default timeout.

    It is limited while the caller holds a session lock or a lease, because PostgreSQL cannot detect a deadlock that involves one.
    """
    return min(config.default_timeout, NESTED_LIMIT) if owner.holds else config.default_timeout
