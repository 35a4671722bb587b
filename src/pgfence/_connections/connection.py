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
import threading
import time
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, event

from pgfence._holds.wait_plan import slice_for
from pgfence._process.lifecycle import PROCESS
from pgfence._process.monitor import HAS_HANGUP, MONITOR, SocketId, socket_id
from pgfence.errors import TransactionStateError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.pool import ConnectionPoolEntry

    from pgfence._connections.drivers import DriverConnection
    from pgfence._holds.hold import Hold
    from pgfence._sql import server
    from pgfence.errors import LossReason

KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 20_000}
STATEMENT_BUDGET = 30.0
"""Seconds after which a statement is given up on a server that does not respond, unless the caller's deadline is earlier."""
RELEASE_BUDGET = 5.0
"""Seconds for a statement whose caller does not wait: a release, a try, and what ends after the caller's deadline."""
WAIT_GRACE = 2.0
PROBE_EVERY = 10.0
WARM_FOR = 30.0


class ConnectionGoneError(Exception):
    """The connection ended under a statement that cannot have left a lock behind. Never reaches a caller."""


class LockConnection(ABC):
    """What both worlds know of one connection of ours, or of one that the caller lent."""

    ours = True
    """False: the caller's own connection. We set nothing on it, close it only when a lock would stay on it, and keep it out
    of the roster."""

    def __init__(self, dbapi_connection: Any, wire: DriverConnection, facts: server.ServerInfo) -> None:
        self.dbapi_connection = dbapi_connection
        self.wire = wire
        self.know(facts)
        self.hold: Hold[Any] | None = None
        self.lent = False
        """The user's code runs on it (`connect()`): it may be told dead, but no statement of ours goes in between."""
        self.dead: LossReason | None = None
        self.closed = False
        self.close_after_use = False
        """Not to be kept after its use."""
        self.counts = True
        """Whether it is one of the `max_lock_connections`."""
        self.dup = -1
        self.socket: SocketId | None = None
        """Which socket it speaks through."""
        self.since = 0.0
        """When the running statement was sent; 0: none runs."""
        self.limit = STATEMENT_BUDGET
        self.idle_since = time.monotonic()
        self.probed = self.idle_since
        self.handoffs = 0
        self.granted_at = 0.0
        self.token = 0
        """What came with the last grant, of a lock that brings one."""
        self.on_death: Callable[[Hold[Any] | None], object] | None = None

    def know(self, facts: server.ServerInfo) -> None:
        """Store the facts about the server and this session."""
        self.pid = facts.backend_pid
        self.slice = slice_for(facts.deadlock_timeout)
        if 0 < facts.statement_timeout < 2 * self.slice:
            self.slice = 0.0  # the site would end a wait in the server: poll instead
        self.facts = facts

    direct = True
    """Statements may go straight to the driver's connection as it is."""
    spoiled = False
    """Whether the lock cannot be given back at this moment."""

    def cold(self, now: float) -> bool:
        """Whether it is not worth keeping, idle as it is."""
        return self.dead is not None or now - self.idle_since > WARM_FOR

    def watch(self) -> None:
        fd = self.wire.fileno()
        if fd >= 0:
            self.socket = socket_id(fd)
            if self.ours:
                keep_alive(fd)
        MONITOR.watch(self, fd)
        _OPEN.add(self)

    def died(self, reason: LossReason) -> None:
        """Tell everybody that the session is over: on the watcher's thread, or wherever it was found out."""
        if self.dead is None:
            self.dead = reason
        hold = self.hold
        lost = hold is not None and hold.lose(self.dead)
        if self.on_death is not None:
            self.on_death(hold if lost else None)

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
            hold.in_doubt = True
        if paused or (not HAS_HANGUP and now - self.probed > PROBE_EVERY):
            self.probed = now
            self.probe(hold)

    @abstractmethod
    def probe(self, hold: Hold[Any]) -> None:
        """Ask the server whether the session lives, without waiting for the answer here."""

    def cut(self) -> None:
        """Give up on a server that does not answer: the statement under way fails, the hold is lost."""
        self.dead = self.dead or "cut off"
        MONITOR.shut_down(self)
        self.died("cut off")

    def close(self) -> None:
        """End the connection. Only for its owner: never while another thread is in a statement on it."""
        PROCESS.notice_fork()  # in a forked child this must not end the session of the parent
        if self.closed:
            return
        self.dead = self.dead or "killed"
        try:
            MONITOR.unwatch(self)
        finally:
            _OPEN.discard(self)
            with contextlib.suppress(Exception):
                self.wire.close()
        self.closed = True

    def begin(self, limit: float) -> None:
        """Note that a statement is sent. Its end is `since = 0.0`: a call there could be interrupted, and the note would stay."""
        self.limit = limit
        self.since = time.monotonic()


