"""`AdvisoryLock`: session-level advisory locks for threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Literal, overload

from sqlalchemy import Connection, Engine
from typing_extensions import deprecated

from pgfence._api.contexts import SafeContext
from pgfence._api.handles import Held, forget_user_connection, register_user_connection
from pgfence._api.inputs import find_lock_engine, resolve_engine
from pgfence._api.locks import H, LockBase
from pgfence._holds.hold import Hold
from pgfence._locks.looks import look
from pgfence._locks.manager import get_manager
from pgfence._process.coroutines import run_sync
from pgfence._process.lifecycle import PROCESS
from pgfence.advisory._named import LockNames, expect_no_session, look_on_connection
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
    """Hold an exclusive, session-level advisory lock by name, on a dedicated connection.

    ::

        with AdvisoryLock(engine, "indexer").hold(timeout=5) as held:
            for chunk in chunks():
                held.check()
                index(chunk)

    Several names form one lock. All of them are acquired or none, in one global order, on one connection. A wait runs in slices
    of at most 0.5 s in the server, so that it holds back neither VACUUM nor CREATE INDEX CONCURRENTLY. Threads that wait for the
    same names queue inside the process, and one connection serves them.

    Guarantees: each key has at most one holder per database and server, among all clients that use PostgreSQL's advisory locks.
    Until you release it, the lock is held as long as its database session lives. The server releases it when the session ends.
    After a crash or SIGKILL of the holder, the release takes milliseconds. The holder is notified of a loss within milliseconds
    if the socket is closed (on macOS, within about 10 s), and after about 20 s if the network is cut, before the server ends the
    session. An interrupt or cancellation while the lock is being acquired or released does not leave it held. `engine.dispose()`
    does not release the lock. A forked child holds no lock and cannot affect the parent's lock. Locking on a standby, through a
    pooler in transaction mode or on a server that is not PostgreSQL raises an error that says what to do.

    Limitations: a paused or disconnected holder may still be writing. Do its database work on the connection of `connect()`, which
    is closed when the lock is lost, or use a fence. Within one process, waiters are served in the order of their arrival. Between
    processes, waits of more than 0.5 s are served approximately in this order, and shorter waits in no particular order. A
    deadlock between separate locks of two processes is not detected, so acquire all names with one lock. The lock exists in one
    database on one server. Other databases and standbys have no record of it, and it does not survive a failover. On a cluster, it
    is therefore one lock per primary: while a former primary is paused, hangs or is cut off, another process can hold the lock on
    the new primary. A watchdog, or a proxy that closes the sessions of a former primary, limits that time. `token=True` with a
    fence rejects the former holder's writes. A lease on a cluster with synchronous replication does not have this limitation. The
    lock is not re-entrant. A second `acquire` by the thread that holds it raises SelfDeadlockError, and a second `try_acquire`
    returns None.

    Args:
        engine: an Engine; a function that returns one, called at each use; or your own Connection, outside a transaction. That
            Connection then holds the lock, which must be released outside a transaction too. Release the lock before you close
            the Connection. Otherwise, closing it releases the lock, and the pool opens another connection.
        names: one or more names or LockKeys.
        namespace: replaces the configured namespace, for names that are str.
        token: whether each grant has a fencing token (`FencedHeld`), a number that only grows for this name. It is issued in
            the same round trip. `token=True` requires a single name that is a str, and pgfence's tables. A token alone does not
            stop any writer, so enter a gate with it (`held.begin(...)`, `held.fence(session)`). A lease of the same name uses
            the same series of tokens, and while it is held, this lock cannot be acquired.

    Raises:
        TypeError: `engine` is a different kind of object, such as a Session; or a name is neither a str nor a LockKey; or it is a
            LockKey and `token=True`.
        ValueError: no name was given, or a name is not usable; or there are several names and `token=True`.
    """

    _counterpart = "AsyncAdvisoryLock"

    @overload
    @deprecated(
        "a Session cannot keep a session lock: use TransactionLock for work in its transaction, connect() for work on the"
        " lock's own connection, or the engine for everything else"
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
        """Try once to acquire the lock, without waiting. This takes one round trip on an open connection.

        Returns None if the lock is held, even by this thread. A try never waits for the lock, so it cannot deadlock. If pgfence's
        tables are installed, the first grant of a name in a process takes a second round trip, which stores the name.

        Raises:
            PgfenceError: the same errors as `acquire`, except SelfDeadlockError and WaitCancelledError. LockTimeoutError is raised
                only if all connections for locks are in use.
        """
        manager, sql, on = self._place()
        return run_sync(manager.acquire, self._labels, sql, 0.0, self._handle, on=on)

    def acquire(self, *, timeout: Seconds | None = None) -> H:
        """Acquire the lock, waiting until it is free or the timeout has passed.

        Args:
            timeout: seconds to wait. None means the configured default (at most 60 s while this thread holds another session
                lock or a lease), `math.inf` waits indefinitely, and 0 does not wait. A wait continues through a server outage
                until its timeout. With None, it does so only if the server had already responded that the lock is held.

        Raises:
            LockTimeoutError: the lock did not become free in time, and the message and `holders` name the holder; or all
                connections for locks were in use.
            WaitCancelledError: the event of `cancel_waits()` was set.
            SelfDeadlockError: this thread holds the lock, or waiting would deadlock within this process. Not raised with
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
        handle = run_sync(manager.acquire, self._labels, sql, timeout, self._handle, on=on)
        if handle is None:
            raise manager.begin_call(self._labels, sql, 0.0).build_timeout_error(self._find_holders_quietly())
        return handle

    def connect(self, *, timeout: Seconds | None = None) -> AbstractContextManager[Connection, None]:
        """Hold the lock on the connection that does the work.

        If the lock is lost, its connection is lost too, so the block can no longer write on it.

        Yields an ordinary Connection outside the engine's pool, on which you begin and end transactions. The Connection never
        reconnects, so after a loss every statement raises an error. `pgfence.held(connection)` returns the handle of the lock.
        Leaving the block rolls back an open transaction, releases the lock and closes the connection. Opening a connection is
        expensive, so do not call `connect()` in a tight loop.

        Args:
            timeout: the same as for `acquire`.

        Raises:
            PgfenceError: on entering, the same errors as `acquire`.
            LockLostError: on leaving after a loss, unless the block itself raised an exception.
            TypeError: the lock was created with a Connection.
        """
        if isinstance(self._engine, Connection):
            raise TypeError(
                "connect() opens a dedicated connection, but this lock was created with an open connection: create it with an"
                " Engine"
            )
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
        """Return the current holders of any of the names, as the server reports them, without taking a lock.

        Raises:
            UnreachableError: the server cannot be reached.
            PoolerError, StandbyError, UnsupportedServerError: session locks are not safe on this server.
            SchemaError: with `token=True`, pgfence's tables are missing, or this role may not read them.
        """
        manager, sql, on = self._place()
        return run_sync(look, manager.pool, sql) if on is None else look_on_connection(on, sql.keys)

    def _place(self) -> tuple[LockManager, LockSql, Connection | None]:
        engine = self._engine
        found = self._found
        # Repeated calls reuse the manager. A forked child must not, because the connections of the manager belong to the parent.
        if found is not None and found[0].engine is engine and found[0].pid == PROCESS.pid:
            return *found, None
        if isinstance(engine, Connection):
            config = config_of(engine, pin=True)
            manager = get_manager(engine.engine, config)
            return manager, self._in_terms_of(engine, config, manager.style), engine
        engine = resolve_engine(engine, self._get_public_name(), self._counterpart)
        config = config_of(engine, pin=True)
        locked_on, config = find_lock_engine(engine, config)
        manager = get_manager(locked_on, config)
        sql = self._in_terms_of(engine, config, manager.style)
        self._found = manager, sql
        return manager, sql, None


def _close(session: LockConnection, connection: Connection | None) -> None:
    if connection is not None:
        forget_user_connection(connection)
        try:
            run_sync(session.close_lent, connection)
        except Exception:  # a dead connection cannot roll back, and does not need to
            connection.detach() if not connection.closed and not connection.invalidated else None
