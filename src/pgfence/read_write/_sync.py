"""`ReadWriteLock`: reader/writer locks for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pgfence._api.handles import Held
from pgfence._api.inputs import HELD_ON_OWN_CONNECTION, check_engine_source
from pgfence._locks.downgrade import downgrade
from pgfence._process.coroutines import run_sync
from pgfence._sql.read_write import ReadSql, WriteSql
from pgfence.advisory._sync import AdvisoryLock

if TYPE_CHECKING:
    from pgfence._api.locks import LockBase
    from pgfence._locks.manager import LockManager, SessionHold
    from pgfence._sql.params import ParamStyle
    from pgfence.advisory._sync import EngineSource
    from pgfence.keys import LockKey, Name


class WriteHeld(Held):
    """A writer's lock that is held; see `Held`."""

    __slots__ = ()

    def downgrade(self) -> Held:
        """Replace the write lock with the read lock, and return the handle of the read lock.

        The handle of the write lock is then released. No other writer gets the lock in between. Other readers are admitted from
        then on.

        Raises:
            LockLostError: the lock was lost.
            LockNotHeldError: the handle was released, or this is a forked child.
        """
        return run_sync(downgrade, cast("LockManager", self._manager), cast("SessionHold", self._hold), Held)


class _ReadLock(AdvisoryLock[Held]):
    """The shared lock of a name."""

    _public_name = "ReadWriteLock.read"
    _counterpart = "AsyncReadWriteLock"

    def _build_sql(self, keys: tuple[LockKey, ...], style: ParamStyle) -> ReadSql:
        return ReadSql(keys, style)


class _WriteLock(AdvisoryLock[Held]):
    """The exclusive lock of a name."""

    _public_name = "ReadWriteLock.write"
    _counterpart = "AsyncReadWriteLock"

    def _build_sql(self, keys: tuple[LockKey, ...], style: ParamStyle) -> WriteSql:
        return WriteSql(keys, style)

    def _handle(self, manager: LockManager, hold: SessionHold) -> WriteHeld:
        return WriteHeld(manager, hold)


class ReadWriteLock:
    """Admit many readers or one writer of a name at a time, across processes.

    ::

        lock = ReadWriteLock(engine, "config")
        with lock.read.hold(timeout=5):
            read_config()
        with lock.write.hold(timeout=5):
            write_config()

    The lock is a session-level advisory lock, shared for readers and exclusive for the writer. A writer excludes, and is excluded
    by, an `AdvisoryLock` or `TransactionLock` of the same name. Readers exclude these locks too, except a `TransactionLock` with
    `shared=True`.

    Guarantees: those of `AdvisoryLock`. A writer cannot be starved: once it waits, readers of any process that arrive later wait
    behind it. All writers that wait for the same readers are served one after the other, before the next readers; a writer that
    arrives while another one holds the lock is served after the readers that are already waiting.

    Limitations: those of `AdvisoryLock`. Within the first half second of a reader's wait, the order between processes is not
    guaranteed. Clients that lock the same key by other means, in shared mode, do not wait behind a writer. A reader cannot become
    a writer, and cannot acquire the read lock twice; waiting for either raises SelfDeadlockError.

    Args:
        engine: an Engine, or a function that returns one.
        name: one name or LockKey.
        namespace: replaces the configured namespace, for a name that is a str.

    Raises:
        TypeError: `engine` is a different kind of object, such as a Session or a Connection; or the name is neither a str nor a
            LockKey.
        ValueError: the name is not usable.
    """

    def __init__(self, engine: EngineSource, name: Name, *, namespace: str | None = None) -> None:
        check_engine_source(engine, "ReadWriteLock", HELD_ON_OWN_CONNECTION)
        self._read = _ReadLock(engine, name, namespace=namespace)
        self._write = _WriteLock(engine, name, namespace=namespace)

    @property
    def read(self) -> LockBase[Held]:
        """The lock of readers, with `try_acquire`, `acquire`, `hold`, `wrap`, `holders` and `is_held`."""
        return self._read

    @property
    def write(self) -> LockBase[WriteHeld]:
        """The lock of writers, with the same methods as `read`. Its handle can be downgraded."""
        return cast("LockBase[WriteHeld]", self._write)

    def __repr__(self) -> str:
        return f"<ReadWriteLock {self._read._labels[0]!r}>"