_OPEN: weakref.WeakSet[LockConnection] = weakref.WeakSet()
_LEAKED_AFTER_FORK: list[Any] = []


def _forget_in_child() -> None:
    """Cut a forked child off: its goodbye would end the parent's session, its copy of the socket keep a dead parent's lock."""
    sessions = list(_OPEN)
    _LEAKED_AFTER_FORK.extend(
        sessions
    )  # finalising a driver's connection here could still speak, warn or touch the loop
    null = os.open(os.devnull, os.O_RDWR)
    for session in sessions:
        with contextlib.suppress(Exception):
            fd = session.wire.fileno()
            if session.socket == socket_id(
                fd
            ):  # the child may have closed it long ago, and something else has its number
                os.dup2(null, fd)
        session.dup = -1
    os.close(null)
    _OPEN.clear()
    MONITOR.forget()


PROCESS.renew_in_child(_forget_in_child)


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


class CallerConnection(LockConnection):
    """The caller's own connection, for one lock: nothing is set on it, and it is closed only where a lock would stay on it."""

    ours = False
    direct = False

    def __init__(
        self, connection: Connection, dbapi_connection: Any, wire: DriverConnection, facts: server.ServerInfo
    ) -> None:
        super().__init__(dbapi_connection, wire, facts)
        self.connection = connection
        self._fairy = connection.connection
        self._ending = threading.RLock()
        """Held while the driver's connection is closed, so that the pool does not give it to another user."""
        self._with_it: list[CallerConnection] = connection.info.setdefault(_LOCKS, [])
        self._with_it.append(self)
        pool = getattr(self._fairy, "_pool", connection.engine.pool)  # before a dispose() it was another one
        if _returned not in tuple(pool.dispatch.checkin):  # event.contains() overlooks what dispose() has copied
            event.listen(pool, "checkin", _returned)
        self.watch()
        event.listen(connection, "before_cursor_execute", self._guard)

    @staticmethod
    def fit(connection: Connection, dbapi_connection: Any, wire: DriverConnection) -> None:
        """Refuse a connection on which a session lock cannot be taken as it is."""
        if wire.busy:
            raise TransactionStateError(
                "this connection is in pipeline mode, where an earlier error would hide whether the lock was taken: take"
                " the lock outside the pipeline"
            )
        if in_transaction(connection, dbapi_connection, wire):
            raise TransactionStateError(
                "a session lock must be taken outside a transaction: commit or roll back first, or use an AUTOCOMMIT"
                " connection, or AdvisoryLock(engine, ...).connect(), or TransactionLock for a lock that ends with it"
            )

    @staticmethod
    def known_facts(connection: Connection, dbapi_connection: Any) -> server.ServerInfo | None:
        """Return what was learnt of this very connection before."""
        known: tuple[Any, server.ServerInfo] | None = connection.info.get(_FACTS)
        return known[1] if known is not None and known[0] is dbapi_connection else None

    @staticmethod
    def learn(connection: Connection, dbapi_connection: Any, facts: server.ServerInfo) -> None:
        """Keep with the pooled connection what one round trip told of it."""
        connection.info[_FACTS] = dbapi_connection, facts

    def forgo(self) -> None:
        """Leave the connection to its owner after a first statement that failed; if it was cut off, close it."""
        if self.dead is None:
            self.let_go()
        else:
            self.close()

    def _guard(self, connection: Connection, *_: Any) -> None:
        """SQLAlchemy reconnects after a lost connection without a word: refuse to go on there without the lock."""
        if connection.connection.dbapi_connection is not self.dbapi_connection:
            self.died(self.dead or "killed")
            hold = self.hold
            if hold is not None:
                raise hold.lost_error()

    @property
    def attached(self) -> bool:
        """Whether the driver's connection is still that of the caller's Connection, and of no other user."""
        connection = self.connection
        if self.closed or connection.closed or connection.invalidated:
            return False
        return connection.connection.dbapi_connection is self.dbapi_connection

    def expect_attached(self) -> None:
        """Raise before a statement that would reach another user of the driver's connection."""
        if not self.attached:
            self.dead = self.dead or "returned"
            raise ConnectionGoneError("the Connection was closed")

    @property
    def spoiled(self) -> bool:  # type: ignore[override]
        """Whether the lock cannot be given back at this moment, for a transaction is open."""
        return self.dead is None and self.attached and in_transaction(self.connection, self.dbapi_connection, self.wire)

    @property
    def shared(self) -> bool:
        """Whether another Connection was closed, and the caller's still has the driver's connection (StaticPool)."""
        return bool(getattr(self._fairy, "_counter", 0))

    def returned(self, record: ConnectionPoolEntry) -> None:
        """End the lock, because the Connection is given back: the pool opens another one for its next user."""
        with self._ending:
            if self.closed:
                return
            self.let_go()
            self.dead = self.dead or "returned"
            with contextlib.suppress(Exception):
                self.wire.close()
        # An async driver would be awaited: a cancel there would cost the pool a place.
        record.invalidate(soft=self.connection.dialect.is_async)
        self.died(self.dead)

    def let_go(self, *, listed: bool = False) -> None:
        """Leave the connection to its owner, as it was; `listed`: the pool still waits for what comes next here."""
        if self.closed:
            return
        self.closed = True
        if not listed:
            self._unlist()
        MONITOR.unwatch(self)
        _OPEN.discard(self)
        event.remove(self.connection, "before_cursor_execute", self._guard)

    def _unlist(self) -> None:
        if self in self._with_it:
            self._with_it.remove(self)

    def close(self) -> None:
        """End the caller's connection, for a lock would stay on it; SQLAlchemy learns that it is gone."""
        PROCESS.notice_fork()
        with self._ending:
            attached = self.attached
            self.let_go(listed=attached)  # a check-in by another thread waits until the driver's connection is closed
            self.dead = self.dead or "killed"
            if attached:
                with contextlib.suppress(Exception):
                    self.wire.close()
                with contextlib.suppress(Exception):
                    self.invalidate()
                self._unlist()

    def invalidate(self) -> None:
        """Tell SQLAlchemy that the connection is gone."""
        self.connection.invalidate()


def in_transaction(connection: Connection, dbapi_connection: Any, wire: DriverConnection) -> bool:
    """Whether a transaction is open: by the driver's word; or by SQLAlchemy's, whose begin() sends nothing at first."""
    return wire.in_transaction is not False or (connection.in_transaction() and not dbapi_connection.autocommit)


_FACTS = "pgfence.facts"
_LOCKS = "pgfence.locks"


def _returned(_: Any, record: ConnectionPoolEntry) -> None:
    """Called by a pool when a connection comes back: a lock must not go with it to the next user."""
    for session in list(record.info.get(_LOCKS, ())):
        if not session.shared:
            session.returned(record)
