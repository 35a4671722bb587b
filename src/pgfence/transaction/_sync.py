"""`TransactionLock`: locks that end with the caller's transaction, for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlalchemy import Connection, Engine

from pgfence._api.contexts import EnterOnly
from pgfence._api.inputs import is_async_engine, is_async_sessionmaker, is_session, is_sessionmaker, unwrap_session
from pgfence._api.transactions import Begun
from pgfence._holds.carriers import THREADS
from pgfence._holds.hold import format_names
from pgfence.keys import check_names, list_labels
from pgfence.transaction._request import TransactionLockBase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    from pgfence._process.clock import Seconds
    from pgfence.keys import Name
    from pgfence.types import Holder

    S = TypeVar("S", bound=Session)


class TransactionLock(TransactionLockBase):
    """Hold a lock until the caller's transaction ends, by COMMIT or ROLLBACK.

    ::

        with SessionLocal.begin() as session:
            TransactionLock(session, "account:1", "account:2").acquire(timeout=2)
            one, two = session.get_one(Account, 1), session.get_one(Account, 2)
            one.balance -= 10
            two.balance += 10

    Load rows after acquiring the lock, because rows read before it may be stale. A free lock costs one round trip, or three if it
    has several names and is not the first statement of its transaction. Acquiring the same lock again in one transaction costs
    none. The wait happens in the server, where PostgreSQL detects deadlocks. The session's `statement_timeout` and `lock_timeout`
    do not end the wait early, but a limit on the whole transaction (`transaction_timeout`) or in the driver (asyncpg's
    `command_timeout`) does.

    Guarantees: among all clients that use PostgreSQL's advisory locks on a key in a database, one transaction holds the lock at a
    time, or several that all requested it in shared mode. The lock is held until COMMIT, ROLLBACK, or a ROLLBACK TO a savepoint
    older than the lock (the next `acquire` then sends a request to the server again). No crash, cancellation or lost connection
    leaves it behind. What you read after acquiring the lock is as recent as the last holder's commit. A timeout leaves the
    transaction usable, with its earlier writes and settings.

    If the tables are installed, pgfence stores the names of locks that were waited for, or that are held for a second or two, so
    that `pgfence ps` can show them. A background thread stores them on a separate connection, which it opens for this purpose and
    then closes.

    Limitations: nothing is protected after COMMIT or ROLLBACK, and what was read before the lock may be stale. REPEATABLE READ
    and SERIALIZABLE are rejected, unless `stale_snapshot_ok=True`, because their snapshot is always older than the lock. Waiters
    queue in the server, and their order is not guaranteed. The lock exists in one database on one server, and a failover ends it
    with its transaction. A deadlock or a cancelled statement aborts the transaction, as with every statement in PostgreSQL. A
    lost connection and other database errors are raised as SQLAlchemy's own errors. There is neither a `release()` nor a
    `wrap()`, because the lock belongs to one transaction.

    Args:
        session: the Session, scoped_session or Connection whose transaction the lock belongs to. The lock uses the connection
            on which a Session writes, and begins its transaction if necessary.
        names: one or more names or LockKeys. Several names form one lock: either all are acquired or none, always in
            the same order.
        namespace: replaces the configured namespace, for names that are str.
        shared: whether the lock is shared. Other shared holders may then hold it at the same time, but exclusive holders may not.
            An exclusive lock that the transaction already holds is sufficient. Requesting the exclusive lock while holding the
            shared lock is rejected.
        bind_arguments: for a Session that routes to several engines, as in `Session.connection()`.
        expire: with a Session, whether to expire what was loaded before the lock, so that it is read again, and to raise an error
            if there are unflushed changes, which may be based on it. With False, the lock does neither.
        stale_snapshot_ok: whether to allow REPEATABLE READ and SERIALIZABLE.

    Raises:
        TypeError: a name is neither a str nor a LockKey, or `session` is neither a Session, a scoped_session nor a Connection.
            Pass engines and session factories to `begin`.
        ValueError: no name was given, or a name is not usable.
    """

    _block = "`with lock.hold():`, or `with TransactionLock.begin(...)`, which commits at its end"
    _decorator = "`lock.acquire()` inside the function: the lock belongs to one transaction"

    def __init__(
        self,
        session: Session | scoped_session[Any] | Connection,
        *names: Name,
        namespace: str | None = None,
        shared: bool = False,
        bind_arguments: Mapping[str, Any] | None = None,
        expire: bool = True,
        stale_snapshot_ok: bool = False,
    ) -> None:
        if not isinstance(session, Connection) and not is_session(session):
            raise TypeError(_session_error(session))
        self._session = session
        super().__init__(
            names, namespace, bind_arguments, shared=shared, expire=expire, stale_snapshot_ok=stale_snapshot_ok
        )

    def try_acquire(self) -> bool:
        """Try once to acquire the lock, without waiting.

        Returns True if the lock is now held until the transaction ends, and False otherwise.

        Raises:
            PgfenceError: the same errors as `acquire`, except LockTimeoutError, SelfDeadlockError and DeadlockError.
        """
        return self._try(self._unwrap())

    def acquire(self, *, timeout: Seconds | None = None) -> None:
        """Acquire the lock, waiting until it is free or the timeout has passed.

        If this transaction already holds the lock, the call returns immediately.

        Args:
            timeout: seconds to wait for all names together. None means the configured default (at most 60 s while this thread
                holds a session lock or a lease), `math.inf` waits indefinitely, and 0 does not wait.

        Raises:
            LockTimeoutError: the lock did not become free in time. The message and `holders` name the holders; the
                transaction is as it was before.
            SelfDeadlockError: this thread holds one of the names as an AdvisoryLock on another connection. Not raised with
                `timeout=0`.
            DeadlockError: PostgreSQL detected a deadlock and has aborted the transaction.
            TransactionStateError: the connection is in autocommit or a pipeline, the snapshot is older than the lock, there are
                unflushed changes, or the lock is held in shared mode and requested in exclusive mode. No lock was acquired, and
                the transaction is as it was before.
            StandbyError: the server is a standby.
            UnsupportedServerError: the server is not PostgreSQL or is too old, or the driver is not supported.
            UnreachableError: the session had no connection yet, and the server cannot be reached.
            KeyCollisionError: another name has the same key. pgfence detected this when it stored this name for an earlier lock
                of this process. Nothing was requested.
            CapacityError: more than 100 names were requested, and would fill the server's lock table to 90 %. If `sqlstate` is
                set, the table was full, and PostgreSQL has aborted the transaction.
        """
        self._acquire(self._unwrap(), timeout, THREADS.get_contender())

    def hold(self, *, timeout: Seconds | None = None) -> AbstractContextManager[None, None]:
        """Acquire the lock on entering the block. Leaving the block does NOT release it.

        The lock is held until the transaction ends. The block only shows which statements the lock protects. For a block that
        ends together with its transaction, use `begin`.

        Args:
            timeout: the same as for `acquire`.

        Raises:
            PgfenceError: on entering, the same errors as `acquire`.
            TransactionStateError: on leaving, if the transaction has ended inside the block or was rolled back to a
                savepoint older than the lock. It is not raised if the block itself raised an exception.
        """
        return EnterOnly(lambda: self._enter(timeout))

    def _enter(self, timeout: Seconds | None) -> Callable[[], None]:
        work = self._unwrap()
        stay = self._acquire_for_block(work, timeout, THREADS.get_contender())
        return lambda: self._check_held(work, stay)

    def holders(self) -> list[Holder]:
        """Return the current holders of any of the names, including this transaction, without taking a lock.

        Transaction and session locks on the same key are reported alike, because the server does not distinguish them.

        Raises:
            UnreachableError, UnsupportedServerError: the same as for `acquire`.
        """
        return self._holders(self._unwrap())

    def is_held(self) -> bool:
        """Return whether any session, this transaction included, holds any of the names; errors are the same as for `holders`."""
        return self._is_held(self._unwrap())

    @overload
    @staticmethod
    def begin(
        factory: sessionmaker[S],
        *names: Name,
        namespace: str | None = None,
        shared: bool = False,
        timeout: Seconds | None = None,
        stale_snapshot_ok: bool = False,
    ) -> AbstractContextManager[S, None]: ...
    @overload
    @staticmethod
    def begin(
        factory: Engine,
        *names: Name,
        namespace: str | None = None,
        shared: bool = False,
        timeout: Seconds | None = None,
        stale_snapshot_ok: bool = False,
    ) -> AbstractContextManager[Connection, None]: ...
    @staticmethod
    def begin(
        factory: object,
        *names: Name,
        namespace: str | None = None,
        shared: bool = False,
        timeout: Seconds | None = None,
        stale_snapshot_ok: bool = False,
    ) -> AbstractContextManager[object, None]:
        """Open a transaction, acquire the lock, yield the Session or Connection, and commit at the end.

        If the block raises, the transaction is rolled back and the exception propagates, whatever else fails. Because the
        lock is acquired before anything is loaded, nothing stale is read.

        Limitations: if the block catches an error of a statement that it did not send in a savepoint, PostgreSQL has aborted the
        transaction: nothing is committed, and no error is raised at the end of the block, as with SQLAlchemy's own `begin()`.

        Args:
            factory: a sessionmaker; or an Engine, which yields a Connection.
            names: see the class.
            namespace: see the class.
            shared: see the class.
            timeout: the same as for `acquire`.
            stale_snapshot_ok: see the class.

        Raises:
            TypeError: a name is neither a str nor a LockKey, or the factory is neither a sessionmaker nor an Engine.
            ValueError: no name was given, or a name is not usable.
            PgfenceError: on entering, the same errors as `acquire`.
            CommitOutcomeUnknownError: on leaving, if the connection was lost during COMMIT.
        """
        if not isinstance(factory, Engine) and not is_sessionmaker(factory):
            raise TypeError(
                f"TransactionLock.begin() needs a sessionmaker or an Engine, not {type(factory).__name__}:"
                " use AsyncTransactionLock.begin() for an async factory or engine, and TransactionLock() for a Session that is already open"
            )
        check_names(names, namespace or "")

        def take(work: Session | Connection) -> None:
            lock = TransactionLock(
                work, *names, namespace=namespace, shared=shared, stale_snapshot_ok=stale_snapshot_ok
            )
            lock.acquire(timeout=timeout)

        return Begun(factory, take, f"the transaction under {format_names(list_labels(names))}")

    def _unwrap(self) -> Session | Connection:
        return unwrap_session(self._session)


def _session_error(given: object) -> str:
    message = f"TransactionLock needs the Session or Connection whose transaction the lock should belong to, not {type(given).__name__}"
    if isinstance(given, Engine) or is_sessionmaker(given):
        return f"{message}: use TransactionLock.begin(), which opens a transaction and acquires the lock first"
    if is_async_engine(given) or is_async_sessionmaker(given):
        return f"{message}: use AsyncTransactionLock.begin(), which opens a transaction and acquires the lock first"
    return f"{message}: use AsyncTransactionLock for async sessions and connections, and TransactionLock.begin() for engines and session factories"
