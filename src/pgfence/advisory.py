"""`AdvisoryLock`: one holder per name and database, for as long as a server session lives.

What is promised: at most one holder per key per database, among all who use PostgreSQL's advisory locks on that key. The
server is the authority; it frees the lock when it sees the session end, whatever becomes of the holder. The holder is told of
that end: within milliseconds where the socket is closed, within 20 s where the network is cut, before the server gives up.

What is not promised: that a paused or cut-off holder has stopped writing (do its database work on `connect()`, whose
connection dies with the lock, or fence it); an order between processes (inside one, first come first served); that a circle
between two separate locks of two processes is noticed: take both in one lock with many names, which always asks in one order.
A lock is per database and per server: a standby or another database knows nothing of it, and a failover ends it.

Crash, SIGKILL: free after milliseconds. Cancel, Ctrl-C: at any point, twice: the connection is closed, the lock is free.
`engine.dispose()`: does not end a hold. Fork: the child holds nothing and harms nothing. Pooler in transaction mode, standby,
look-alike: refused with the way out.

Sources: PostgreSQL manual, "Explicit Locking" (advisory locks) and "Advisory Lock Functions".
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Self, overload

from sqlalchemy import Connection, Engine
from typing_extensions import deprecated

from pgfence._runtime import aio, sync
from pgfence._runtime.process import PROCESS
from pgfence._sql import activity
from pgfence._sql.advisory import LockSql
from pgfence.config import config_of
from pgfence.handles import AsyncHeld, Held, given_back, lent
from pgfence.keys import Name, resolve
from pgfence.verbs import AH, AsyncBlock, AsyncVerbs, Block, H, Verbs, Watching

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from typing import TypeAlias

    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from pgfence._runtime.aio import AsyncDomain
    from pgfence._runtime.sync import SyncDomain
    from pgfence._sql.advisory import Style
    from pgfence.config import Config
    from pgfence.grants import Holder
    from pgfence.keys import LockKey
    from pgfence.timing import Seconds

    EngineSource: TypeAlias = Engine | Callable[[], Engine]
    AsyncEngineSource: TypeAlias = AsyncEngine | Callable[[], AsyncEngine]


class _Named:
    """What both twins know: where to lock, and on which names."""

    _engine: Any
    _names: Sequence[Name]
    _namespace: str | None
    _labels: tuple[str, ...]
    _sql: LockSql
    _in: str
    """The namespace that `_sql` was made with."""
    _home: Any = None
    """The domain that was found last, for an engine that is its own lock engine."""

    def __init__(self, engine: Any, names: Sequence[Name], namespace: str | None) -> None:
        self._engine = engine
        self._names = tuple(names)
        self._namespace = namespace
        self._in = namespace or ""
        self._sql = LockSql(resolve(names, self._in), "format")
        self._labels = tuple(dict.fromkeys(name if isinstance(name, str) else name.label for name in names))

    def _named(self, names: Sequence[Name]) -> Self:
        other = object.__new__(type(self))
        _Named.__init__(other, self._engine, names, self._namespace)
        return other

    def _in_terms_of(self, config: Config, style: Style) -> LockSql:
        """The statements for this engine's namespace and driver, made once."""
        namespace = config.namespace if self._namespace is None else self._namespace
        if namespace != self._in or style != self._sql.style:
            self._in = namespace
            self._sql = LockSql(resolve(self._names, namespace), style)
        return self._sql

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self._labels))}>"


_THREE_WAYS = (
    "a Session cannot keep a session lock: it gives its connection back at every commit. Use {0}TransactionLock for work in"
    " its transaction, connect() for work on the lock's own connection, or the engine for everything else"
)


