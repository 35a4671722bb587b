"""`AsyncTransactionLock`, which runs the sync implementation through `run_sync` in the calling task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlalchemy import Engine

from pgfence._api.contexts import AsyncHold
from pgfence._api.inputs import (
    is_async_connection,
    is_async_engine,
    is_async_session,
    is_async_sessionmaker,
    is_sessionmaker,
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
    """Hold a lock until the caller's transaction ends. The async counterpart of `TransactionLock`.

    ::

        async with AsyncSessionLocal.begin() as session:
            await AsyncTransactionLock(session, "account:1", "account:2").acquire(timeout=2)
            one, two = await session.get_one(Account, 1), await session.get_one(Account, 2)
            one.balance -= 10
            two.balance += 10

    Guarantees and limitations are the same as for `TransactionLock`. Load rows after acquiring the lock. Instances that were
    loaded earlier are expired. Accessing an attribute of such an instance before `await session.refresh(instance)` raises
    SQLAlchemy's MissingGreenlet. A task that is cancelled while a statement runs loses its connection and so its transaction, as
    with every statement of an AsyncSession.

    Args:
        session: the AsyncSession, async_scoped_session or AsyncConnection whose transaction the lock belongs to. The lock uses
            the connection on which an AsyncSession writes, and begins its transaction if necessary.
        names: one or more names or LockKeys. Several names form one lock: either all are acquired or none, always in
            the same order.
        namespace: replaces the configured namespace, for names that are str.
        shared: whether the lock is shared. Other shared holders may then hold it at the same time, but exclusive holders may not.
            An exclusive lock that the transaction already holds is sufficient. Requesting the exclusive lock while holding the
            shared lock is rejected.
        bind_arguments: for a session that routes to several engines, as in `Session.connection()`.
        expire: with an AsyncSession, whether to expire what was loaded before the lock, so that it is read again, and to raise an
            error if there are unflushed changes, which may be based on it. With False, the lock does neither.
        stale_snapshot_ok: whether to allow REPEATABLE READ and SERIALIZABLE.

    Raises:
        TypeError: a name is neither a str nor a LockKey, or `session` is neither an AsyncSession, an async_scoped_session nor an
            AsyncConnection. Pass engines and session factories to `begin`.
        ValueError: no name was given, or a name is not usable.
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
        """Try once to acquire the lock, without waiting.

        Returns True if the lock is now held until the transaction ends, and False otherwise.

        Raises:
            PgfenceError: the same errors as `acquire`, except LockTimeoutError, SelfDeadlockError and DeadlockError.
        """
        done: bool = await self._unwrap().run_sync(self._try)
        return done

    async def acquire(self, *, timeout: Seconds | None = None) -> None:
        """Acquire the lock, waiting until it is free or the timeout has passed.

        If this transaction already holds the lock, the call returns immediately.

        Args:
            timeout: seconds to wait for all names together. None means the configured default (at most 60 s while this task holds
                a session lock or a lease), `math.inf` waits indefinitely, and 0 does not wait.

        Raises:
            LockTimeoutError: the lock did not become free in time. The message and `holders` name the holders; the
                transaction is as it was before.
            SelfDeadlockError: this task holds one of the names as an AdvisoryLock on another connection. Not raised with
                `timeout=0`.
            DeadlockError: PostgreSQL detected a deadlock and has aborted the transaction.
            TransactionStateError: the connection is in autocommit or a pipeline, the snapshot is older than the lock, there are
                unflushed changes, or the lock is held in shared mode and requested in exclusive mode. No lock was acquired, and
                the transaction is as it was before.
            StandbyError: the server is a standby.
            UnsupportedServerError: the server is not PostgreSQL or is too old, or the driver is not supported.
            UnreachableError: the session had no connection yet, and the server cannot be reached.
            KeyCollisionError: another name has the same key. pgfence detected this when it stored this name for an earlier lock of
                this process. Nothing was requested.
            CapacityError: more than 100 names were requested, and would fill the server's lock table to 90 %. If `sqlstate` is
                set, the table was full, and PostgreSQL has aborted the transaction.
        """
        await self._unwrap().run_sync(self._acquire, timeout, get_task_contender())

    def hold(self, *, timeout: Seconds | None = None) -> AbstractAsyncContextManager[None, None]:
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
        return AsyncHold(lambda: self._enter(timeout))

    async def _enter(self, timeout: Seconds | None) -> Callable[[], Awaitable[None]]:
        work = self._unwrap()
        stay = await work.run_sync(self._acquire_for_block, timeout, get_task_contender())

        async def check() -> None:
            if stay.has_ended():  # checked first, because there may be no connection left to run on
                raise self._ended_error()
            await work.run_sync(self._check_held, stay)

        return check

    async def holders(self) -> list[Holder]:
        """Return the current holders of any of the names, including this transaction, without taking a lock.

        Transaction and session locks on the same key are reported alike, because the server does not distinguish them.

        Raises:
            UnreachableError, UnsupportedServerError: the same as for `acquire`.
        """
        found: list[Holder] = await self._unwrap().run_sync(self._holders)
        return found

    async def is_held(self) -> bool:
        """Return whether any session, this transaction included, holds any of the names; errors are the same as for `holders`."""
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
        """Open a transaction, acquire the lock, yield the AsyncSession or AsyncConnection, and commit at the end.

        If the block raises, the transaction is rolled back and the exception propagates, whatever else fails. Because the
        lock is acquired before anything is loaded, nothing stale is read.

        Args:
            factory: an async_sessionmaker; or an AsyncEngine, which yields an AsyncConnection.
            names: see the class.
            namespace: see the class.
            shared: see the class.
            timeout: the same as for `acquire`.
            stale_snapshot_ok: see the class.

        Raises:
            TypeError: a name is neither a str nor a LockKey, or the factory is neither an async_sessionmaker nor an AsyncEngine.
            ValueError: no name was given, or a name is not usable.
            PgfenceError: on entering, the same errors as `acquire`.
            CommitOutcomeUnknownError: on leaving, if the connection was lost during COMMIT.
        """
        if not is_async_sessionmaker(factory) and not is_async_engine(factory):
            raise TypeError(
                f"AsyncTransactionLock.begin() needs an async_sessionmaker or an AsyncEngine, not {type(factory).__name__}:"
                " use TransactionLock.begin() for a sync factory or engine, and AsyncTransactionLock() for an AsyncSession that is already open"
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
    message = (
        "AsyncTransactionLock needs the AsyncSession or AsyncConnection whose transaction the lock should belong to, not"
        f" {type(given).__name__}"
    )
    if is_async_sessionmaker(given) or is_async_engine(given):
        return f"{message}: use AsyncTransactionLock.begin(), which opens a transaction and acquires the lock first"
    if isinstance(given, Engine) or is_sessionmaker(given):
        return f"{message}: use TransactionLock.begin(), which opens a transaction and acquires the lock first"
    return f"{message}: use TransactionLock for sync sessions and connections, and AsyncTransactionLock.begin() for engines and session factories"
