"""Connections of our own: made like the user's, kept out of the user's pool, one for each hold.

The specification, sentence by sentence:

1. A session is opened with the creator, dialect, connect arguments and `do_connect`/`connect` events of the user's engine
   (tokens of cloud logins live there), through `pool.recreate()`: a pool of its own for each one, so a full QueuePool, a
   StaticPool, a pre-ping or a patched `engine.connect` cannot get in the way. Pool and engine events of the user's engine
   other than those do not run for it, and its `execution_options` do not reach it.
2. It is in autocommit from the first statement to the last, so it is never idle in a transaction.
3. One round trip sets it up and reads what `_sql.server.verdict` judges; nothing is sent as a start-up option. Behind a
   declared pooler nothing is set.
4. It is outside every pool: disposing of the engine does not end a hold, and a lock never comes back to the user's pool.
5. Nothing here keeps the engine alive: a session knows its driver's connection and no engine.
6. Statements go straight to the driver; when somebody listens (`before_cursor_execute`, `after_cursor_execute`, echo), they
   go through SQLAlchemy on the same connection, so that hooks see everything.
7. A statement that ended in anything but success or SQLSTATE 55P03 leaves the session unknown, and it is closed.
8. The kernel's keepalive and user timeout give up on the server after 20 s, the server gives up on us after 30 s.
9. A hang-up of the socket, an overdue statement, or a question without an answer ends the session, from any thread, and the
   hold on it is lost at once.
10. In a forked child every session is cut from its socket without a word and forgotten.
11. A few are kept warm after use and closed after 30 s, at `engine.dispose()`, and when the engine is collected.
12. At most `max_lock_connections` are open at a time; whoever needs one more waits its turn, first come first served.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from pgfence._runtime.watch import HAS_HANGUP, WATCHER
from pgfence._sql import server
from pgfence._sql.sqlstate import sqlstate
from pgfence.errors import PgfenceError, PoolerError, TransactionStateError, UnreachableError
from pgfence.timing import slice_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

    from pgfence._runtime.drivers import Wire
    from pgfence._runtime.state import Hold
    from pgfence.config import PoolerSetting
    from pgfence.errors import LossReason

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
WARM = 5
WARM_FOR = 30.0
OPEN_BUDGET = 5.0
"""Seconds that opening a connection may take at least, however short the caller's timeout for the lock is."""
STATEMENT_BUDGET = 30.0
WAIT_GRACE = 2.0
PROBE_EVERY = 10.0


class Gone(Exception):
    """The connection ended under a statement that cannot have left a lock behind. Never leaves `_runtime`."""


class Session:
    """What both worlds know of one connection of ours, or of one that the caller lent."""

    ours = True
    """False: the caller's own connection. We set nothing on it, close it only when a lock would stay on it, and keep it out
    of the roster."""

    def __init__(self, dbapi_connection: Any, wire: Wire, facts: server.Facts) -> None:
        self.dbapi_connection = dbapi_connection
        self.wire = wire
        self.pid = facts.backend_pid
        self.slice = slice_for(facts.deadlock_timeout)
        self.facts = facts
        self.hold: Hold[Any] | None = None
        self.lent = False
        """The user's code runs on it (`connect()`): it may be told dead, but no statement of ours goes in between."""
        self.dead: LossReason | None = None
        self.closed = False
        self.retired = False
        self.dup = -1
        self.since = 0.0
        """When the running statement was sent; 0: none runs."""
        self.limit = STATEMENT_BUDGET
        self.idle_since = time.monotonic()
        self.probed = self.idle_since
        self.burst = 0
        self.granted_at = 0.0
        self.on_death: Callable[[Session], object] | None = None

    def watch(self) -> None:
        fd = self.wire.fileno()
        if fd >= 0 and self.ours:
            keep_alive(fd)
        WATCHER.watch(self, fd)
        _OPEN.add(self)

    def died(self, reason: LossReason) -> None:
        """Tell everybody that the session is over: on the watcher's thread, or wherever it was found out."""
        if self.dead is None:
            self.dead = reason
        hold = self.hold
        if hold is not None and hold.session is self:
            hold.lose(self.dead)
        if self.on_death is not None:
            self.on_death(self)

    def tick(self, now: float, paused: bool) -> None:
        """Once a second, on the watcher's thread: cut what is overdue, ask for what is in doubt."""
        if self.since and paused:
            self.since = now  # the answer may lie in the socket already: we, not the server, stood still
        elif self.since and now - self.since > self.limit:
            self.cut()
        hold = self.hold
        if hold is None or self.lent or self.dead or not self.ours:
            return
        if paused:
            hold.unsure = True
        if paused or (not HAS_HANGUP and now - self.probed > PROBE_EVERY):
            self.probed = now
            self.probe(hold)

    def probe(self, hold: Hold[Any]) -> None:
        """Ask the server whether the session lives, without waiting for the answer here."""
        raise NotImplementedError

    def cut(self) -> None:
        """Give up on a server that does not answer: the statement under way fails, the hold is lost."""
        self.dead = self.dead or "cut off"
        WATCHER.shut_down(self)
        self.died("cut off")

    def close(self) -> None:
        """End the connection. Only for its owner: never while another thread is in a statement on it."""
        if self.closed:
            return
        self.closed = True
        self.dead = self.dead or "killed"
        WATCHER.unwatch(self)
        _OPEN.discard(self)
        with contextlib.suppress(Exception):
            self.wire.close()

    def begin(self, limit: float) -> None:
        self.limit = limit
        self.since = time.monotonic()

    def end(self) -> None:
        self.since = 0.0


