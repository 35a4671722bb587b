"""The sync half."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

from sqlalchemy import Connection, Engine
from typing_extensions import deprecated

from pgfence._api.contexts import SafeContext
from pgfence._api.handles import Held, forget_user_connection, register_user_connection
from pgfence._api.inputs import resolve_engine
from pgfence._api.locks import H, LockBase
from pgfence._holds.hold import Hold
from pgfence._locks.looks import look
from pgfence._locks.manager import get_manager
from pgfence._process.coroutines import run_sync
from pgfence._process.lifecycle import PROCESS
from pgfence.advisory._named import LockNames, expect_no_session, lock_engine, look_on_connection
from pgfence.config import config_of
from pgfence.fence.handles import FencedHeld

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import TypeAlias

    from sqlalchemy.orm import Session, scoped_session

    from pgfence._connections.connection import LockConnection
    from pgfence._locks.manager import LockManager, SessionHold
    from pgfence._process.clock import Seconds
    from pgfence._sql.advisory import LockSql
    from pgfence.keys import Name
    from pgfence.types import Holder

    EngineSource: TypeAlias = Engine | Callable[[], Engine]


class AdvisoryLock(LockNames, LockBase[H]):
    """A session-level advisory lock: exclusive, by name, on a connection of its own.

    ::

        with AdvisoryLock(engine, "indexer").hold(timeout=5) as held:
            for chunk in chunks():
                held.check()
                index(chunk)

    Several names are one lock: taken all or none, in one global order, on one connection. While it waits it is a polite guest:
    in slices of at most half a second, so that it holds back neither vacuum nor CREATE INDEX CONCURRENTLY. Threads that want
    the same names stand in line inside the process, and one connection serves them.

    Not promised: see the module. A lock is not re-entrant: a second `acquire` by its own thread raises SelfDeadlockError, a
    try returns None.

    Args:
        engine: an Engine; or a function that returns one, called at each use; or the caller's own Connection, outside a
            transaction: there the lock lives on that connection, and is given back outside a transaction too. Release it
            before you close the Connection: closing that ends the lock, and the pool opens another connection.
        names: one or more names or ready keys.
        namespace: instead of the configured one, for names that are text.
        token: each grant brings a fencing token (`FencedHeld`), a number that only grows for this name, in the same round
            trip. For one name that is text; it needs pgfence's tables. The token stops nobody by itself: enter a gate with
            it (`held.begin(...)`, `held.fence(session)`). A lease of the same name shares its numbers, and while somebody
            holds that, the lock counts as busy.

    Raises:
        TypeError: for anything else, a Session above all; or for a ready key with `token=True`.
        ValueError: there is no name, or an unusable one; or several with `token=True`.
    """

    @overload
    @deprecated(
        "a Session cannot keep a session lock: TransactionLock for work in its transaction, connect() for work on the lock's"
        " own connection, the engine for everything else"
    )
    def __init__(
        self: AdvisoryLock[Held],
        engine: Session | scoped_session[Any],
        *names: Name,
        namespace: str | None = None,
        token: bool = False,
    ) -> None: ...
    @overload
    def __init__(
        self: AdvisoryLock[Held],
        engine: EngineSource | Connection,
        *names: Name,
        namespace: str | None = None,
        token: Literal[False] = False,
    ) -> None: ...
    @overload
    def __init__(
        self: AdvisoryLock[FencedHeld],
        engine: EngineSource | Connection,
        name: str,
        /,
        *,
        namespace: str | None = None,
        token: Literal[True],
    ) -> None: ...
    def __init__(self, engine: object, *names: Name, namespace: str | None = None, token: bool = False) -> None:
        if isinstance(engine, (Engine, Connection)):
            super().__init__(engine, names, namespace, token)
            return
        expect_no_session(engine)
        if hasattr(engine, "sync_engine") or hasattr(engine, "sync_connection"):
            raise TypeError(
                f"AdvisoryLock needs an Engine or a Connection, not {type(engine).__name__}: use AsyncAdvisoryLock"
            )
        if not callable(engine):
            raise TypeError(
                f"AdvisoryLock needs an Engine, a function that returns one, or a Connection, not {type(engine).__name__}"
            )
        super().__init__(engine, names, namespace, token)

    def _handle(self, manager: LockManager, hold: SessionHold) -> H:
        return (FencedHeld if self._token else Held)(manager, hold)  # type: ignore[return-value]

    def try_acquire(self) -> H | None:
        """Try once, without waiting. One round trip on a warm connection.

        Returns None if it is held, also by this very thread: a try cannot deadlock.

        Raises:
            PgfenceError: as `acquire`; LockTimeoutError only when all connections for locks are in use.
        """
        manager, sql, on = self._place()
        return run_sync(manager.acquire, self._labels, sql, 0.0, self._handle, on=on)

    def acquire(self, *, timeout: Seconds | None = None) -> H:
        """Wait until the lock is held.

        Args:
            timeout: seconds; None is the configured default (cut to 60 while this thread holds another session lock),
                `math.inf` waits without a limit, 0 does not wait. A wait lasts through an outage of the server, up to its
                timeout; with None only once the server has responded that the lock is held.

        Raises:
            LockTimeoutError: it was not free in time; names the holder.
            WaitCancelledError: the event of `cancel_waits()` was set.
            SelfDeadlockError: this thread holds it, or waiting would close a cycle inside this process. Not with `timeout=0`.
            UnreachableError: the server cannot be reached, or not any more at the end of the wait: the message says what it
                last responded.
            PoolerError, StandbyError, UnsupportedServerError: session locks are not safe on this server.
            CapacityError: the server's lock table is nearly full.
            TransactionStateError: the caller's own connection is in a transaction or a pipeline.
            SchemaError: with `token=True`, pgfence's tables are missing, too old, or not open to this role.
        """
        manager, sql, on = self._place()
        handle = run_sync(manager.acquire, self._labels, sql, timeout, self._handle, on=on)
        if handle is None:
            raise manager.begin_call(self._labels, sql, 0.0).build_timeout_error(self._find_holders_quietly())
        return handle

    def connect(self, *, timeout: Seconds | None = None) -> AbstractContextManager[Connection, None]:
        """Hold the lock on the very connection that does the work: a lost lock is a lost connection, so no stale write.

        Yields an ordinary Connection outside the engine's pool; transactions are yours. It never reconnects: after a loss
        every statement is refused. `pgfence.held(connection)` is its handle. Leaving the block rolls back what is open,
        unlocks and closes the connection; opening it makes this form too dear for a tight loop.

        Args:
            timeout: as in `acquire`.

        Raises:
            PgfenceError: on entering, as `acquire`.
            LockLostError: on leaving after a loss, unless the block itself raised.
            TypeError: the lock was made with a Connection.
        """
        if isinstance(self._engine, Connection):
            raise TypeError("connect() opens a connection of its own: make the lock with an Engine")
        return SafeContext(self._connect(timeout))

    @contextmanager
    def _connect(self, timeout: Seconds | None) -> Iterator[Connection]:
        manager, _, _ = self._place()
        handle = self.acquire(timeout=timeout)
        hold = handle._hold
        assert isinstance(hold, Hold)
        try:
            connection = run_sync(hold.session.as_user_connection, manager.engine)
            register_user_connection(connection, handle)
            yield connection
        except BaseException as exc:
            _close(hold.session, locals().get("connection"))
            handle._leave(exc, flag=False)
            raise
        _close(hold.session, connection)
        handle._leave(None, flag=False)

    def holders(self) -> list[Holder]:
        """Return who holds any of the names at this moment, as the server sees it. Looking never takes a lock.

        Raises:
            UnreachableError: there is no server.
            PoolerError, StandbyError, UnsupportedServerError: session locks are not safe on this server.
        """
        manager, sql, on = self._place()
        return run_sync(look, manager.pool, sql) if on is None else look_on_connection(on, sql.keys)

    def _place(self) -> tuple[LockManager, LockSql, Connection | None]:
        engine = self._engine
        found = self._found
        if found is not None and found[0].engine is engine and found[0].pid == PROCESS.pid:
            return *found, None
        if isinstance(engine, Connection):
            config = config_of(engine, pin=True)
            manager = get_manager(engine.engine, config)
            return manager, self._in_terms_of(engine, config, manager.style), engine
        engine = resolve_engine(engine, "AdvisoryLock", "AsyncAdvisoryLock")
        config = config_of(engine, pin=True)
        manager = get_manager(lock_engine(engine, config), config)
        sql = self._in_terms_of(engine, config, manager.style)
        self._found = manager, sql
        return manager, sql, None


def _close(session: LockConnection, connection: Connection | None) -> None:
    if connection is not None:
        forget_user_connection(connection)
        try:
            run_sync(session.close_lent, connection)
        except Exception:  # a dead connection cannot roll back, and need not
            connection.detach() if not connection.closed and not connection.invalidated else None
