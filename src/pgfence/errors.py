"""The exceptions of pgfence and their base class, `PgfenceError`.

Each exception can be pickled and has its data as attributes, and its message says what happened and what to do. Handle exceptions
by class or attribute, never by their text. All exceptions have these attributes:

- `retryable`: whether the same call may succeed later without a change by the caller;
- `retry_after`: seconds to wait before a retry, or None if pgfence knows no better value than the caller's own backoff;
- `http_status`: the status with which a web application should respond;
- `sqlstate`: the SQLSTATE, if PostgreSQL itself rejected the statement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from sqlalchemy.exc import DontWrapMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence.keys import LockKey
    from pgfence.types import Holder

LossReason: TypeAlias = Literal[
    "expired", "superseded", "evicted", "overdue", "cut off", "killed", "returned", "resigned"
]
PoolerMode: TypeAlias = Literal["direct", "session", "transaction", "unknown"]


def _restore(cls: type[PgfenceError], args: tuple[object, ...], state: dict[str, object]) -> PgfenceError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class PgfenceError(DontWrapMixin, Exception):
    """Base class of the exceptions that pgfence defines. SQLAlchemy does not wrap them in a StatementError.

    It is raised directly if native threads are missing (gevent, eventlet, uWSGI), if the engine's `creator` does not open a new
    connection, if a flush of a `VersionedSession` could not write a row that no other process has written, and if the server
    rejects a statement of `pgfence.monitoring`.
    """

    http_status: int = 500
    retryable: bool = False
    retry_after: float | None = None

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args, self.__dict__.copy())


class LockTimeoutError(PgfenceError, TimeoutError):
    """The lock did not become free within the timeout. It was not acquired, and the caller's transaction is usable.

    If a fence raises this error (SQLSTATE PF003), another transaction is still inside the gate, and PostgreSQL has aborted the
    transaction that tried to enter.

    `holders` lists the holders that were last seen, and may be empty. `held_here` lists the session locks and leases that the
    same task or thread held while it waited. `retry_after` is 1 second. For a `RateLimit` or a slot that is over, it is the time
    to wait, or None if no slot follows.
    """

    http_status = 423
    retryable = True
    retry_after: float | None = 1.0

    def __init__(
        self,
        message: str,
        *,
        names: Sequence[str] = (),
        keys: Sequence[LockKey] = (),
        timeout: float = 0.0,
        holders: Sequence[Holder] = (),
        held_here: Sequence[str] = (),
        sqlstate: str | None = None,
    ) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.names = tuple(names)
        self.keys = tuple(keys)
        self.timeout = timeout
        self.holders = tuple(holders)
        self.held_here = tuple(held_here)


class WaitCancelledError(PgfenceError):
    """The wait ended because the event of `cancel_waits()` was set. The lock was not acquired.

    `names` are the names for which the call waited.
    """

    http_status = 503

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class LockLostError(PgfenceError):
    """The lock was lost before it was released. Since then, only fenced writes were protected.

    `reason` is the `LossReason`, and `token` the fencing token, or None if the lock has none.
    """

    http_status = 503
    retryable = True

    def __init__(
        self, message: str, *, names: Sequence[str] = (), reason: LossReason = "killed", token: int | None = None
    ) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.reason: LossReason = reason
        self.token = token


class LockNotHeldError(PgfenceError):
    """The caller holds no such lock or claim, for example because it was already released, or because this is a forked child."""

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class SelfDeadlockError(PgfenceError):
    """The wait could not succeed, because this task or thread holds the lock, or because of a deadlock within this process."""

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class DeadlockError(PgfenceError):
    """PostgreSQL detected a deadlock (SQLSTATE 40P01). Roll the transaction back and retry."""

    http_status = 409
    retryable = True


class PoolerError(PgfenceError):
    """A connection pooler is between client and server, and session locks are not safe through it.

    `mode` is "transaction" if the pooler is known to be in that mode, and otherwise "unknown".
    """

    def __init__(self, message: str, *, mode: PoolerMode = "unknown") -> None:
        super().__init__(message)
        self.mode: PoolerMode = mode


class StandbyError(PgfenceError):
    """The server is a standby, whose locks exclude no process on the primary, or it is a primary that rejects writes.

    A primary rejects writes if it is configured to be read-only, or if the transaction is read-only. The error is `retryable`,
    because a cluster that fails over will soon have a primary again. If the engine's URL leads to a standby, change the URL.
    """

    http_status = 503
    retryable = True


class UnsupportedServerError(PgfenceError):
    """pgfence does not support the engine's dialect or driver, or the server is too old or not PostgreSQL."""


