"""`AsyncAdvisoryLock`: session-level advisory locks for asyncio."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, overload

from sqlalchemy import Connection, Engine
from typing_extensions import deprecated

from pgfence._api.cancel_on_loss import CancelOnLoss
from pgfence._api.contexts import AsyncSafeContext
from pgfence._api.handles import AsyncHeld, forget_user_connection, register_user_connection
from pgfence._api.inputs import find_lock_engine, resolve_async_engine
from pgfence._api.locks import AH, AsyncLockBase
from pgfence._holds.hold import Hold
from pgfence._locks.looks import look
from pgfence._locks.manager import get_manager
from pgfence._process.lifecycle import PROCESS
from pgfence.advisory._named import LockNames, expect_no_session, look_on_connection
from pgfence.config import config_of
from pgfence.fence.handles import AsyncFencedHeld

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import TypeAlias

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session

    from pgfence._locks.manager import LockManager, SessionHold
    from pgfence._process.clock import Seconds
    from pgfence._sql.advisory import LockSql
    from pgfence.keys import Name
    from pgfence.types import Holder

    AsyncEngineSource: TypeAlias = AsyncEngine | Callable[[], AsyncEngine]


class AsyncAdvisoryLock(LockNames, AsyncLockBase[AH]):
    """Hold an exclusive, session-level advisory lock by name, on a dedicated connection. The async counterpart of `AdvisoryLock`.

    ::

        async with AsyncAdvisoryLock(engine, "indexer").hold(timeout=5) as held:
            async for chunk in chunks():
                await index(chunk)

    Statements run in the calling task and its event loop. Cancelling a task while a statement runs closes the connection of
    that statement and affects no other hold. Tasks that wait for the same names queue inside the process, and one connection
    serves them. Each task is a separate contender. A second `acquire` by the task that holds the lock raises SelfDeadlockError,
    a second `try_acquire` returns None, and a child task waits like any other task.

    Guarantees, limitations, arguments and errors are the same as for `AdvisoryLock`, with AsyncEngine and AsyncConnection.
    """

    _counterpart = "AdvisoryLock"

    @overload
    @deprecated(
        "a Session cannot keep a session lock: use AsyncTransactionLock for work in its transaction, connect() for work on the"
        " lock's own connection, or the engine for everything else"
    )
    def __init__(
        self: AsyncAdvisoryLock[AsyncHeld],
        engine: AsyncSession | async_scoped_session[Any],
        *names: Name,
        namespace: str | None = None,
        token: bool = False,
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncAdvisoryLock[AsyncHeld],
        engine: AsyncEngineSource | AsyncConnection,
        *names: Name,
        namespace: str | None = None,
        token: Literal[False] = False,
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncAdvisoryLock[AsyncFencedHeld],
        engine: AsyncEngineSource | AsyncConnection,
        name: str,
        /,
        *,
        namespace: str | None = None,
        token: Literal[True],
    ) -> None: ...
    def __init__(self, engine: object, *names: Name, namespace: str | None = None, token: bool = False) -> None:
        expect_no_session(engine)
        if isinstance(engine, (Engine, Connection)):
            raise TypeError(
                f"AsyncAdvisoryLock needs an AsyncEngine or an AsyncConnection, not {type(engine).__name__}: use AdvisoryLock"
            )
        if not hasattr(engine, "sync_engine") and not hasattr(engine, "sync_connection") and not callable(engine):
            raise TypeError(
                f"AsyncAdvisoryLock needs an AsyncEngine, a function that returns one, or an AsyncConnection, not {type(engine).__name__}"
            )
        super().__init__(engine, names, namespace, token)

    def _handle(self, manager: LockManager, hold: SessionHold) -> AH:
        return (AsyncFencedHeld if self._token else AsyncHeld)(manager, hold)  # type: ignore[return-value]

    async def try_acquire(self) -> AH | None:
        """Try once to acquire the lock, without waiting. This takes one round trip on an open connection.

        Returns None if the lock is held, even by this task. A try never waits for the lock, so it cannot deadlock. If pgfence's
        tables are installed, the first grant of a name in a process takes a second round trip, which stores the name.

        Raises:
            PgfenceError: the same errors as `acquire`, except SelfDeadlockError. LockTimeoutError is raised only if all
                connections for locks are in use.
        """
        manager, sql, on = self._place()
        return await manager.acquire(self._labels, sql, 0.0, self._handle, on=await _start(on))

    async def acquire(self, *, timeout: Seconds | None = None) -> AH:
        """Acquire the lock, waiting until it is free or the timeout has passed.

        Args:
            timeout: seconds to wait. None means the configured default (at most 60 s while this task holds another session
                lock or a lease), `math.inf` waits indefinitely, and 0 does not wait. A wait continues through a server outage
                until its timeout. With None, it does so only if the server had already responded that the lock is held.

        Raises:
            LockTimeoutError: the lock did not become free in time, and the message and `holders` name the holder; or all
                connections for locks were in use.
            SelfDeadlockError: this task holds the lock, or waiting would deadlock within this process. Not raised with
                `timeout=0`.
            UnreachableError: the server cannot be reached, or could no longer be reached at the end of the wait. In the second
                case, the message contains the server's last response.
            PoolerError, StandbyError, UnsupportedServerError: session locks are not safe on this server.
            CapacityError: the server's lock table is full, or would be filled to 90 %. pgfence counts its entries when it opens a
                connection, and before a request for more than 100 names.
            KeyCollisionError: another name that is stored in pgfence's tables has the same key.
            TransactionStateError: the caller's own connection is in a transaction or a pipeline, or, with `token=True`, its
                transactions are read-only.
            SchemaError: with `token=True`, pgfence's tables are missing or too old, or this role may not use them.
        """
        manager, sql, on = self._place()
        handle = await manager.acquire(self._labels, sql, timeout, self._handle, on=await _start(on))
        if handle is None:
            raise manager.begin_call(self._labels, sql, 0.0).build_timeout_error(await self._find_holders_quietly())
        return handle

    def connect(self, *, timeout: Seconds | None = None) -> AbstractAsyncContextManager[AsyncConnection, None]:
        """Hold the lock on the connection that does the work.

        If the lock is lost, its connection is lost too, so the block can no longer write on it.

        Yields an ordinary AsyncConnection outside the engine's pool; see `AdvisoryLock.connect`. A loss also cancels the block.

        Args:
            timeout: the same as for `acquire`.

        Raises:
            PgfenceError: on entering, the same errors as `acquire`.
            LockLostError: on leaving after a loss, unless the block itself raised another exception.
            TypeError: the lock was created with an AsyncConnection.
        """
        if hasattr(self._engine, "sync_connection"):
            raise TypeError(
                "connect() opens a dedicated connection, but this lock was created with an open connection: create it with an"
                " AsyncEngine"
            )
        return AsyncSafeContext(self._connect(timeout))

    @asynccontextmanager
    async def _connect(self, timeout: Seconds | None) -> AsyncIterator[AsyncConnection]:
        from sqlalchemy.ext.asyncio import AsyncConnection

        manager, _, _ = self._place()
        engine = self._locked_on
        handle = await self.acquire(timeout=timeout)
        hold = handle._hold
        assert isinstance(hold, Hold)
        watching = CancelOnLoss()
        watching.start(handle)
        async with watching:
            inner = await hold.session.as_user_connection(manager.engine)
            register_user_connection(inner, handle)
            try:
                yield AsyncConnection(engine, inner)
            finally:
                forget_user_connection(inner)
                with suppress(Exception):  # a dead connection cannot roll back, and does not need to
                    await hold.session.close_lent(inner)

    async def holders(self) -> list[Holder]:
        """Return the current holders of any of the names, as the server reports them, without taking a lock.

        Raises:
            UnreachableError: the server cannot be reached.
            PoolerError, StandbyError, UnsupportedServerError: session locks are not safe on this server.
            SchemaError: with `token=True`, pgfence's tables are missing, or this role may not read them.
        """
        manager, sql, on = self._place()
        if on is None:
            return await look(manager.pool, sql)
        return await on.run_sync(look_on_connection, sql.keys)

    def _place(self) -> tuple[LockManager, LockSql, AsyncConnection | None]:
        engine = self._engine
        found = self._found
        # Repeated calls on one event loop reuse the manager. A forked child must not use its parent's manager.
        if (
            found is not None
            and found[0].engine is getattr(engine, "sync_engine", None)
            and found[0].loop is asyncio.get_running_loop()
            and found[0].pid == PROCESS.pid
        ):
            return *found, None
        if hasattr(engine, "sync_connection"):
            config = config_of(engine, pin=True)
            manager = get_manager(engine.engine.sync_engine, config)
            return manager, self._in_terms_of(engine, config, manager.style), engine
        engine = resolve_async_engine(engine, self._get_public_name(), self._counterpart)
        config = config_of(engine, pin=True)
        self._locked_on, config = find_lock_engine(engine, config)
        manager = get_manager(self._locked_on.sync_engine, config)
        sql = self._in_terms_of(engine, config, manager.style)
        self._found = manager, sql
        return manager, sql, None


async def _start(connection: AsyncConnection | None) -> Connection | None:
    """Return the sync Connection beneath an AsyncConnection, which must have been started."""
    if connection is None:
        return None
    if connection.sync_connection is None:
        await connection.get_raw_connection()  # raises SQLAlchemy's error for a connection that was not started
    return connection.sync_connection
