"""Open connections in the background, and close them at exit or with their event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import traceback
from typing import TYPE_CHECKING

from pgfence._holds.carriers import keep_task
from pgfence._process import threads
from pgfence._process.coroutines import run_sync
from pgfence._process.lifecycle import PROCESS
from pgfence._process.monitor import MONITOR

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine
    from typing import Any, TypeAlias

    from pgfence._connections.connection import LockConnection
    from pgfence._holds.carriers import WakeEvent

    Opener: TypeAlias = Callable[["PendingConnection"], Coroutine[Any, Any, None]]


class PendingConnection:
    """A connection that is being opened. Its caller may have given up by the time it is open."""

    __slots__ = ("__weakref__", "_done", "abandoned", "done", "error", "event", "late", "session", "uses_slot")

    def __init__(self, event: WakeEvent, *, counts: bool) -> None:
        self.event = event
        self.uses_slot = counts
        """Whether the connection counts towards `max_lock_connections`."""
        self.done = False
        self.session: LockConnection | None = None
        self.error: Exception | None = None
        self.abandoned = False
        self.late = False
        self._done = threading.Event()

    def mark_done(self) -> None:
        """Record that the opening has ended, which wakes the exiting interpreter if it waits for this connection."""
        self._done.set()

    def end(self, seconds: float) -> None:
        """Wait up to `seconds` for the opening to end, because the interpreter is exiting."""
        # exit() must not run while the thread is inside the driver.
        self._done.wait(seconds)


def start_thread(opening: PendingConnection, opener: Opener) -> None:
    """Open the connection in a separate thread, so that a timeout or an interrupt of the caller does not break it."""
    threads.register(opening)
    threads.start("pgfence-opener", contextvars.copy_context().run, lambda: run_sync(opener, opening))


def start_task(opening: PendingConnection, opener: Opener) -> None:
    """Open the connection in a separate task. If the caller is cancelled, the connection is kept for the next caller."""

    async def run() -> None:
        try:
            await opener(opening)
        except asyncio.CancelledError as ended:
            # The event loop is closing. The traceback's frames form reference cycles that keep a half-open socket alive:
            # until they are collected, the server waits for the login, for up to authentication_timeout.
            traceback.clear_frames(ended.__traceback__)
            raise

    keep_task(asyncio.ensure_future(run()))


def close_at_exit(dialect: Callable[[], object], sessions: set[LockConnection]) -> None:
    if dialect() is not None:  # not garbage-collected, so the interpreter is exiting
        threads.end_all()
    close_all(sessions)


def close_all(sessions: set[LockConnection]) -> None:
    """Close connections, because their engine was collected or their event loop or the interpreter is ending."""
    PROCESS.notice_fork()  # a forked child must not shut down the sockets of its parent
    for session in list(sessions):
        # Another thread runs a statement on this connection, and closing would free memory that the driver is using.
        if session.statement_started:
            MONITOR.shut_down(session)
        else:
            session.close()
    sessions.clear()


async def close_with_loop(sessions: set[LockConnection]) -> AsyncGenerator[None]:
    """Close connections before the event loop closes."""
    # asyncio.run() closes async generators before the event loop. This is the last moment at which connections can be closed
    # cleanly.
    try:
        yield
    finally:
        holds = [session.hold for session in sessions if session.hold is not None]
        close_all(sessions)
        for hold in holds:
            hold.lose("killed")
        await asyncio.sleep(0)  # lets the transports finish closing