class UnreachableError(PgfenceError):
    """The server cannot be reached. It is not known whether the lock is free or held.

    If the server rejected the login, the encryption or the database, or if the host does not exist, the configuration is wrong. The
    error is then not `retryable`, its `http_status` is 500, a wait ends immediately, and `unreachable=` does not apply.
    """

    http_status = 503
    _held_until: float | None = None
    """The time, on the clock of this process, until which a known holder may continue although the server cannot be reached."""

    def __init__(self, message: str, *, sqlstate: str | None = None, retryable: bool = True) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.retryable = retryable
        if not retryable:
            self.http_status = 500


class TransactionStateError(PgfenceError):
    """The caller's connection or transaction is in a state, such as autocommit, in which pgfence cannot keep its guarantees."""


class CapacityError(PgfenceError):
    """The server's lock table is full or nearly full. While it is full, no client can log in.

    `used` is the number of entries in use at the last count, and `limit` the minimum capacity. Both are 0 if they are unknown.
    """

    http_status = 503
    retryable = True

    def __init__(self, message: str, *, used: int, limit: int, sqlstate: str | None = None) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.used = used
        self.limit = limit


class KeyCollisionError(PgfenceError):
    """Two names have the same 64-bit key, so a lock on one name would also lock the other. The requested lock was not acquired."""

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class SchemaError(PgfenceError):
    """pgfence's tables or functions are missing, too old or altered, or this role may not use them.

    `command` is the command, call or statement that fixes the problem, such as `pgfence install`, an ALTER TABLE or a GRANT. If
    another role must run it, the message says so. `command` is empty if there is none, for example because the owner of a table
    must run the rejected statement. `needed` is the version of the tables that the call needs, and `found` the version that is
    installed, or None if it is unknown.
    """

    def __init__(
        self, message: str, *, found: int | None = None, needed: int = 1, command: str = "", sqlstate: str | None = None
    ) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.found = found
        self.needed = needed
        self.command = command


class StaleFencingTokenError(PgfenceError):
    """PostgreSQL rejected a write (SQLSTATE PF001), because another token is valid for the resource. Nothing is committed.

    If `token` is below `newest`, a newer holder has taken over, or this one was evicted. If it is above `newest`, this connection
    leads to a server that does not have the newest tokens, such as a former primary or a restored server, or the token was never
    issued for this resource. For a class with `__fence__ = "row"`, pgfence itself rejects the write, and `sqlstate` is None.
    """

    http_status = 409

    def __init__(self, message: str, *, resource: str, token: int, newest: int, sqlstate: str | None = "PF001") -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.resource = resource
        self.token = token
        self.newest = newest


class FenceRequiredError(PgfenceError):
    """A write to a fenced table or class was rejected because its transaction has no fencing token for the resource.

    The error is also raised if the resource or the rows of a write cannot be determined. If PostgreSQL rejected the write, the
    SQLSTATE is PF002; on an engine through which pgfence has entered no gate yet, this is SQLAlchemy's own error.
    """

    def __init__(self, message: str, *, resource: str | None = None, sqlstate: str | None = None) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.resource = resource


class VersionConflict(NamedTuple):
    """One row whose version has changed since it was read.

    Attributes:
        model: the mapped class.
        pk: the primary key, as a tuple even if it has only one column.
        expected: the version that the caller read.
        found: the current version, or None if the row was deleted or is hidden from this role.
    """

    model: type[Any]
    pk: tuple[Any, ...]
    expected: Any
    found: Any | None


