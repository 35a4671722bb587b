"""How a connection is opened beside its caller, and how all of them end: with the interpreter, or with the loop."""

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
    """A connection being opened for somebody who may have gone by the time it is there."""

    __slots__ = ("__weakref__", "_done", "abandoned", "done", "error", "event", "late", "session", "uses_slot")

    def __init__(self, event: WakeEvent, *, counts: bool) -> None:
        self.event = event
        self.uses_slot = counts
        """Whether it has one of the `max_lock_connections`."""
        self.done = False
        self.session: LockConnection | None = None
        self.error: Exception | None = None
        self.abandoned = False
        self.late = False
        self._done = threading.Event()

    def mark_done(self) -> None:
        """Let the interpreter end, if it waits for that."""
        self._done.set()

    def end(self, seconds: float) -> None:
        """Wait, for the interpreter ends: exit() must not meet the thread inside the driver."""
        self._done.wait(seconds)


def start_thread(opening: PendingConnection, opener: Opener) -> None:
    """Open on a thread of its own: the caller can time out or be interrupted, the connection cannot be torn."""
    threads.register(opening)
    threads.start("pgfence-opener", contextvars.copy_context().run, lambda: run_sync(opener, opening))


def start_task(opening: PendingConnection, opener: Opener) -> None:
    """Open in a task of ours: a cancelled caller leaves the connection to whoever comes next."""

    async def run() -> None:
        try:
            await opener(opening)
        except asyncio.CancelledError as ended:
            # The loop ends. The frames that it was cancelled in refer to each other, and with them lives a socket that is half
            # open: until they are collected the server waits for the rest of a login, up to authentication_timeout.
            traceback.clear_frames(ended.__traceback__)
            raise

    keep_task(asyncio.ensure_future(run()))


def close_at_exit(dialect: Callable[[], object], sessions: set[LockConnection]) -> None:
    if dialect() is not None:  # nobody collected it: the interpreter ends
        threads.end_all()
    close_all(sessions)


def close_all(sessions: set[LockConnection]) -> None:
    """End sessions in an orderly way: their engine is collected, their loop or the interpreter ends."""
    PROCESS.notice_fork()  # a forked child must not shut down the sockets of its parent
    for session in list(sessions):
        if session.statement_started:  # another thread is inside a statement: it must not lose the memory under it
            MONITOR.shut_down(session)
        else:
            session.close()
    sessions.clear()


async def close_with_loop(sessions: set[LockConnection]) -> AsyncGenerator[None]:
    """asyncio.run() closes async generators before the loop: the last chance to end sessions in an orderly way."""
    try:
        yield
    finally:
        holds = [session.hold for session in sessions if session.hold is not None]
        close_all(sessions)
        for hold in holds:
            hold.lose("killed")
        await asyncio.sleep(0)  # for the transports' own farewell