class AdvisoryLock(_Named, Verbs[H]):
    """A session-level advisory lock: exclusive, by name, on a connection of its own.

        with AdvisoryLock(engine, "indexer").hold(timeout=5) as held:
            for chunk in chunks():
                held.check()
                index(chunk)

    Several names are one lock: taken all or none, in one global order, on one connection. While it waits it is a polite guest:
    in slices of at most half a second, so that it holds back neither vacuum nor CREATE INDEX CONCURRENTLY. Threads that want
    the same names stand in line inside the process, and one connection serves them.

    Not promised: see the module. A lock is not re-entrant: taken again by its own thread it raises SelfDeadlockError.

    Args:
        engine: an Engine; or a function that returns one, called at each use; or the caller's own Connection, outside a
            transaction: there the lock lives on that connection, and is given back outside a transaction too.
        names: one or more names or ready keys.
        namespace: instead of the configured one, for names that are text.

    Raises:
        TypeError: for anything else, a Session above all.
        ValueError: there is no name, or an unusable one.
    """

    @overload
    @deprecated(
        "a Session cannot keep a session lock: TransactionLock for work in its transaction, connect() for work on the lock's"
        " own connection, the engine for everything else"
    )
    def __init__(
        self: AdvisoryLock[Held], engine: Session | scoped_session[Any], *names: Name, namespace: str | None = None
    ) -> None: ...
    @overload
    def __init__(
        self: AdvisoryLock[Held], engine: EngineSource | Connection, *names: Name, namespace: str | None = None
    ) -> None: ...
    def __init__(self, engine: Any, *names: Name, namespace: str | None = None) -> None:
        if isinstance(engine, (Engine, Connection)):
            super().__init__(engine, names, namespace)
            return
        if hasattr(engine, "get_bind") or hasattr(engine, "registry"):
            raise TypeError(_THREE_WAYS.format(""))
        if hasattr(engine, "sync_engine") or hasattr(engine, "sync_connection"):
            raise TypeError(
                f"AdvisoryLock needs an Engine or a Connection, not {type(engine).__name__}: use AsyncAdvisoryLock"
            )
        if not callable(engine):
            raise TypeError(
                f"AdvisoryLock needs an Engine, a function that returns one, or a Connection, not {type(engine).__name__}"
            )
        super().__init__(engine, names, namespace)

    def try_acquire(self) -> H | None:
        """Try once, without waiting. None: somebody else has it. One round trip on a warm connection.

        Raises:
            as `acquire`; LockTimeoutError only when all connections for locks are in use.
        """
        domain, sql, on = self._place()
        hold = domain.acquire(self._labels, sql, 0.0, on=on)
        return None if hold is None else Held(domain, hold)  # type: ignore[return-value]

    def acquire(self, *, timeout: Seconds | None = None) -> H:
        """Wait until the lock is held.

        Args:
            timeout: seconds; None is the configured default (cut to 60 while this thread holds another session lock),
                `math.inf` for ever, 0 does not wait.

        Raises:
            LockTimeoutError: it was not free in time; names the holder.
            SelfDeadlockError: this thread, or a circle inside this process, holds it.
            UnreachableError: no session could be had; nothing is known about the lock.
            PoolerError, StandbyError, UnsupportedServerError: session locks are not safe on this server.
            CapacityError: the server's lock table is nearly full.
            TransactionStateError: the caller's own connection is in a transaction or a pipeline.
        """
        domain, sql, on = self._place()
        limit = domain.timeout(timeout, sync.contender())
        hold = domain.acquire(self._labels, sql, limit, on=on)
        if hold is None:
            raise domain.timed_out(domain.request(self._labels, sql, sync.contender(), 0.0), self.holders())
        return Held(domain, hold)  # type: ignore[return-value]

    def connect(self, *, timeout: Seconds | None = None) -> AbstractContextManager[Connection, None]:
        """Hold the lock on the very connection that does the work: a lost lock is a lost connection, so no stale write.

        Yields an ordinary Connection outside the engine's pool; transactions are yours. It never reconnects: after a loss
        every statement is refused. `pgfence.held(connection)` is its handle. Leaving the block rolls back what is open,
        unlocks and closes the connection; opening it makes this form too dear for a tight loop.

        Args:
            timeout: as in `acquire`.

        Raises:
            as `acquire`, on entering; LockLostError on leaving after a loss, unless the block itself raised.
            TypeError: the lock was made with a Connection.
        """
        if isinstance(self._engine, Connection):
            raise TypeError("connect() opens a connection of its own: make the lock with an Engine")
        return Block(self._connect(timeout))

    @contextmanager
    def _connect(self, timeout: Seconds | None) -> Iterator[Connection]:
        domain, _, _ = self._place()
        handle = self.acquire(timeout=timeout)
        try:
            connection = handle._hold.session.lend(domain.engine)
            lent(connection, handle)
            yield connection
        except BaseException as exc:
            _close(locals().get("connection"))
            handle._leave(exc, flag=False)
            raise
        _close(connection)
        handle._leave(None, flag=False)

    def holders(self) -> list[Holder]:
        """Return who holds any of the names at this moment, as the server sees it. Looking never takes a lock.

        Raises:
            UnreachableError: there is no server.
        """
        domain, sql, on = self._place()
        return domain.holders(sql.keys) if on is None else _look(on, sql.keys)

    def _place(self) -> tuple[SyncDomain, LockSql, Connection | None]:
        engine = self._engine
        home = self._home
        if home is not None and home.engine is engine and home.pid == PROCESS.pid:
            return home, self._sql, None
        if isinstance(engine, Connection):
            config = config_of(engine)
            domain = sync.domain_of(engine.engine, config)
            return domain, self._in_terms_of(config, domain.style), engine
        if not isinstance(engine, Engine):
            engine = engine()
        config = config_of(engine)
        domain = sync.domain_of(_lock_engine(engine, config), config)
        self._home = domain
        return domain, self._in_terms_of(config, domain.style), None


