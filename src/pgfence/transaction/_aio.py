"""The async half: the same work through `run_sync`, on the calling task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from pgfence._api.contexts import AsyncHold
from pgfence._api.inputs import (
    is_async_connection,
    is_async_engine,
    is_async_session,
    is_async_sessionmaker,
    unwrap_session,
)
from pgfence._api.transactions import AsyncBegun
from pgfence._holds.carriers import get_task_contender
from pgfence._holds.hold import format_names
from pgfence.keys import check_names, list_labels
from pgfence.transaction._request import TransactionLockBase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )

    from pgfence._process.clock import Seconds
    from pgfence.keys import Name
    from pgfence.types import Holder

    AS = TypeVar("AS", bound=AsyncSession)

_ASYNCIO = "sqlalchemy.ext.asyncio"


class AsyncTransactionLock(TransactionLockBase):
    """A lock that belongs to the caller's transaction and ends with it; the async twin of `TransactionLock`.

    ::

        async with AsyncSessionLocal.begin() as session:
            await AsyncTransactionLock(session, "account:1", "account:2").acquire(timeout=2)
            one, two = await session.get_one(Account, 1), await session.get_one(Account, 2)
            one.balance -= 10
            two.balance += 10

    Guarantees and limitations are the same. Load after the lock: instances loaded before it are expired, and to touch one
    without `await session.refresh(...)` raises SQLAlchemy's MissingGreenlet. A task that is cancelled while a statement runs
    loses its connection and so its transaction, as with every statement of an AsyncSession.

    Args:
        session: the AsyncSession, async_scoped_session or AsyncConnection whose transaction the lock shall belong to. A Session is asked for the connection on
            which it writes, and so begins its transaction.
        names: one or more names or ready keys. Several are one lock: all or none, always asked for in one order.
        namespace: instead of the configured one, for names that are text.
        shared: beside other shared holders, and not beside an exclusive one. What is held exclusively covers it; the
            other way round is refused.
        bind_arguments: for a Session that chooses among engines, as in `Session.connection()`.
        expire: on an AsyncSession, expire what was loaded before the lock, so that it is read again; and refuse to ask while there
            are unflushed changes, which may rest on it. False does neither.
        stale_snapshot_ok: ask under REPEATABLE READ and SERIALIZABLE too.

    Raises:
        TypeError: for anything else, an engine or a session factory above all: those go to `begin`.
        ValueError: there is no name, or an unusable one.
    """

    _block = "`async with lock.hold():`, or `async with AsyncTransactionLock.begin(...)`, which commits at its end"
    _decorator = "`await lock.acquire()` inside the function: the lock belongs to one transaction"

    def __init__(
        self,
        session: AsyncSession | async_scoped_session[Any] | AsyncConnection,
        *names: Name,
        namespace: str | None = None,
        shared: bool = False,
        bind_arguments: Mapping[str, Any] | None = None,
        expire: bool = True,
        stale_snapshot_ok: bool = False,
    ) -> None:
        if not is_async_session(session) and not is_async_connection(session):
            raise TypeError(_session_error(session))
        self._session = session
        super().__init__(
            names, namespace, bind_arguments, shared=shared, expire=expire, stale_snapshot_ok=stale_snapshot_ok
        )

    async def try_acquire(self) -> bool:
        """Try once, without waiting. True: it is held until the transaction ends. False: it is not held, so do not go on.

        Raises:
            as `acquire`, but for LockTimeoutError and DeadlockError.
        """
        done: bool = await self._unwrap().run_sync(self._try)
        return done

    async def acquire(self, *, timeout: Seconds | None = None) -> None:
        """Wait until the lock is held; again in the same transaction it is held at once.

        Args:
            timeout: seconds, for all names together; None is the configured default (cut to 60 while this task holds a
                session lock), `math.inf` waits without a limit, 0 does not wait.

        Raises:
            LockTimeoutError: it was not free in time; names the holders. The transaction is as it was before.
            SelfDeadlockError: this task holds one of the names as an AdvisoryLock on another connection.
            DeadlockError: PostgreSQL found a deadlock, and has aborted the transaction.
            TransactionStateError: autocommit, an old snapshot, unflushed changes, a pipeline, or an exclusive lock on what
                is held shared. Nothing was asked for or taken, and the transaction is as it was before.
            StandbyError: the server is a standby.
            UnsupportedServerError: it is not PostgreSQL, too old, or its driver is unknown.
            CapacityError: the server's lock table is nearly full; with `sqlstate` set it was full, and PostgreSQL has
                aborted the transaction.
        """
        await self._unwrap().run_sync(self._acquire, timeout, get_task_contender())

    def hold(self, *, timeout: Seconds | None = None) -> AbstractAsyncContextManager[None, None]:
        """Acquire on entering the block; does NOT release at its end: the lock is held until the transaction ends.

        The block shows what the lock is for. A block that ends together with its transaction is `begin`.

        Args:
            timeout: as in `acquire`.

        Raises:
            PgfenceError: on entering, as `acquire`.
            TransactionStateError: on leaving, if the transaction has ended inside the block, or was rolled back to a
                savepoint older than the lock. Not if the block itself raised.
        """
        return AsyncHold(lambda: self._enter(timeout))

    async def _enter(self, timeout: Seconds | None) -> Callable[[], Awaitable[None]]:
        work = self._unwrap()
        stay = await work.run_sync(self._acquire_for_block, timeout, get_task_contender())

        async def check() -> None:
            if stay.has_ended():  # then there may be nothing left to run on
                raise self._ended_error()
            await work.run_sync(self._check_held, stay)

        return check

    async def holders(self) -> list[Holder]:
        """Return who holds any of the names at this moment, this transaction included. Looking never takes a lock.

        Transaction and session locks on the same key are reported alike, because the server does not distinguish them.
        """
        found: list[Holder] = await self._unwrap().run_sync(self._holders)
        return found

    async def is_held(self) -> bool:
        """Return whether any session, this transaction included, holds any of the names at this moment."""
        found: bool = await self._unwrap().run_sync(self._is_held)
        return found

    @overload
    @staticmethod
    def begin(
        factory: async_sessionmaker[AS],
        *names: Name,
        namespace: str | None = None,
        shared: bool = False,
        timeout: Seconds | None = None,
        stale_snapshot_ok: bool = False,
    ) -> AbstractAsyncContextManager[AS, None]: ...
    @overload
    @staticmethod
    def begin(
        factory: AsyncEngine,
        *names: Name,
        namespace: str | None = None,
        shared: bool = False,
        timeout: Seconds | None = None,
        stale_snapshot_ok: bool = False,
    ) -> AbstractAsyncContextManager[AsyncConnection, None]: ...
    @staticmethod
    def begin(
        factory: object,
        *names: Name,
        namespace: str | None = None,
        shared: bool = False,
        timeout: Seconds | None = None,
        stale_snapshot_ok: bool = False,
    ) -> AbstractAsyncContextManager[object, None]:
        """Open a transaction, take the lock first, yield the AsyncSession or AsyncConnection, and commit at the end.

        If an exception leaves the block, the transaction is rolled back, and that exception is raised whatever else fails.
        Because the lock is acquired before anything is loaded, nothing stale is read.

        Args:
            factory: an async_sessionmaker, or an AsyncEngine for an AsyncConnection.
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
        if not is_async_sessionmaker(factory) and not is_async_engine(factory):
            raise TypeError(
                f"AsyncTransactionLock.begin() needs an async_sessionmaker or an AsyncEngine, not {type(factory).__name__}:"
                " sync ones go to TransactionLock.begin(), an AsyncSession that is open already to AsyncTransactionLock()"
            )
        check_names(names, namespace or "")

        async def take(work: AsyncSession | AsyncConnection) -> None:
            lock = AsyncTransactionLock(
                work, *names, namespace=namespace, shared=shared, stale_snapshot_ok=stale_snapshot_ok
            )
            await lock.acquire(timeout=timeout)

        return AsyncBegun(factory, take, f"the transaction under {format_names(list_labels(names))}")

    def _unwrap(self) -> AsyncSession | AsyncConnection:
        return unwrap_session(self._session)


def _session_error(given: object) -> str:
    told = (
        "AsyncTransactionLock needs the AsyncSession or AsyncConnection whose transaction it shall belong to, not"
        f" {type(given).__name__}"
    )
    if is_async_sessionmaker(given) or is_async_engine(given):
        return f"{told}: AsyncTransactionLock.begin() opens a transaction and takes the lock first"
    return f"{told}; the sync ones go to TransactionLock, engines and session factories to AsyncTransactionLock.begin()"