_OPEN: weakref.WeakSet[Session] = weakref.WeakSet()
_GRAVEYARD: list[Any] = []


def _forget_in_child() -> None:
    """Cut a forked child off: its goodbye would end the parent's session, its copy of the socket keep a dead parent's lock."""
    sessions = list(_OPEN)
    if not sessions:
        return
    null = os.open(os.devnull, os.O_RDWR)
    for session in sessions:
        with contextlib.suppress(Exception):
            os.dup2(null, session.wire.fileno())
        session.dup = -1
    os.close(null)
    _GRAVEYARD.extend(sessions)  # finalising a driver's connection here could still speak, warn or touch the loop
    _OPEN.clear()
    WATCHER.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def keep_alive(fd: int) -> None:
    """Have the kernel give up on a silent server after 20 s, by the socket: no driver's arguments are touched."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
        if ours.family not in (socket.AF_INET, socket.AF_INET6):
            return
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                with contextlib.suppress(OSError):
                    ours.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def open_connection(engine: Engine, pooler: PoolerSetting) -> tuple[Any, Any, server.Facts]:
    """Open a connection like the engine's, outside every pool, in autocommit; judge its server.

    This is the one place that makes "a connection like this engine's". Async engines run it inside a greenlet.

    Returns:
        The DBAPI connection, the driver's own connection, and the facts of the server.

    Raises:
        UnreachableError: the server did not answer or did not let us in.
        PoolerError, StandbyError, UnsupportedServerError: it did, and session locks are not safe there.
    """
    server.style_of(engine.dialect)
    fairy = _fresh(engine)
    try:
        connection = Connection(engine, connection=fairy)
        connection.execution_options(isolation_level="AUTOCOMMIT")  # SQLAlchemy cannot do it after detach()
        facts = server.read_facts(connection, set_up=pooler == "auto" or pooler == "direct")
        dbapi_connection = fairy.dbapi_connection
        driver = engine.dialect.get_driver_connection(dbapi_connection)
        judge(engine, facts, driver, pooler)
        connection.commit()
        fairy.detach()
    except BaseException as error:
        with contextlib.suppress(Exception):
            fairy.invalidate()
        if isinstance(error, Exception) and (told := unreachable(engine, error)):
            raise told from error
        raise
    return dbapi_connection, driver, facts


def _fresh(engine: Engine) -> Any:
    try:
        return engine.pool.recreate().connect()
    except Exception as error:
        if told := unreachable(engine, error):
            raise told from error
        raise


def judge(engine: Engine, facts: server.Facts, driver: Any, pooler: PoolerSetting) -> None:
    """Raise what is to be said against a session lock on this connection, which is idle at this moment."""
    driver_pid = _driver_pid(driver)
    other_pid = None
    if driver_pid != facts.backend_pid and pooler != "transaction":
        # Only a pooler in transaction mode serves a second client on the same backend.
        fairy = _fresh(engine)
        try:
            other = Connection(engine, connection=fairy)
            other.execution_options(isolation_level="AUTOCOMMIT")
            other_pid = server.backend_pid(other)
        finally:
            fairy.invalidate()
    if refusal := server.verdict(facts, driver_pid, pooler, other_pid):
        raise refusal


def _driver_pid(driver: Any) -> int:
    pid: int = driver.get_server_pid() if hasattr(driver, "get_server_pid") else driver.info.backend_pid
    return pid


def unreachable(engine: Engine, error: Exception) -> UnreachableError | None:
    """Return what an error from connecting means: no server; None when it is something else, e.g. a fault in a creator."""
    if isinstance(error, PgfenceError):
        return None
    state = sqlstate(error)
    dbapi: Any = engine.dialect.loaded_dbapi
    kinds = [OSError, TimeoutError, DBAPIError, dbapi.Error]
    if (asyncpg := getattr(dbapi, "asyncpg", None)) is not None:
        kinds += [asyncpg.PostgresError, asyncpg.InterfaceError]
    if state is None and not isinstance(error, tuple(kinds)):
        return None
    where = engine.url.render_as_string(hide_password=True)
    refused = state is not None and state[:2] in ("28", "3D", "42")
    reason = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
    advice = "Check user, password, database and pg_hba.conf" if refused else "Nothing is known about the lock"
    return UnreachableError(f"no session at {where}: {reason}. {advice}", sqlstate=state, retryable=not refused)


def lost_connection(engine: Engine, session: Session, error: BaseException) -> bool:
    """Say whether a statement failed because its connection ended."""
    if session.dead:
        return True
    state = sqlstate(error)
    if state is not None:
        return state[:3] == "57P" or state[:2] == "08"
    return isinstance(error, OSError) or type(error).__name__ in (
        "OperationalError",
        "InterfaceError",
        "ConnectionDoesNotExistError",
    )


def listened(engine: Engine) -> bool:
    """Say whether anybody wants to see our statements: hooks, tracing, echo."""
    dispatch = engine.dispatch
    return bool(dispatch.before_cursor_execute or dispatch.after_cursor_execute or engine._should_log_info())  # noqa: SLF001


def wrapped(engine: Engine, dbapi_connection: Any, *, reconnects: bool = True) -> Connection:
    """Return a SQLAlchemy Connection over a session of ours, by a pool that knows this one connection and closes nothing.

    `reconnects=False`: after a lost connection SQLAlchemy would otherwise go on, silently, with a new one without the lock.
    """
    pool = StaticPool(lambda: dbapi_connection, dialect=engine.dialect, reset_on_return=None)
    return Connection(engine, connection=pool.connect(), _allow_revalidate=reconnects)


R = TypeVar("R")
S = TypeVar("S", bound=Session)


class Turn(Generic[S]):
    """A place in the line for a connection."""

    __slots__ = ("given", "may_open", "wake")

    def __init__(self) -> None:
        self.given: S | None = None
        self.may_open = False
        self.wake: Callable[[], object] = lambda: None

    @property
    def served(self) -> bool:
        return self.may_open or self.given is not None


class Roster(Generic[S]):
    """How many connections one engine may have open, and which are free. Pure; the caller holds the mutex."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        """Open or being opened."""
        self.idle: list[S] = []
        self._line: deque[Turn[S]] = deque()

    def take(self) -> Turn[S]:
        """Return a turn: with a warm session, with the right to open one, or to wait for."""
        turn: Turn[S] = Turn()
        while self.idle and not self._line:
            session = self.idle.pop()
            if not session.dead:
                turn.given = session
                return turn
        if self.open < self.limit and not self._line:
            self.open += 1
            turn.may_open = True
        else:
            self._line.append(turn)
        return turn

    def give(self, session: S) -> bool:
        """Take a session back; False: it is one too many, the caller closes it and calls `gone`."""
        if session.dead or session.retired:
            return False
        if self._line:
            turn = self._line.popleft()
            turn.given = session
            turn.wake()
            return True
        if len(self.idle) >= WARM:
            return False
        session.idle_since = time.monotonic()
        self.idle.append(session)
        return True

    def gone(self) -> None:
        """One is closed, or could not be opened."""
        self.open -= 1
        if self._line and self.open < self.limit:
            self.open += 1
            turn = self._line.popleft()
            turn.may_open = True
            turn.wake()

    def forgo(self, turn: Turn[S]) -> None:
        """Leave the line without having been served."""
        with contextlib.suppress(ValueError):
            self._line.remove(turn)

    def cold(self, now: float) -> list[S]:
        """Take out the sessions that were idle for too long, or are dead."""
        cold = [s for s in self.idle if s.dead or now - s.idle_since > WARM_FOR]
        self.idle[:] = [s for s in self.idle if s not in cold]
        return cold

    def retire(self) -> list[S]:
        """Take out all idle sessions."""
        idle, self.idle[:] = list(self.idle), []
        return idle


def strange_backend() -> PoolerError:
    """Another server process answered than the one the connection began with; nothing was taken there."""
    return PoolerError(
        "another server process answered than the one this connection began with: a pooler in transaction mode stands in"
        " between. Give an engine with a direct URL as configure(engine, lock_engine=...)",
        mode="transaction",
    )


class Borrowed(Session):
    """The caller's own connection, for one lock: nothing is set on it, and it is closed only where a lock would stay on it."""

    ours = False

    def __init__(self, connection: Connection, dbapi_connection: Any, wire: Wire, facts: server.Facts) -> None:
        super().__init__(dbapi_connection, wire, facts)
        self.connection = connection
        limit = int(facts.settings.get("statement_timeout", "0")) / 1000
        if 0 < limit < 2 * self.slice:
            self.slice = 0.0  # the site would end a wait in the server: poll instead
        self.watch()
        event.listen(connection, "before_cursor_execute", self._guard)

    @staticmethod
    def fit(wire: Wire) -> None:
        """Refuse a connection on which a session lock cannot be taken as it is."""
        if wire.busy:
            raise TransactionStateError(
                "this connection is in pipeline mode, where an earlier error would hide whether the lock was taken: take"
                " the lock outside the pipeline"
            )
        if wire.in_transaction is not False:
            raise TransactionStateError(
                "a session lock must be taken outside a transaction: commit or roll back first, or use an AUTOCOMMIT"
                " connection, or AdvisoryLock(engine, ...).connect(), or TransactionLock for a lock that ends with it"
            )

    @staticmethod
    def known_facts(connection: Connection, dbapi_connection: Any) -> server.Facts | None:
        """Return what was learnt of this very connection before."""
        known: tuple[Any, server.Facts] | None = connection.info.get(_FACTS)
        return known[1] if known is not None and known[0] is dbapi_connection else None

    @staticmethod
    def learn(connection: Connection, dbapi_connection: Any, facts: server.Facts) -> None:
        """Keep with the pooled connection what one round trip told of it."""
        connection.info[_FACTS] = dbapi_connection, facts

    def _guard(self, connection: Connection, *_: Any) -> None:
        """SQLAlchemy reconnects after a lost connection without a word: refuse to go on there without the lock."""
        if connection.connection.dbapi_connection is not self.dbapi_connection:
            self.died(self.dead or "killed")
            hold = self.hold
            if hold is not None:
                raise hold.lost_error()

    def let_go(self) -> None:
        """Leave the connection to its owner, as it was."""
        if self.closed:
            return
        self.closed = True
        WATCHER.unwatch(self)
        _OPEN.discard(self)
        event.remove(self.connection, "before_cursor_execute", self._guard)

    def close(self) -> None:
        """End the caller's connection, for a lock would stay on it; SQLAlchemy learns that it is gone."""
        if self.closed:
            return
        self.let_go()
        self.dead = self.dead or "killed"
        with contextlib.suppress(Exception):
            self.wire.close()
        with contextlib.suppress(Exception):
            self.connection.invalidate()


_FACTS = "pgfence.facts"


async def in_greenlet(call: Callable[[], R]) -> R:
    """Run sync code of SQLAlchemy's over an async driver, on the calling task."""
    from sqlalchemy.util import greenlet_spawn

    result: R = await greenlet_spawn(call)
    return result
