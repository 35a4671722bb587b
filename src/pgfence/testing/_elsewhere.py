"""Hold locks as another contender, on a separate thread."""

from __future__ import annotations

import asyncio
import inspect
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from pgfence._api.contexts import SafeContext
from pgfence._api.handles import AsyncHeld, Held
from pgfence._api.locks import AsyncLockBase, LockBase
from pgfence.advisory import AdvisoryLock
from pgfence.config import configure
from pgfence.errors import LockLostError, LockNotHeldError
from pgfence.keys import LockKey
from pgfence.read_write import ReadWriteLock
from pgfence.testing._server import open_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import URL, Engine

    from pgfence.keys import Name

H = TypeVar("H", bound=Held)
AH = TypeVar("AH", bound=AsyncHeld)

PATIENCE = 10.0
"""Seconds that a helper waits for a lock. If the code under test holds the lock, the test fails and the error names it."""


class OtherThread:
    """A separate thread with an event loop. pgfence treats it as another contender, like a thread of another process."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pgfence-testing")
        self._runner: asyncio.Runner | None = None

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on the thread, run the coroutine if it returns one, and return the result."""
        return self._thread.submit(self._call, function, *args, **kwargs).result()

    def close(self) -> None:
        if self._runner is not None:
            self._thread.submit(self._runner.close).result()
        self._thread.shutdown()

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if inspect.iscoroutine(result):
            if self._runner is None:
                self._runner = asyncio.Runner()
            return self._runner.run(result)
        return result


@contextmanager
def hold_elsewhere(lock: LockBase[Any] | AsyncLockBase[Any]) -> Iterator[Any]:
    """Hold a lock as another contender until the end of the block, and yield its handle."""
    other = OtherThread()
    try:
        held = other.call(lock.acquire, timeout=PATIENCE)
        try:
            yield held
        finally:
            # A fault may have ended the hold.
            if held.state in ("held", "unknown"):
                with suppress(LockLostError, LockNotHeldError):
                    other.call(held.release)
    finally:
        other.close()


class Engines:
    """The engines of the helpers of one test run, one for each database and installation of tables."""

    def __init__(self) -> None:
        self._engines: dict[tuple[str, str | None, str], Engine] = {}

    def get(self, url: str | URL, schema: str | None = None, prefix: str = "pgfence_") -> Engine:
        """Return the engine for a database. It shares nothing with the engine of the code under test."""
        text = url if isinstance(url, str) else url.render_as_string(hide_password=False)
        key = text, schema, prefix
        if key not in self._engines:
            engine = self._engines[key] = open_engine(text)
            configure(engine, schema=schema, prefix=prefix)
        return self._engines[key]

    def close(self) -> None:
        for engine in self._engines.values():
            engine.dispose()


class PgfenceHolds(Protocol):
    """The type of the fixture `pgfence_holds`, which is a function that holds a lock as another contender.

    ::

        def test_report_is_skipped(engine: Engine, pgfence_holds: PgfenceHolds) -> None:
            with pgfence_holds("report") as held:
                assert write_report(engine) is None

    Call the fixture with names, or with one lock. It returns a context manager that yields the handle, and can be used in async
    tests too.

    Names are held as a session-level advisory lock, which excludes the `AdvisoryLock`, the `TransactionLock` and the
    `ReadWriteLock` of these names. A str is a name in the namespace of the test, if the test or one of its fixtures uses
    `pgfence_namespace`, and otherwise has no namespace. A LockKey contains its own namespace. With `shared=True`, one name is
    held in shared mode, as by a reader.

    A lock is an AdvisoryLock, a Lease, a Once, a Semaphore, the `read` or `write` of a ReadWriteLock, or the async counterpart of
    one of these. It is acquired on a separate thread, which pgfence treats as another contender.

    Entering the block raises LockTimeoutError if the lock does not become free within 10 s. The message names the holder.
    """

    @overload
    def __call__(self, lock: LockBase[H], /) -> AbstractContextManager[H, None]: ...
    @overload
    def __call__(self, lock: AsyncLockBase[AH], /) -> AbstractContextManager[AH, None]: ...
    @overload
    def __call__(self, *names: Name, shared: bool = False) -> AbstractContextManager[Held, None]: ...
    def __call__(self, *names: Any, shared: bool = False) -> AbstractContextManager[Any, None]:
        """Hold names, or a lock, inside a `with` block, and yield the handle."""
        ...


class Holds:
    """The fixture `pgfence_holds`."""

    def __init__(self, engine: Callable[[], Engine], namespace: str) -> None:
        self._engine = engine
        self._namespace = namespace

    def __call__(self, *names: Any, shared: bool = False) -> AbstractContextManager[Any, None]:
        return SafeContext(hold_elsewhere(self._build_lock(names, shared=shared)))

    def _build_lock(self, names: tuple[Any, ...], *, shared: bool) -> LockBase[Any] | AsyncLockBase[Any]:
        if len(names) == 1 and isinstance(names[0], (LockBase, AsyncLockBase)):
            return names[0]
        if not all(isinstance(name, (str, LockKey)) for name in names):
            raise TypeError(
                f"pgfence_holds takes names, or one lock that was created with an engine, not {', '.join(map(repr, names))}: for a"
                " TransactionLock, pass its names instead"
            )
        if not shared:
            return AdvisoryLock(self._engine(), *names, namespace=self._namespace)
        if len(names) != 1:
            raise ValueError("shared=True takes exactly one name")
        return ReadWriteLock(self._engine(), names[0], namespace=self._namespace).read
