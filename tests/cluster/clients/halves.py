"""One text of a client for threads and tasks.

A job is a coroutine. On a thread it is run by `run_sync` and blocks; on an event loop it is a task.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pgfence
from pgfence._process.coroutines import run_sync

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    Job = Callable[[], Coroutine[Any, Any, None]]

GRACE = 15.0
"""Seconds that the jobs have to end after the standard input was closed."""


class Half:
    """The sync or the async half of pgfence, with an engine.

    Attributes:
        engine: an Engine or AsyncEngine.
        sessions: a sessionmaker or async_sessionmaker.
        is_stopping: whether the jobs should end.
    """

    prefix = ""

    def __init__(self, engine: Any, sessions: Any) -> None:
        self.engine = engine
        self.sessions = sessions
        self.is_stopping = False

    def pick(self, name: str) -> Any:
        """Return the class of this half, e.g. Lease or AsyncLease."""
        return getattr(pgfence, f"{self.prefix}{name}")

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function or coroutine function, and return its result."""
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        raise NotImplementedError

    def enter(self, manager: Any) -> Any:
        """Return an async context manager for a sync or async one."""
        raise NotImplementedError

    def adapt(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        """Return a coroutine function as what the API of this half expects."""
        raise NotImplementedError

    def start(self, job: Job) -> None:
        """Run a job beside the others."""
        raise NotImplementedError

    def run(self, main: Job, stop: Callable[[int], None]) -> None:
        """Run the first job, which starts the others, until the standard input is closed; call `stop`, and end the process."""
        raise NotImplementedError


class SyncHalf(Half):
    """Jobs are threads."""

    def __init__(self, engine: Any, sessions: Any) -> None:
        super().__init__(engine, sessions)
        self._threads: list[threading.Thread] = []

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  # a thread must block

    @asynccontextmanager
    async def enter(self, manager: Any) -> AsyncIterator[Any]:
        with manager as value:
            yield value

    def adapt(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        return lambda *args, **kwargs: run_sync(function, *args, **kwargs)

    def start(self, job: Job) -> None:
        thread = threading.Thread(target=run_sync, args=(job,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def run(self, main: Job, stop: Callable[[int], None]) -> None:
        run_sync(main)
        sys.stdin.read()
        self.is_stopping = True
        until = time.monotonic() + GRACE
        for thread in [*self._threads]:
            thread.join(max(0.0, until - time.monotonic()))
        stop(sum(thread.is_alive() for thread in self._threads))
        os._exit(0)


class AsyncHalf(Half):
    """Jobs are tasks."""

    prefix = "Async"

    def __init__(self, engine: Any, sessions: Any) -> None:
        super().__init__(engine, sessions)
        self._tasks: list[asyncio.Task[None]] = []

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def enter(self, manager: Any) -> Any:
        return manager

    def adapt(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
        return function

    def start(self, job: Job) -> None:
        self._tasks.append(asyncio.create_task(job()))

    def run(self, main: Job, stop: Callable[[int], None]) -> None:
        asyncio.run(self._run(main, stop))

    async def _run(self, main: Job, stop: Callable[[int], None]) -> None:
        await main()
        await asyncio.to_thread(sys.stdin.read)
        self.is_stopping = True
        _, alive = await asyncio.wait(self._tasks, timeout=GRACE)
        stop(len(alive))
        os._exit(0)
