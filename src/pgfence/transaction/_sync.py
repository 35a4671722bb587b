"""The sync half."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlalchemy import Connection, Engine

from pgfence._api.contexts import EnterOnly
from pgfence._api.inputs import is_session, is_sessionmaker, unwrap_session
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
    """A lock that belongs to the caller's transaction and ends with it: with COMMIT or ROLLBACK, always.

    ::

        with SessionLocal.begin() as session:
            TransactionLock(session, "account:1", "account:2").acquire(timeout=2)
            one, two = session.get_one(Account, 1), session.get_one(Account, 2)
            one.balance -= 10
            two.balance += 10

    Load rows after acquiring the lock: what was read before may be old. A free lock costs one round trip, the same lock again in
    one transaction none. It waits in the server, where PostgreSQL detects deadlocks. A timeout leaves the transaction usable,
    with its earlier writes and settings.

    Limitations: it does not last beyond COMMIT, ROLLBACK, or a ROLLBACK TO a savepoint older than the lock (the next `acquire`
    asks the server again); rows read before it may be stale; REPEATABLE READ and SERIALIZABLE are rejected, because their
    snapshot is always older than the lock. There is no release and no `wrap()`: it belongs to one transaction.

    Args:
        session: the Session, scoped_session or Connection whose transaction the lock shall belong to. A Session is asked for the connection on
            which it writes, and so begins its transaction.
        names: one or more names or ready keys. Several are one lock: all or none, always asked for in one order.
        namespace: instead of the configured one, for names that are text.
        shared: beside other shared holders, and not beside an exclusive one. What is held exclusively covers it; the
            other way round is refused.
        bind_arguments: for a Session that chooses among engines, as in `Session.connection()`.
        expire: on a Session, expire what was loaded before the lock, so that it is read again; and refuse to ask while there
            are unflushed changes, which may rest on it. False does neither.
        stale_snapshot_ok: ask under REPEATABLE READ and SERIALIZABLE too.

    Raises:
        TypeError: for anything else, an engine or a session factory above all: those go to `begin`.
        ValueError: there is no name, or an unusable one.
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
        """Try once, without waiting. True: it is held until the transaction ends. False: it is not held, so do not go on.

        Raises:
            as `acquire`, but for LockTimeoutError and DeadlockError.
        """
        return self._try(self._unwrap())

    def acquire(self, *, timeout: Seconds | None = None) -> None:
        """Wait until the lock is held; again in the same transaction it is held at once.

        Args:
            timeout: seconds, for all names together; None is the configured default (cut to 60 while this thread holds a
                session lock), `math.inf` waits without a limit, 0 does not wait.

        Raises:
            LockTimeoutError: it was not free in time; names the holders. The transaction is as it was before.
            SelfDeadlockError: this thread holds one of the names as an AdvisoryLock on another connection.
            DeadlockError: PostgreSQL found a deadlock, and has aborted the transaction.
            TransactionStateError: autocommit, an old snapshot, unflushed changes, a pipeline, or an exclusive lock on what
                is held shared. Nothing was asked for or taken, and the transaction is as it was before.
            StandbyError: the server is a standby.
            UnsupportedServerError: it is not PostgreSQL, too old, or its driver is unknown.
            CapacityError: the server's lock table is nearly full; with `sqlstate` set it was full, and PostgreSQL has
                aborted the transaction.
        """
        self._acquire(self._unwrap(), timeout, THREADS.get_contender())

    def hold(self, *, timeout: Seconds | None = None) -> AbstractContextManager[None, None]:
        """Acquire on entering the block; does NOT release at its end: the lock is held until the transaction ends.

        The block shows what the lock is for. A block that ends together with its transaction is `begin`.

        Args:
            timeout: as in `acquire`.

        Raises:
            PgfenceError: on entering, as `acquire`.
            TransactionStateError: on leaving, if the transaction has ended inside the block, or was rolled back to a
                savepoint older than the lock. Not if the block itself raised.
        """
        return EnterOnly(lambda: self._enter(timeout))

    def _enter(self, timeout: Seconds | None) -> Callable[[], None]:
        work = self._unwrap()
        stay = self._acquire_for_block(work, timeout, THREADS.get_contender())
        return lambda: self._check_held(work, stay)

    def holders(self) -> list[Holder]:
        """Return who holds any of the names at this moment, this transaction included. Looking never takes a lock.

        Transaction and session locks on the same key are reported alike, because the server does not distinguish them.
        """
        return self._holders(self._unwrap())

    def is_held(self) -> bool:
        """Return whether any session, this transaction included, holds any of the names at this moment."""
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
        """Open a transaction, take the lock first, yield the Session or Connection, and commit at the end.

        If an exception leaves the block, the transaction is rolled back, and that exception is raised whatever else fails.
        Because the lock is acquired before anything is loaded, nothing stale is read.

        Args:
            factory: a sessionmaker, or an Engine for a Connection.
            names: as for the class.
            namespace: likewise.
            shared: likewise.
            timeout: as in `acquire`.
            stale_snapshot_ok: as for the class.

        Raises:
            TypeError: the factory is something else.
            ValueError: there is no name, or an unusable one.
            PgfenceError: on entering, as `acquire`.
            CommitOutcomeUnknownError: on leaving: the connection was lost during COMMIT.
        """
        if not isinstance(factory, Engine) and not is_sessionmaker(factory):
            raise TypeError(
                f"TransactionLock.begin() needs a sessionmaker or an Engine, not {type(factory).__name__}:"
                " async ones go to AsyncTransactionLock.begin(), a Session that is open already to TransactionLock()"
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
    told = f"TransactionLock needs the Session or Connection whose transaction it shall belong to, not {type(given).__name__}"
    if isinstance(given, Engine) or is_sessionmaker(given):
        return f"{told}: TransactionLock.begin() opens a transaction and takes the lock first"
    return (
        f"{told}; the async ones go to AsyncTransactionLock, engines and session factories to TransactionLock.begin()"
    )