class VersionConflictError(PgfenceError):
    """Another transaction has written the rows since they were read. No change of the failed flush is committed.

    If a flush raised the error, it is `retryable` and its status is 409, because the unit of work can be repeated from its first
    read, as `run_transaction` does. If the version came from a client (`load_for_version`, or `merge` of a `VersionedSession`),
    the error is not `retryable` and its status is 412, because the client must read the row again.
    """

    def __init__(
        self, message: str, *, items: Sequence[VersionConflict], precondition: bool = False, sqlstate: str | None = None
    ) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.items = tuple(items)
        self.retryable = not precondition
        self.http_status = 412 if precondition else 409


class VersionRequiredError(PgfenceError):
    """A change to a versioned row does not say which version it is based on.

    The cause is a request without If-Match, a merge() of an object that has no version, a change to an instance that was read
    without its version, or a statement that would leave the versions of its rows unchanged.
    """

    http_status = 428


class CommitOutcomeUnknownError(PgfenceError):
    """The connection was lost during COMMIT, so the transaction may or may not have been committed.

    Check whether its changes are stored before you retry. With an idempotency key, you can retry without checking.
    """

    http_status = 503


class IdempotencyKeyReusedError(PgfenceError):
    """The key belongs to another request, finished or in progress, that has a different payload. The transaction is usable."""

    http_status = 422

    def __init__(self, message: str, *, scope: str, key: str) -> None:
        super().__init__(message)
        self.scope = scope
        self.key = key


class IdempotencyInProgressError(PgfenceError):
    """Another caller has the key and did not finish within the timeout. The caller's transaction is usable.

    If the attempt that has claimed the key ended with an error or no longer renews its claim, `retry_after` is the number of
    seconds until the key is free. While the attempt runs, `retry_after` is 1 second.

    `ended_with` is the name of the error with which the attempt ended, such as "TimeoutError"; it is None while the attempt runs.

    If `sqlstate` is 40001, the other transaction has committed, but the snapshot of the caller's transaction is older than that
    commit, so only a new transaction can read the result.
    """

    http_status = 409
    retryable = True
    retry_after: float | None = 1.0

    def __init__(
        self,
        message: str,
        *,
        scope: str,
        key: str,
        sqlstate: str | None = None,
        retry_after: float | None = None,
        ended_with: str | None = None,
    ) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.scope = scope
        self.key = key
        self.ended_with = ended_with
        if retry_after is not None:
            self.retry_after = retry_after


class AttemptLostError(PgfenceError):
    """This attempt has lost its claim, so its result was not stored.

    The claim has expired, and attempt `newest` may have taken over, or an operator has freed the key. What the attempt has done
    outside the database remains, and the provider can recognize it by the derived keys. `retry_after` is set, because the same
    call returns the newest attempt's result or runs another one. The SQLSTATE is PF005 if the caller's transaction is aborted.

    For a claim of a row, `scope` is the table, `key` the primary key, `attempt` the token of the claim and `newest` that of the
    row, and `retry_after` is None.

    With `takeover=False`, calls after an attempt with an unknown outcome also raise this error, until the key is freed. In that
    case, `retry_after` is None, because waiting does not help.
    """

    http_status = 409

    def __init__(
        self,
        message: str,
        *,
        scope: str,
        key: str,
        attempt: int,
        newest: int,
        retry_after: float | None = None,
        sqlstate: str | None = None,
    ) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.retry_after = retry_after
        self.scope = scope
        self.key = key
        self.attempt = attempt
        self.newest = newest


class IdempotencyMisuseError(PgfenceError):
    """A key or an attempt was used incorrectly, or a result cannot be stored or read. Roll the transaction back.

    If COMMIT raises this error, with SQLSTATE PF004, work under a key was begun and not finished, and nothing of the transaction
    is committed.
    """
