"""One text of a test for four drivers: a world knows how to call what is under test, sync or async.

A contender is a thread (sync) or a task (async). `world.call` and `world.enter` go through a contender that the test has by
default; `world.contender()` gives others.

A test with `world` runs on every driver. It is for what a single driver can break: parameters, types, errors, cancellation.
Markers on the test or its module (`pytestmark`) narrow that:

- `one_driver`: psycopg, for rules of SQLAlchemy's sessions or of the server, whose text the async half shares.
- `twins`: one sync and one async driver, for a rule that no driver knows of.
- `every_driver`: all four after all, in a module of `one_driver` or `twins`.
- `matrix`: all rows of `parametrize` on the first driver, the first row on each other one.
- `sync_only`, `async_only`: what the other half does not have, such as cancellation.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence


NAMES = ("psycopg", "psycopg2", "psycopg_async", "asyncpg")
SYNC, ASYNC = NAMES[:2], NAMES[2:]
_SPREADS = {"every_driver": NAMES, "twins": ("psycopg", "asyncpg"), "one_driver": NAMES[:1]}


class ThreadPlace:
    """A contender of a sync world: one thread that makes all its calls, one after the other."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A daemon, so that a call that hangs fails its test and not the end of the run.
        threading.Thread(target=self._serve, daemon=True, name="contender").start()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function there and return its result. Cancelling the wait for it does not cancel the call."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def tell(method: Callable[[Any], None], value: Any) -> None:
            if not answer.done():
                method(value)

        def work() -> None:
            try:
                outcome = (answer.set_result, function(*args, **kwargs))
            except BaseException as error:
                outcome = (answer.set_exception, error)
            with suppress(RuntimeError):  # the test is over, nobody waits for it
                loop.call_soon_threadsafe(tell, *outcome)

        self._work.put(work)
        return await answer

    def close(self) -> None:
        self._work.put(None)


class CurrentTask:
    """A contender of an async world: the task that calls it."""

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function, await what it returns if that is a coroutine, and return the result."""
        return await _awaited(function(*args, **kwargs))

    def close(self) -> None:
        """Nothing is open."""


class TaskPlace:
    """A contender of an async world: one task that makes all its calls. Cancelling a call cancels it there."""

    def __init__(self) -> None:
        self._work: asyncio.Queue[Any] = asyncio.Queue()
        self._running: asyncio.Future[Any] | None = None
        self._task = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        while (work := await self._work.get()) is not None:
            await self._perform(*work)

    async def _perform(self, answer: asyncio.Future[Any], function: Callable[[], Any]) -> None:
        if answer.done():
            return
        self._running = answer
        try:
            answer.set_result(await _awaited(function()))
        except asyncio.CancelledError:
            self._task.uncancel()
            answer.cancel()
        except BaseException as error:
            answer.set_exception(error)
        finally:
            self._running = None

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function there and return its result."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._work.put_nowait((answer, partial(function, *args, **kwargs)))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if self._running is answer:
                self._task.cancel()
                await asyncio.wait([answer])
            else:
                answer.cancel()
            raise

    def close(self) -> None:
        self._work.put_nowait(None)


Place: TypeAlias = ThreadPlace | CurrentTask | TaskPlace


class Contender:
    """A thread or task that calls methods and enters context managers, always the same one."""

    def __init__(self, place: Place, *, is_async: bool) -> None:
        self._place = place
        self._is_async = is_async

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a sync or async function and return its result."""
        return await self._place.call(function, *args, **kwargs)

    @asynccontextmanager
    async def enter(self, manager: Any) -> AsyncIterator[Any]:
        """Enter a sync or async context manager, yield what it yields, and leave it."""
        enter, leave = ("__aenter__", "__aexit__") if self._is_async else ("__enter__", "__exit__")
        value = await self.call(getattr(manager, enter))
        try:
            yield value
        except BaseException as error:
            if not await self.call(getattr(manager, leave), type(error), error, error.__traceback__):
                raise
        else:
            await self.call(getattr(manager, leave), None, None, None)


class World(Contender):
    """A driver, and the sync or async half of the package that goes with it.

    Attributes:
        name: psycopg, psycopg2, psycopg_async or asyncpg.
        driver: as in a SQLAlchemy URL.
        is_async: which half it is.
        dsn: the database of this worker.
    """

    def __init__(self, name: str, dsn: str) -> None:
        self.name = name
        self.driver = name.removesuffix("_async")
        self.is_async = name in ASYNC
        self.dsn = dsn
        self._engines: list[Any] = []
        self._places: list[Place] = []
        super().__init__(self._open(CurrentTask if self.is_async else ThreadPlace), is_async=self.is_async)

    def _open(self, kind: Callable[[], Place]) -> Place:
        place = kind()
        self._places.append(place)
        return place

    @property
    def url(self) -> str:
        """The URL of the test database for this driver."""
        return self.url_of(self.dsn)

    def url_of(self, dsn: str) -> str:
        """Return a DSN as a URL for this driver."""
        return f"postgresql+{self.driver}://{dsn.split('://', 1)[1]}"

    def engine(self, *, dsn: str | None = None, **kwargs: Any) -> Any:
        """Return a new Engine or AsyncEngine, disposed of at the end of the test.

        Args:
            dsn: another database, server or role.
            **kwargs: for `create_engine`.
        """
        make = create_async_engine if self.is_async else create_engine
        engine = make(self.url_of(dsn or self.dsn), **kwargs)
        self._engines.append(engine)
        return engine

    def pick(self, sync: Any, asynchronous: Any) -> Any:
        """Return the one that belongs to this world, e.g. `world.pick(AdvisoryLock, AsyncAdvisoryLock)`."""
        return asynchronous if self.is_async else sync

    def contender(self) -> Contender:
        """Return another contender: a separate thread, or in async worlds the task that calls it."""
        return Contender(self._open(CurrentTask if self.is_async else ThreadPlace), is_async=self.is_async)

    def other(self) -> Contender:
        """Return a contender that is never the test itself: a separate thread or task."""
        return Contender(self._open(TaskPlace if self.is_async else ThreadPlace), is_async=self.is_async)

    async def close(self) -> None:
        """Dispose of the engines and end the threads and tasks."""
        for place in self._places:
            place.close()
        for engine in self._engines:
            await _awaited(engine.dispose())


def choose(items: Sequence[Any]) -> list[Any]:
    """Return those of the items of one test function that run: see the markers above.

    Raises:
        UsageError: the markers leave no driver.
    """
    chosen, seen = [], set()
    for item in items:
        driver = item.callspec.params.get("world") if hasattr(item, "callspec") else None
        # Items come row by row for each driver, so its first one has the first row of every `parametrize`.
        later_row = item.get_closest_marker("matrix") and driver in seen
        seen.add(driver)
        if driver is None or driver in _drivers(item)[: 1 if later_row else None]:
            chosen.append(item)
    if items and not chosen:
        raise pytest.UsageError(f"the markers of {items[0].nodeid} leave no driver")
    return chosen


def _drivers(item: pytest.Item) -> list[str]:
    if any("world" in mark.args[0] for mark in item.iter_markers("parametrize")):
        return [*NAMES]  # the test itself says on which
    spread = next(mark.name for mark in (*item.iter_markers(), pytest.mark.every_driver) if mark.name in _SPREADS)
    left_out = (
        *(SYNC if item.get_closest_marker("async_only") else ()),
        *(ASYNC if item.get_closest_marker("sync_only") else ()),
    )
    return [name for name in _SPREADS[spread] if name not in left_out]


async def _awaited(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