def _look(connection: Connection, keys: tuple[LockKey, ...]) -> list[Holder]:
    """Look on the caller's own connection, and leave no transaction behind that was not there before."""
    began = not connection.in_transaction()
    try:
        return activity.holders(connection, keys)
    finally:
        if began:
            connection.rollback()


def _lock_engine(engine: Any, config: Any) -> Any:
    other = config.lock_engine
    if other is None:
        return engine
    if callable(other):
        other = other()
    if hasattr(other, "sync_engine") != hasattr(engine, "sync_engine"):
        raise TypeError(
            f"the lock_engine of this {type(engine).__name__} is of the other world: {type(other).__name__}"
        )
    return other


def _close(connection: Connection | None) -> None:
    if connection is not None:
        given_back(connection)
        try:
            connection.close()
        except Exception:  # a dead connection cannot roll back, and need not
            connection.detach() if not connection.closed and not connection.invalidated else None


class AsyncAdvisoryLock(_Named, AsyncVerbs[AH]):
    """A session-level advisory lock: exclusive, by name, on a connection of its own; the async twin of `AdvisoryLock`.

        async with AsyncAdvisoryLock(engine, "indexer").hold(timeout=5) as held:
            async for chunk in chunks():
                await index(chunk)

    Statements run on the calling task and its loop. A cancel in mid-statement closes that connection, and so harms this one
    hold only. Tasks that want the same names stand in line, and one connection serves them. A task is a contender: the lock
    taken again by its own task raises SelfDeadlockError, a child task waits.

    Args, errors and limits are those of the sync twin, with AsyncEngine and AsyncConnection.
    """

    @overload
    @deprecated(
        "a Session cannot keep a session lock: AsyncTransactionLock for work in its transaction, connect() for work on the"
        " lock's own connection, the engine for everything else"
    )
    def __init__(
        self: AsyncAdvisoryLock[AsyncHeld],
        engine: AsyncSession | async_scoped_session[Any],
        *names: Name,
        namespace: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self: AsyncAdvisoryLock[AsyncHeld],
        engine: AsyncEngineSource | AsyncConnection,
        *names: Name,
        namespace: str | None = None,
    ) -> None: ...
    def __init__(self, engine: Any, *names: Name, namespace: str | None = None) -> None:
        if hasattr(engine, "get_bind") or hasattr(engine, "registry"):
            raise TypeError(_THREE_WAYS.format("Async"))
        if isinstance(engine, (Engine, Connection)):
            raise TypeError(
                f"AsyncAdvisoryLock needs an AsyncEngine or an AsyncConnection, not {type(engine).__name__}: use AdvisoryLock"
            )
        if not hasattr(engine, "sync_engine") and not hasattr(engine, "sync_connection") and not callable(engine):
            raise TypeError(
                f"AsyncAdvisoryLock needs an AsyncEngine, a function that returns one, or an AsyncConnection, not {type(engine).__name__}"
            )
        super().__init__(engine, names, namespace)

    async def try_acquire(self) -> AH | None:
        """Try once, without waiting. None: somebody else has it. One round trip on a warm connection.

        Raises:
            as `acquire`; LockTimeoutError only when all connections for locks are in use.
        """
        domain, sql, on = self._place()
        hold = await domain.acquire(self._labels, sql, 0.0, on=on)
        return None if hold is None else AsyncHeld(domain, hold)  # type: ignore[return-value]

    async def acquire(self, *, timeout: Seconds | None = None) -> AH:
        """Wait until the lock is held.

        Args:
            timeout: seconds; None is the configured default (cut to 60 while this task holds another session lock),
                `math.inf` for ever, 0 does not wait.

        Raises:
            LockTimeoutError: it was not free in time; names the holder.
            SelfDeadlockError: this task, or a circle inside this process, holds it.
            UnreachableError: no session could be had; nothing is known about the lock.
            PoolerError, StandbyError, UnsupportedServerError: session locks are not safe on this server.
            CapacityError: the server's lock table is nearly full.
            TransactionStateError: the caller's own connection is in a transaction or a pipeline.
        """
        domain, sql, on = self._place()
        limit = domain.timeout(timeout, aio.contender())
        hold = await domain.acquire(self._labels, sql, limit, on=on)
        if hold is None:
            raise domain.timed_out(domain.request(self._labels, sql, aio.contender(), 0.0), await self.holders())
        return AsyncHeld(domain, hold)  # type: ignore[return-value]

    def connect(self, *, timeout: Seconds | None = None) -> AbstractAsyncContextManager[AsyncConnection, None]:
        """Hold the lock on the very connection that does the work: a lost lock is a lost connection, so no stale write.

        Yields an ordinary AsyncConnection outside the engine's pool; see the sync twin. A loss also cancels the block.

        Args:
            timeout: as in `acquire`.

        Raises:
            as `acquire`, on entering; LockLostError on leaving after a loss, unless the block itself raised something else.
            TypeError: the lock was made with an AsyncConnection.
        """
        if hasattr(self._engine, "sync_connection"):
            raise TypeError("connect() opens a connection of its own: make the lock with an AsyncEngine")
        return AsyncBlock(self._connect(timeout))

    @asynccontextmanager
    async def _connect(self, timeout: Seconds | None) -> AsyncIterator[AsyncConnection]:
        domain, _, _ = self._place()
        handle = await self.acquire(timeout=timeout)
        watching = Watching()
        watching.start(handle)
        async with watching:
            connection = await handle._hold.session.lend(domain.engine, domain.async_engine)
            inner = connection.sync_connection
            lent(inner, handle)
            try:
                yield connection
            finally:
                given_back(inner)
                await handle._hold.session.close_lent(connection)

    async def holders(self) -> list[Holder]:
        """Return who holds any of the names at this moment, as the server sees it. Looking never takes a lock.

        Raises:
            UnreachableError: there is no server.
        """
        domain, sql, on = self._place()
        return await domain.holders(sql.keys) if on is None else await on.run_sync(_look, sql.keys)

    def _place(self) -> tuple[AsyncDomain, LockSql, AsyncConnection | None]:
        engine = self._engine
        home = self._home
        if (
            home is not None
            and home.async_engine is engine
            and home.loop is asyncio.get_running_loop()
            and home.pid == PROCESS.pid
        ):
            return home, self._sql, None
        if hasattr(engine, "sync_connection"):
            config = config_of(engine)
            domain = aio.domain_of(engine.engine, config)
            return domain, self._in_terms_of(config, domain.style), engine
        if not hasattr(engine, "sync_engine"):
            engine = engine()
        config = config_of(engine)
        domain = aio.domain_of(_lock_engine(engine, config), config)
        self._home = domain
        return domain, self._in_terms_of(config, domain.style), None
