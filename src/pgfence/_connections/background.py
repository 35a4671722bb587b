"""Connections of background threads. Each has one thread, which opens, uses and closes it, and waits for notifications on it."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import socket
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

from pgfence._connections.connect import open_connection
from pgfence._connections.connection_async import AsyncLockConnection
from pgfence._connections.connection_sync import SyncLockConnection
from pgfence._connections.drivers import choose_driver_connection
from pgfence._holds.carriers import run_in_greenlet
from pgfence._process.coroutines import run_sync
from pgfence._process.lifecycle import PROCESS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from sqlalchemy import Engine

    from pgfence._connections.connection import LockConnection
    from pgfence._connections.drivers import Heard
    from pgfence._process.coroutines import Coro
    from pgfence.config import Config

R = TypeVar("R")


class BackgroundConnection(ABC):
    """One connection, used by one thread. Other threads may only call `wake` and `abort`."""

    session: LockConnection | None = None
    in_use: Collection[object] = ()
    """Driver connections of the application, in case the engine's creator returns one of them again."""

    def __init__(self, engine: Engine, config: Config, on_notify: Heard) -> None:
        self.engine = engine
        self.config = config
        self.on_notify = on_notify

    @property
    def live(self) -> bool:
        """Whether the connection is open and not known to be dead."""
        return self.session is not None and self.session.dead is None

    @property
    def can_listen(self) -> bool:
        """Whether LISTEN works. It does not work through a pooler that may switch the server connection."""
        return self.session is not None and (not self.session.driver.pooled or self.config.pooler == "session")

    def configure(self, session: LockConnection) -> None:
        """Prepare a new connection: detect a pooler, and watch the socket."""
        driver = session.driver
        driver.pooled = self.config.pooler in ("session", "transaction") or driver.pid != session.facts.backend_pid
        session.on_death = lambda _: self.wake()
        session.watch()

    def abort(self) -> None:
        """Abort the running statement, so that the thread that waits for it gets an error."""
        if self.session is not None:
            self.session.abort()

    @abstractmethod
    def open(self) -> None:
        """Open the connection, after closing an earlier one."""

    @abstractmethod
    def ask(self, text: str, args: Sequence[object], limit: float) -> Any:
        """Run a statement and return the first column of its only row. The monitor aborts it after `limit` seconds."""

    @abstractmethod
    def listen(self, text: str, channel: str, *, on: bool) -> None:
        """Run a LISTEN or UNLISTEN statement."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until another thread calls `wake`, or a notification arrives and is passed on, but at most `seconds`."""

    @abstractmethod
    def wake(self) -> None:
        """End the current wait, or the next one."""

    @abstractmethod
    def close_connection(self) -> None:
        """Close the connection, if it is open."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection and everything else that belongs to the thread. The thread then ends."""


class SyncBackgroundConnection(BackgroundConnection):
    def __init__(self, engine: Engine, config: Config, on_notify: Heard) -> None:
        super().__init__(engine, config, on_notify)
        self._driver_kind = choose_driver_connection(engine.dialect)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)

    def open(self) -> None:
        self.close_connection()
        while self.session is None:
            forks = PROCESS.forks
            opened, driver, facts = open_connection(
                self.engine, self.config.pooler, any_pooler=True, in_use=self.in_use
            )
            session = SyncLockConnection(opened, self._driver_kind(driver), facts)
            self.configure(session)
            session.driver.on_notify(self.on_notify)
            if forks == PROCESS.forks:  # otherwise a forked child has a copy of the socket
                self.session = session
            else:
                session.close()

    def ask(self, text: str, args: Sequence[object], limit: float) -> Any:
        assert self.session is not None
        answer = run_sync(self.session.fetch_value, self.engine, text, args, limit=limit)
        self._poll_notifies(self.session)
        return answer

    def listen(self, text: str, channel: str, *, on: bool) -> None:
        assert self.session is not None
        run_sync(self.session.driver.listen, text, channel, on=on)
        self._poll_notifies(self.session)

    def wait(self, seconds: float) -> None:
        session = self.session if self.live else None
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_reader, selectors.EVENT_READ)
            if session is not None:
                selector.register(session.driver.fileno(), selectors.EVENT_READ)
            selector.select(seconds)
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        if session is not None:
            self._poll_notifies(session)

    def _poll_notifies(self, session: LockConnection) -> None:
        try:
            session.driver.poll_notifies()
        except Exception:
            session.on_connection_lost("killed")

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # the buffer is full of wake-ups already, or the socket is closed
            self._wake_writer.send(b"!")

    def close_connection(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.on_death = None
            session.close()

    def close(self) -> None:
        self.close_connection()
        self._wake_reader.close()
        self._wake_writer.close()


class AsyncBackgroundConnection(BackgroundConnection):
    """A background connection over an async driver, on a private event loop."""

    def __init__(self, engine: Engine, config: Config, on_notify: Heard) -> None:
        super().__init__(engine, config, on_notify)
        self._driver_kind = choose_driver_connection(engine.dialect)
        # The loop is private to the background thread, so that a blocked event loop of the application cannot delay a renewal.
        self._loop = asyncio.SelectorEventLoop()
        self._wake_reader = asyncio.Event()

    def _run(self, work: Coro[R]) -> R:
        return self._loop.run_until_complete(work)

    def open(self) -> None:
        self.close_connection()
        self._run(self._open())

    async def _open(self) -> None:
        engine, pooler = self.engine, self.config.pooler
        while self.session is None:
            forks = PROCESS.forks
            opened, driver, facts = await run_in_greenlet(
                lambda: open_connection(engine, pooler, any_pooler=True, in_use=self.in_use)
            )
            session = AsyncLockConnection(opened, self._driver_kind(driver), facts)
            self.configure(session)
            session.driver.on_notify(self.on_notify)
            if forks == PROCESS.forks:
                self.session = session
            else:
                session.close()

    def ask(self, text: str, args: Sequence[object], limit: float) -> Any:
        assert self.session is not None
        return self._run(self.session.fetch_value(self.engine, text, args, limit=limit))

    def listen(self, text: str, channel: str, *, on: bool) -> None:
        assert self.session is not None
        self._run(self.session.driver.listen(text, channel, on=on))

    def wait(self, seconds: float) -> None:
        self._run(self._wait(seconds))

    async def _wait(self, seconds: float) -> None:
        session = self.session if self.live else None
        fd = -1 if session is None or session.driver.reads_alone else session.driver.fileno()
        if fd >= 0:
            self._loop.add_reader(fd, self._wake_reader.set)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake_reader.wait(), seconds)
        finally:
            if fd >= 0:
                self._loop.remove_reader(fd)
        self._wake_reader.clear()
        if session is not None:
            try:
                session.driver.poll_notifies()
            except Exception:
                session.on_connection_lost("killed")

    def wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake_reader.set)

    def close_connection(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.on_death = None
            session.close()
            self._run(asyncio.sleep(0))  # lets the transport finish closing

    def close(self) -> None:
        self.close_connection()
        self._loop.close()


def choose_background_connection(engine: Engine, config: Config, on_notify: Heard) -> BackgroundConnection:
    """Return a background connection for the engine, sync or async. The connection is not open yet."""
    return (AsyncBackgroundConnection if engine.dialect.is_async else SyncBackgroundConnection)(
        engine, config, on_notify
    )
