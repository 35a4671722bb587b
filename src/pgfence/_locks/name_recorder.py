"""Store the names of locks that are held on the application's own connections, on a connection of pgfence.

Such a lock is acquired on the caller's connection, often in the caller's transaction, so nothing else is sent on that connection.
Instead, a thread looks once a second at the transactions of this process that have acquired locks, and stores the names of locks
whose transaction it has seen before. Most transactions are shorter, and storing a name for each of them would cost more than the
lock. The thread ends after ten seconds without such a transaction, and its connection is open only while it stores names.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from contextlib import closing, suppress
from typing import TYPE_CHECKING, TypeAlias

from sqlalchemy.pool import StaticPool

from pgfence._connections.background import choose_background_connection
from pgfence._holds.registry import ManagerRegistry
from pgfence._locks.errors import build_collision_error
from pgfence._process import threads
from pgfence._process.callbacks import log
from pgfence._process.clock import clock
from pgfence._process.lifecycle import PROCESS, on_disposed
from pgfence._sql.lock_names import list_new_names, note_sql, record_names
from pgfence._sql.params import style_of
from pgfence._sql.pipeline import find_driver
from pgfence._sql.storage import table_names_of
from pgfence.config import config_of
from pgfence.errors import PgfenceError
from pgfence.keys import LockKey, unqualify_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine import RootTransaction

    from pgfence._connections.background import BackgroundConnection
    from pgfence._sql.savepoints import TransactionRecord
    from pgfence._sql.storage import TableNames

    Granted: TypeAlias = tuple[Engine, Sequence[LockKey], object]
    """A granted lock: its engine, its keys, and the driver's connection that acquired it."""

TICK = 1.0
"""Seconds from one look to the next."""
BETWEEN = 5.0
"""Seconds from the closing of one connection to the opening of the next."""
LINGER = 10.0
"""Seconds without any work after which the thread ends."""
PAUSE = 300.0
"""Seconds from a failed attempt to store names to the next attempt."""
LIMIT = 5.0
"""Seconds that one statement may take."""
MOST_PENDING = 1_000
"""The number of granted locks that are kept until the next look. Older locks are dropped."""


class WatchedConnection:
    """A connection of the application whose transactions acquire locks."""

    __slots__ = ("_transaction", "driver", "engine")

    def __init__(self, connection: Connection) -> None:
        self.engine = connection.engine
        # Not a weak reference, because not every driver's connection allows one: a connection of an asyncpg pool does not.
        self.driver: object = find_driver(connection.dialect, connection.connection)
        self._transaction: weakref.ref[RootTransaction] | None = None

    def list_held(self, record: TransactionRecord) -> list[LockKey]:
        """Return the keys that the connection holds, if its transaction is the same as at the previous call."""
        before = self._transaction
        self._transaction, keys = record.find_open()
        if self._transaction is None or self._transaction is not before:
            return []
        return [key for key in keys if isinstance(key, LockKey)]


