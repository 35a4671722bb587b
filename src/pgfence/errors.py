"""Every error of pgfence, in one tree.

Each error can be pickled, keeps its data as attributes and says in its message what to do.
A caller decides by class or attribute, never by text:

- `retryable`: the same call may succeed later without a change by the caller;
- `retry_after`: seconds, or None where nothing is better than the caller's own back-off;
- `http_status`: what a web edge should answer;
- `sqlstate`: set when PostgreSQL itself refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from sqlalchemy.exc import DontWrapMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence.keys import LockKey
    from pgfence.types import Holder

LossReason: TypeAlias = Literal["expired", "superseded", "evicted", "overdue", "cut off", "killed", "returned"]
PoolerMode: TypeAlias = Literal["direct", "session", "transaction", "unknown"]


def _restore(cls: type[PgfenceError], args: tuple[object, ...], state: dict[str, object]) -> PgfenceError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class PgfenceError(DontWrapMixin, Exception):
    """Root of every error that pgfence raises on purpose. SQLAlchemy puts none of them into a StatementError."""

    http_status: int = 500
    retryable: bool = False
    retry_after: float | None = None

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (type(self), self.args, self.__dict__.copy())


class LockTimeoutError(PgfenceError, TimeoutError):
    """The lock was not free within the timeout. Nothing is held, the caller's transaction is usable.

    From a fence: another transaction is still inside the gate, and the one that tried to enter is aborted.

    `holders` is what was last seen and may be empty; `held_here` names the session locks that the
    same task or thread already held while it waited.
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
    ) -> None:
        super().__init__(message)
        self.names = tuple(names)
        self.keys = tuple(keys)
        self.timeout = timeout
        self.holders = tuple(holders)
        self.held_here = tuple(held_here)


class WaitCancelledError(PgfenceError):
    """The event of `cancel_waits()` ended a wait. Nothing is held.

    `names` is what was waited for.
    """

    http_status = 503

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class LockLostError(PgfenceError):
    """The lock was lost before it was released: work done since then was not protected."""

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
    """Released twice, `current()` outside a hold, or a handle used in a forked child."""

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class SelfDeadlockError(PgfenceError):
    """The wait could never end: this task or thread, or a cycle inside this process, holds the lock."""

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


class DeadlockError(PgfenceError):
    """PostgreSQL found a deadlock (SQLSTATE 40P01) and has aborted the transaction: roll back and try again."""

    http_status = 409
    retryable = True


class PoolerError(PgfenceError):
    """A connection pooler is in between, and session locks cannot work behind it as it is configured."""

    def __init__(self, message: str, *, mode: PoolerMode = "unknown") -> None:
        super().__init__(message)
        self.mode: PoolerMode = mode


class StandbyError(PgfenceError):
    """The server is a standby, or takes no writes: a lock acquired there excludes no other process.

    It is `retryable`, because a cluster that switches over soon has a primary again. If the URL leads to a standby, correct it.
    """

    http_status = 503
    retryable = True


class UnsupportedServerError(PgfenceError):
    """Not a PostgreSQL that pgfence can trust: another dialect or driver, too old, or a look-alike."""


class UnreachableError(PgfenceError):
    """The server cannot be reached. That is never taken for "free" or for "busy".

    Not `retryable`, and 500 instead of 503, if the server rejected the password, the user or the database, or if the host does
    not exist. A wait then ends at once, and no `unreachable=` applies: the configuration must be corrected.
    """

    http_status = 503
    _held_until: float | None = None
    """Until when a known holder may continue without a server, on the clock of this process."""

    def __init__(self, message: str, *, sqlstate: str | None = None, retryable: bool = True) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.retryable = retryable
        if not retryable:
            self.http_status = 500


class TransactionStateError(PgfenceError):
    """The caller's transaction is in a state in which the lock or fence would not protect it."""


class CapacityError(PgfenceError):
    """The server's lock table is nearly full: more locks would keep everybody from logging in."""

    http_status = 503
    retryable = True

    def __init__(self, message: str, *, used: int, limit: int, sqlstate: str | None = None) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.used = used
        self.limit = limit


