"""`AsyncReadWriteLock`: reader/writer locks for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pgfence._api.handles import AsyncHeld
from pgfence._api.inputs import HELD_ON_OWN_CONNECTION, check_async_engine_source
from pgfence._locks.downgrade import downgrade
from pgfence._sql.read_write import ReadSql, WriteSql
from pgfence.advisory._aio import AsyncAdvisoryLock

if TYPE_CHECKING:
    from pgfence._api.locks import AsyncLockBase
    from pgfence._locks.manager import LockManager, SessionHold
    from pgfence._sql.params import ParamStyle
    from pgfence.advisory._aio import AsyncEngineSource
    from pgfence.keys import LockKey, Name


class AsyncWriteHeld(AsyncHeld):
    """A writer's lock that is held; see `AsyncHeld`."""

    __slots__ = ()

    async def downgrade(self) -> AsyncHeld:
        """Replace the write lock with the read lock, and return the handle of the read lock.

        Guarantees and errors are the same as for `WriteHeld.downgrade`.
        """
        return await downgrade(cast("LockManager", self._manager), cast("SessionHold", self._hold), AsyncHeld)


class _AsyncReadLock(AsyncAdvisoryLock[AsyncHeld]):
    """The shared lock of a name."""

    _public_name = "AsyncReadWriteLock.read"
    _counterpart = "ReadWriteLock"

    def _build_sql(self, keys: tuple[LockKey, ...], style: ParamStyle) -> ReadSql:
        return ReadSql(keys, style)


class _AsyncWriteLock(AsyncAdvisoryLock[AsyncHeld]):
    """The exclusive lock of a name."""

    _public_name = "AsyncReadWriteLock.write"
    _counterpart = "ReadWriteLock"

    def _build_sql(self, keys: tuple[LockKey, ...], style: ParamStyle) -> WriteSql:
        return WriteSql(keys, style)

    def _handle(self, manager: LockManager, hold: SessionHold) -> AsyncWriteHeld:
        return AsyncWriteHeld(manager, hold)


class AsyncReadWriteLock:
    """Admit many readers or one writer of a name at a time, across processes; see `ReadWriteLock`.

    Guarantees, limitations, arguments and errors are the same as for `ReadWriteLock`, except that the engine is an AsyncEngine.
    """

    def __init__(self, engine: AsyncEngineSource, name: Name, *, namespace: str | None = None) -> None:
        check_async_engine_source(engine, "AsyncReadWriteLock", HELD_ON_OWN_CONNECTION)
        self._read = _AsyncReadLock(engine, name, namespace=namespace)
        self._write = _AsyncWriteLock(engine, name, namespace=namespace)

    @property
    def read(self) -> AsyncLockBase[AsyncHeld]:
        """The lock of readers, with `try_acquire`, `acquire`, `hold`, `wrap`, `holders` and `is_held`."""
        return self._read

    @property
    def write(self) -> AsyncLockBase[AsyncWriteHeld]:
        """The lock of writers, with the same methods as `read`. Its handle can be downgraded."""
        return cast("AsyncLockBase[AsyncWriteHeld]", self._write)

    def __repr__(self) -> str:
        return f"<AsyncReadWriteLock {self._read._labels[0]!r}>"
