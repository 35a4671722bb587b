"""The heartbeat's connection: one session of ours, driven by one thread that may also rest and listen."""

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
    from collections.abc import Sequence

    from sqlalchemy import Engine

    from pgfence._connections.connection import LockConnection
    from pgfence._connections.drivers import Heard
    from pgfence._process.coroutines import Coro
    from pgfence.config import Config

R = TypeVar("R")


class HeartbeatConnection(ABC):
    """One connection and its thread. Only `wake` and `cut` may be called from another thread."""

    session: LockConnection | None = None

    def __init__(self, engine: Engine, config: Config, on_notify: Heard) -> None:
        self.engine = engine
        self.config = config
        self.on_notify = on_notify

    @property
    def live(self) -> bool:
        """Whether it is open and not known to be dead."""
        return self.session is not None and self.session.dead is None

    @property
    def can_listen(self) -> bool:
        """Whether LISTEN works, which it does not behind a pooler that may switch server sessions."""
        return self.session is not None and (not self.session.driver.pooled or self.config.pooler == "session")

    def configure(self, session: LockConnection) -> None:
        """Make a new session ready for its work."""
        driver = session.driver
        driver.pooled = self.config.pooler in ("session", "transaction") or driver.pid != session.facts.backend_pid
        session.on_death = lambda _: self.wake()
        session.watch()

    def abort(self) -> None:
        """Give up on the statement under way; whoever waits for it gets an error."""
        if self.session is not None:
            self.session.abort()

    @abstractmethod
    def open(self) -> None:
        """Open the connection; close an earlier one."""

    @abstractmethod
    def ask(self, text: str, args: Sequence[object], limit: float) -> Any:
        """Run a statement and return the first column of its one row; the watcher gives up after `limit` seconds, too."""

    @abstractmethod
    def listen(self, text: str, channel: str, *, on: bool) -> None:
        """Run a LISTEN or an UNLISTEN."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until somebody wakes us or the server tells something, which is passed on; at most so long."""

    @abstractmethod
    def wake(self) -> None:
        """End the rest that is under way, or the next one."""

    @abstractmethod
    def close_connection(self) -> None:
        """Close the connection, if there is one."""

    @abstractmethod
    def close(self) -> None:
        """Close everything; the thread ends."""


class SyncHeartbeatConnection(HeartbeatConnection):
    """Over a sync driver."""

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
            opened, driver, facts = open_connection(self.engine, self.config.pooler, any_pooler=True)
            session = SyncLockConnection(opened, self._driver_kind(driver), facts)
            self.configure(session)
            session.driver.on_notify(self.on_notify)
            if forks == PROCESS.forks:  # else a forked child has a copy of the socket
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
        with contextlib.suppress(OSError):  # the buffer is full of wakes already, or we are closed
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


class AsyncHeartbeatConnection(HeartbeatConnection):
    """Over an async driver, on a loop of our own."""

    def __init__(self, engine: Engine, config: Config, on_notify: Heard) -> None:
        super().__init__(engine, config, on_notify)
        self._driver_kind = choose_driver_connection(engine.dialect)
        # A private loop on the heartbeat's thread: the connection is opened by the engine's own driver, creator and events, and a
        # user's loop that is blocked cannot delay a renewal.
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
            opened, driver, facts = await run_in_greenlet(lambda: open_connection(engine, pooler, any_pooler=True))
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
            self._run(asyncio.sleep(0))  # for the transport's own farewell

    def close(self) -> None:
        self.close_connection()
        self._loop.close()


def choose_heartbeat_connection(engine: Engine, config: Config, on_notify: Heard) -> HeartbeatConnection:
    """Return a link of the engine's own world, not yet open."""
    return (AsyncHeartbeatConnection if engine.dialect.is_async else SyncHeartbeatConnection)(engine, config, on_notify)