class NameRecorder:
    """Stores the names of the locks that one process holds on connections of its application.

    The methods that a caller's thread uses send nothing and never wait.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pid = PROCESS.pid
        self.collisions: dict[int, str] = {}
        """The keys that, as the server has reported, belong to another name, with that name."""
        self._watched: weakref.WeakKeyDictionary[TransactionRecord, WatchedConnection] = weakref.WeakKeyDictionary()
        """The watched connections. The entry of a connection disappears with the record of its Connection object."""
        self._granted: deque[Granted] = deque(maxlen=MOST_PENDING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ends_at = 0.0
        """The time at which the thread ends if it has no work."""
        self._changed = threading.Event()
        """Set when the interpreter exits or the engine is disposed of, so that the thread runs immediately."""
        self._opens_at = 0.0
        """The time before which no connection is opened."""
        self._paused_until = self._find_obstacle()
        """The time before which no thread is started."""
        on_disposed(engine, self._on_engine_disposed)
        threads.register(self)

    def _find_obstacle(self) -> float:
        # The only connection of a StaticPool is in use by the caller. Without native threads, nothing can run in the
        # background.
        try:
            threads.require_native_threads()
        except PgfenceError:
            return math.inf
        return math.inf if isinstance(self.engine.pool, StaticPool) else 0.0

    def watch(self, connection: Connection, record: TransactionRecord) -> None:
        """Watch a connection, and store the names of the locks that its transactions hold for long."""
        if record not in self._watched:
            self._watched[record] = WatchedConnection(connection)
        self._ensure_thread()

    def add(self, engine: Engine, keys: Sequence[LockKey], driver: object) -> None:
        """Queue the names of a lock that was granted on a driver's connection, to be stored at the next look."""
        self._granted.append((engine, keys, driver))
        self._ensure_thread()

    def reject_collisions(self, keys: Iterable[LockKey]) -> None:
        """Raise KeyCollisionError for a key that, as this process has found out, belongs to another name."""
        for key in keys if self.collisions else ():
            if key.name is not None and (other := self.collisions.get(key.value)) is not None:
                raise build_collision_error((key.name,), other)

    def _ensure_thread(self) -> None:
        if self._thread is not None:
            return
        if clock() < self._paused_until or PROCESS.ending:
            self._granted.clear()
            return
        with self._lock:
            if self._thread is None:
                self._ends_at = clock() + LINGER
                try:
                    self._thread = threads.start("pgfence-names", self._run)
                except RuntimeError:  # the process can start no more threads
                    self._paused_until = clock() + PAUSE

    def _run(self) -> None:
        try:
            while not self._end_if_idle():
                self._changed.wait(TICK)
                self._changed.clear()
                if not PROCESS.ending:
                    self._look()
        except BaseException:
            # For example, an error of the application's logging handler. The next lock starts another thread.
            self._thread = None
            raise

    def _end_if_idle(self) -> bool:
        """Return whether the thread ends, because it has no work or the process exits. The next lock then starts another thread."""
        now = clock()
        if PROCESS.ending:
            return True
        if now >= self._paused_until:
            if self._watched or self._granted:
                self._ends_at = now + LINGER
            if now < self._ends_at:
                return False
        with self._lock:
            self._thread = None
            if now < self._paused_until or not (self._watched or self._granted):
                return True
            # A caller added a lock while this thread still counted as running, so no other thread was started.
            self._thread = threading.current_thread()
            return False

    def _look(self) -> None:
        """Store the names of granted locks. For a transaction's locks, the previous look must have seen the same transaction."""
        granted: list[Granted] = []
        in_use: list[object] = []
        for reference in self._watched.keyrefs():
            if (record := reference()) is not None and (one := self._watched.get(record)) is not None:
                in_use.append(one.driver)
                if keys := one.list_held(record):
                    granted.append((one.engine, keys, one.driver))
        if clock() < self._opens_at:
            return
        with suppress(IndexError):  # other threads may append to the queue, or clear it, in the meantime
            while True:
                granted.append(self._granted.popleft())
        self._store(granted, in_use)

    def _store(self, granted: Iterable[Granted], in_use: Collection[object]) -> None:
        """Store the names that are not stored yet, with one connection for each installation."""
        missing: dict[TableNames, tuple[Engine, list[dict[int, str]]]] = {}
        drivers = [*in_use]
        for engine, keys, driver in granted:
            drivers.append(driver)
            place = table_names_of(engine)
            new = list_new_names(engine.dialect, place, [key for key in keys if key.value not in self.collisions])
            if new:
                missing.setdefault(place, (engine, []))[1].append(new)
        for place, (engine, locks) in missing.items():
            try:
                with closing(choose_background_connection(engine, config_of(engine), lambda *_: None)) as link:
                    link.in_use = drivers
                    link.open()
                    if link.session is None or not link.session.facts.has_names:
                        raise LookupError("the table of names does not exist, or this role may not write to it")
                    for names in locks:
                        if PROCESS.ending:
                            return
                        self._store_names(link, place, names)
            except Exception as error:
                # Only operators need names, so an error must not reach the application. A server that is unreachable, full or a
                # standby may stay in that state, so the next attempt is made only after `PAUSE` seconds.
                self._paused_until = clock() + PAUSE
                self._granted.clear()
                log.debug("the names of locks cannot be stored: %s", error)
            self._opens_at = clock() + BETWEEN

    def _store_names(self, link: BackgroundConnection, place: TableNames, names: dict[int, str]) -> None:
        dialect = self.engine.dialect
        # Each statement stores the names of one lock, so that a collision can be attributed to that lock.
        other: str | None = link.ask(note_sql(place, style_of(dialect)), (list(names), list(names.values())), LIMIT)
        if other is None:
            record_names(dialect, place, names)
            return
        # The holder cannot be interrupted from this thread, so the next call raises the error.
        self.collisions.update(dict.fromkeys(names, other))
        shown = ", ".join(repr(unqualify_name(name)) for name in names.values())
        log.warning(
            "a 64-bit key of the lock on %s is also the key of the lock name %r: the next use of these names in this process raises"
            " KeyCollisionError",
            shown,
            unqualify_name(other),
        )

    def _on_engine_disposed(self, _: Engine) -> None:
        """Forget the locks and end the thread, because a disposed engine should not open another connection."""
        if self.pid == PROCESS.pid:
            self._watched.clear()
            self._granted.clear()
            self._ends_at = 0.0
            self._changed.set()

    def end(self, seconds: float) -> None:
        """End the thread when the interpreter exits, and wait for up to `seconds`. Pending names are not stored."""
        self._changed.set()
        if (thread := self._thread) is not None:
            thread.join(seconds)


def recorder_of(engine: Engine) -> NameRecorder:
    """Return the recorder of an engine in this process. For an async engine, pass its `sync_engine`."""
    return ManagerRegistry.for_process(engine, "names", NameRecorder, lambda: NameRecorder(engine))