class SchemaError(PgfenceError):
    """pgfence's tables or functions are missing, too old, not as they were made, or not open to this role.

    `command` repairs it: a `pgfence install`, an ALTER TABLE or a GRANT; empty where another role has to do it.
    """

    def __init__(
        self, message: str, *, found: int | None = None, needed: int = 1, command: str = "", sqlstate: str | None = None
    ) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.found = found
        self.needed = needed
        self.command = command


class StaleFencingTokenError(PgfenceError):
    """PostgreSQL refused a write (SQLSTATE PF001): another token counts for the resource by now. Nothing of it is committed.

    `token` below `newest`: a newer holder has taken over. Above: this connection leads to a server that does not know the
    newest tokens, such as a former primary or a restored one; or the token was never issued for this resource.
    """

    http_status = 409

    def __init__(self, message: str, *, resource: str, token: int, newest: int, sqlstate: str | None = "PF001") -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.resource = resource
        self.token = token
        self.newest = newest


class FenceRequiredError(PgfenceError):
    """A guarded table or class was written to by a transaction that entered no gate (SQLSTATE PF002 where PostgreSQL refused)."""

    def __init__(self, message: str, *, resource: str | None = None, sqlstate: str | None = None) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.resource = resource


class VersionConflict(NamedTuple):
    """One row that is not at the version it was read at.

    Attributes:
        model: the mapped class.
        pk: the primary key, a tuple also where it is one column.
        expected: the version that the caller read.
        found: the version that the row has; None: the row is gone.
    """

    model: type[Any]
    pk: tuple[Any, ...]
    expected: Any
    found: Any | None


class VersionConflictError(PgfenceError):
    """Another transaction has written the rows since they were read; nothing of this flush is committed.

    From a flush the unit of work may be done again from its first read, as `run_transaction` does: `retryable`, 409. Where
    the version came from a client (`load_for_version`), the client has to look at the row again: not `retryable`, 412.
    """

    def __init__(
        self, message: str, *, items: Sequence[VersionConflict], precondition: bool = False, sqlstate: str | None = None
    ) -> None:
        super().__init__(message, sqlstate=sqlstate)
        self.items = tuple(items)
        self.retryable = not precondition
        self.http_status = 412 if precondition else 409


class VersionRequiredError(PgfenceError):
    """A change of a versioned row names no version.

    A request without If-Match (428), a merge() of an object that has none, or a statement that would leave the versions of
    its rows as they are.
    """

    http_status = 428


class CommitOutcomeUnknownError(PgfenceError):
    """The connection died during COMMIT: the transaction may be committed, or not.

    Look for its effect before you retry; an idempotency key makes the retry harmless.
    """

    http_status = 503


class IdempotencyKeyReusedError(PgfenceError):
    """The key belongs to a request with another payload, done or in progress. The transaction is usable."""

    http_status = 422

    def __init__(self, message: str, *, scope: str, key: str) -> None:
        super().__init__(message)
        self.scope = scope
        self.key = key


class IdempotencyInProgressError(PgfenceError):
    """Another caller holds the key and did not finish within the timeout. The caller's transaction is usable.

    `retry_after` is the time until the key is free, if that is known: the attempt that has it ended with an error, or no longer
    renews its claim. While it runs, it is 1 second.

    `ended_with` names the error that the attempt ended with, such as "TimeoutError"; it is None while the attempt runs.

    With SQLSTATE 40001 the other one has committed, and this transaction reads from a snapshot that is older than that:
    only a new transaction can see the result.
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
    """This attempt has been superseded; its result was not stored.

    Its claim has expired and `newest` has taken over, or an operator has freed the key. What it has done outside the database
    remains; the derived keys let the provider recognise it. `retry_after` is set then: the same call returns the result of the
    newest attempt, or runs another one.

    With `takeover=False` it is also raised by calls that come after an attempt whose outcome is not known, until the key is
    freed. `retry_after` is None then, because waiting does not help.
    """

    http_status = 409

    def __init__(
        self, message: str, *, scope: str, key: str, attempt: int, newest: int, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.scope = scope
        self.key = key
        self.attempt = attempt
        self.newest = newest


class IdempotencyMisuseError(PgfenceError):
    """A block forgot what it owes its key, or a result cannot be stored or read. Roll the transaction back.

    From COMMIT, with SQLSTATE PF004: work under a key was begun and not finished; nothing of the transaction is committed.
    """
