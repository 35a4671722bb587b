"""Handles of locks that are held.

A handle reports without I/O what its process knows. Its `state` is "held", "unknown" (a renewal got no response, or the process
was stopped, and the server has not responded since), "lost" or "released". The state does not prove that the lock is still held,
because a process that was suspended notices a loss only when it runs again. If a former holder must not do some work, do that
work on the connection that holds the lock (`AdvisoryLock.connect`) or behind a fence.

In a forked child, a handle is in the state "released" from the start, because the lock belongs to the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import sys
import threading
import warnings
import weakref
from typing import TYPE_CHECKING, NoReturn, Protocol, Self, TypeVar, cast, overload

from sqlalchemy import Connection

from pgfence._api.contexts import attach
from pgfence._api.inputs import expect_callable, reject_coroutine
from pgfence._holds.carriers import THREADS, find_task_contender, keep_task, run_on_loop
from pgfence._holds.hold import format_names
from pgfence._process.callbacks import call_logged, log
from pgfence._process.clock import seconds
from pgfence._process.coroutines import run_sync
from pgfence._process.monitor import MONITOR
from pgfence.errors import LockLostError, LockNotHeldError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from sqlalchemy.ext.asyncio import AsyncConnection

    from pgfence._holds.hold import BaseHold
    from pgfence._holds.queue import Contender
    from pgfence._process.clock import Seconds
    from pgfence.errors import LossReason
    from pgfence.keys import LockKey
    from pgfence.types import State

HoldT = TypeVar("HoldT", bound="BaseHold")
HoldT_contra = TypeVar("HoldT_contra", bound="BaseHold", contravariant=True)

_USER_CONNECTIONS: weakref.WeakKeyDictionary[Connection, Held | AsyncHeld] = weakref.WeakKeyDictionary()


class HoldManager(Protocol[HoldT_contra]):
    """The methods of a manager that its handles use."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop whose tasks share the manager, or None for threads."""
        ...

    async def release(self, hold: HoldT_contra, /, *, leaving: bool = False, failing: bool = False) -> None:
        """Release the hold. `leaving` means that a block ends, and `failing` that it raised an exception."""
        ...

    def abandon(self, hold: HoldT_contra, /) -> None:
        """Release the lock of a dropped handle later, in another thread or task."""
        ...


class _Handle:
    """The common part of the sync and async handles."""

    __slots__ = ("__weakref__", "_hold", "_manager")

    def __init__(self, manager: HoldManager[HoldT], hold: HoldT) -> None:
        self._manager = cast("HoldManager[BaseHold]", manager)
        self._hold: BaseHold = hold
        hold.handle = weakref.ref(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names with which the lock was requested. A `LockKey` without a name is shown as its number.

        A lease, slot, permit or term in a namespace is shown with the namespace, for example as `"billing:close"`.
        """
        return self._hold.names

    @property
    def keys(self) -> tuple[LockKey, ...]:
        """The keys of a session lock, sorted and without duplicates; empty for a lease, slot, permit or term."""
        return self._hold.keys

    @property
    def state(self) -> State:
        """The state as far as this process knows ("held", "unknown", "lost" or "released"). Reading it does no I/O."""
        return self._hold.state

    @property
    def lost(self) -> bool:
        """Whether the lock was lost while it was held. Reading it does no I/O."""
        return self._hold.state == "lost"

    @property
    def loss_reason(self) -> LossReason | None:
        """The reason for the loss, or None if the lock is not lost.

        For a session lock, "killed" means that the server ended the session, "cut off" that the server stopped responding, and
        "returned" that the lock was created with a Connection that has been closed. For a lease, the reason is "expired",
        "superseded" (another holder got it), "evicted", "overdue" (its `max_hold` has passed), "resigned" or "cut off".
        """
        return self._hold.loss_reason

    def check(self) -> None:
        """Raise an error if, as far as this process knows, the lock is no longer held.

        The check does no I/O, so you can repeat it as often as you like.

        Raises:
            LockLostError: the lock was lost.
            LockNotHeldError: the lock was released, or this is a forked child.
        """
        self._hold.check()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {format_names(self.names)}, {self.state}>"

    def _expect_unreleased(self) -> None:
        """Raise an error at the start of a block that would run without the lock, and would end without an error."""
        if self._hold.state == "released":
            raise self._hold.not_held_error()

    async def _release(self) -> None:
        await self._manager.release(self._hold)

    async def _end_block(self, exc: BaseException | None, *, flag: bool) -> None:
        """Release at the end of a block. The caller's exception takes precedence, and a failed release is noted on it."""
        if self._hold.released and self._hold.ours:
            return
        try:
            await self._manager.release(self._hold, leaving=True, failing=exc is not None)
        except Exception as error:
            if isinstance(error, LockLostError) and flag:
                return
            if exc is None:
                raise
            # `check()` in the block may already have raised the error of this loss, and a note would repeat it.
            if not (isinstance(exc, LockLostError) and isinstance(error, LockLostError) and str(exc) == str(error)):
                attach(exc, error, "while the lock was being released")

    def __reduce__(self) -> NoReturn:
        # copy.copy() calls this too. A dropped copy would release the lock, although the original handle is still in use.
        raise TypeError(
            f"this {type(self).__name__} cannot be copied or pickled, because it stands for one lock: pass the handle itself, or the"
            " names and the token of the lock"
        )

    def __del__(self) -> None:
        hold = getattr(self, "_hold", None)  # the attribute is missing if the constructor was interrupted
        if hold is not None and not hold.released:
            _note_dropped(hold, self._manager, self)


class Held(_Handle):
    """A lock that is held. Call `release`, or use the handle once as a context manager, which releases the lock at the end.

    Any thread may release the lock, but only once.

    Limitations: work is not protected after a loss. Calling `check()` before each step shortens the time in which a loss goes
    unnoticed, but cannot reduce it to zero.
    """

    __slots__ = ()

    def on_lost(self, cb: Callable[[], object], /) -> None:
        """Call `cb` once when the lock is lost, or immediately if it is already lost.

        The callback runs in a dedicated thread, which runs callbacks one after the other and holds none of pgfence's internal
        locks. Exceptions are logged, even SystemExit: `sys.exit()` ends a program only in its main thread. To end the program,
        send it a signal, for example with `os.kill(os.getpid(), signal.SIGTERM)`.

        Raises:
            TypeError: `cb` is not callable, or is a coroutine function.
        """
        expect_callable(cb)
        reject_coroutine(cb, "on_lost() of a sync handle does not await it. Use the async class")
        MONITOR.expect_callbacks()
        self._hold.subscribe(lambda: MONITOR.call(cb))

    def wait_lost(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lock is lost or released, and return whether it was lost. A timeout of None waits indefinitely."""
        over = threading.Event()
        self._hold.add_end_callback(over.set)
        try:
            over.wait(None if timeout is None else min(seconds(timeout), threading.TIMEOUT_MAX))
        finally:
            self._hold.remove_end_callback(over.set)
        return self.lost

    def release(self) -> None:
        """Release the lock, and return when the server has confirmed the release or the connection is closed.

        If the server does not respond to the release of a lease, the call returns too. The release is then repeated in the
        background, and the lease ends when its TTL has passed at the latest.

        Raises:
            LockLostError: the lock had already been lost, or the server did not respond to the release of a session lock. Nothing
                is held.
            LockNotHeldError: the lock was already released, or this is a forked child.
            TransactionStateError: the caller's own connection is inside a transaction; the lock is still held.
        """
        run_sync(self._release)

    def _leave(self, exc: BaseException | None, *, flag: bool) -> None:
        run_sync(self._end_block, exc, flag=flag)

    def __enter__(self) -> Self:
        self._expect_unreleased()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self._leave(exc, flag=False)


class AsyncHeld(_Handle):
    """A lock that is held. Call `release`, or use the handle once as an async context manager, which releases the lock at the end.

    Any task of the same event loop may release the lock, but only once. If a release of a session lock is cancelled, the
    connection is closed, so the lock is released in that case too.

    Limitations: work is not protected after a loss, as with `Held`.
    """

    __slots__ = ()

    def on_lost(self, cb: Callable[[], object], /) -> None:
        """Call `cb` once when the lock is lost, or immediately if it is already lost.

        The callback runs in the event loop in which the lock was acquired; a coroutine function is awaited there. Exceptions
        are logged.

        Raises:
            TypeError: `cb` is not callable.
        """
        expect_callable(cb)
        loop = self._manager.loop
        assert loop is not None
        self._hold.subscribe(lambda: run_on_loop(loop, lambda: _run(cb)))

    async def wait_lost(self, timeout: Seconds | None = None) -> bool:
        """Wait until the lock is lost or released, and return whether it was lost. A timeout of None waits indefinitely."""
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        def run_end() -> None:
            run_on_loop(loop, over.set)

        self._hold.add_end_callback(run_end)
        limit = None if timeout is None or math.isinf(seconds(timeout)) else seconds(timeout)
        with contextlib.suppress(TimeoutError):
            try:
                await asyncio.wait_for(over.wait(), limit)
            finally:
                self._hold.remove_end_callback(run_end)
        return self.lost

    async def release(self) -> None:
        """Release the lock, and return when the server has confirmed the release or the connection is closed.

        If the server does not respond to the release of a lease, the call returns too. The release is then repeated in the
        background, and the lease ends when its TTL has passed at the latest.

        Raises:
            LockLostError: the lock had already been lost, or the server did not respond to the release of a session lock. Nothing
                is held.
            LockNotHeldError: the lock was already released, or this is a forked child.
            TransactionStateError: the caller's own connection is inside a transaction; the lock is still held.
        """
        await self._release()

    async def __aenter__(self) -> Self:
        self._expect_unreleased()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self._end_block(exc, flag=False)


def _run(cb: Callable[[], object]) -> None:
    """Call a callback on its event loop. A coroutine becomes a task, to which a reference is kept until it ends."""

    async def guard(coroutine: Awaitable[object]) -> None:
        try:
            await coroutine
        except Exception:
            log.exception("a callback of a lock failed")

    def call() -> None:
        result = cb()
        if inspect.isawaitable(result):
            keep_task(asyncio.ensure_future(guard(result)))

    call_logged(call)


def _note_dropped(hold: BaseHold, manager: HoldManager[BaseHold], handle: _Handle) -> None:
    # This runs in a finaliser, possibly in the middle of pgfence's own code. It must take no lock, so another thread or task does
    # the work.
    if not hold.ours or sys.is_finalizing():
        return
    hold.dropped = True
    manager.abandon(hold)
    if hold.reason is None:
        noun, names = hold.noun, format_names(hold.names)
        MONITOR.post(lambda: log.warning("the %s %s was dropped without release(); releasing it now", noun, names))
        warnings.warn(
            f"the {noun} {names} was dropped without release()",
            ResourceWarning,
            source=handle,
            stacklevel=2,
        )


AnyHeld = TypeVar("AnyHeld", bound=Held | AsyncHeld)


def current(kind: type[AnyHeld], /) -> AnyHeld:
    """Return the innermost handle of a class that this thread holds or, for an async class, that this task holds.

    Handles of `acquire()`, `hold()` and `wrap()` count, from the grant to the release.

    Args:
        kind: a class of handles, such as `Held` or `AsyncHeldLease`.

    Raises:
        LockNotHeldError: this thread or task has no handle of that class.
    """
    here: Contender | None = find_task_contender() if issubclass(kind, AsyncHeld) else THREADS.get_contender()
    holds = cast("list[BaseHold]", here.holds if here is not None else [])
    for hold in reversed(holds):
        handle = hold.handle()
        if isinstance(handle, kind) and hold.ours:
            return handle
    raise LockNotHeldError(
        f"there is no current {kind.__name__}: this {'task' if issubclass(kind, AsyncHeld) else 'thread'} holds none"
    )


@overload
def held(connection: Connection, /) -> Held: ...
@overload
def held(connection: AsyncConnection, /) -> AsyncHeld: ...
def held(connection: Connection | AsyncConnection, /) -> Held | AsyncHeld:
    """Return the handle of the lock that a connection from `connect()` holds.

    Raises:
        LockNotHeldError: the connection does not come from `connect()`, or its block has ended.
        TypeError: the argument is neither a Connection nor an AsyncConnection.
    """
    if not isinstance(connection, Connection) and not hasattr(connection, "sync_connection"):
        raise TypeError(f"held() takes the connection from connect(), not {type(connection).__name__}")
    inner = connection if isinstance(connection, Connection) else connection.sync_connection
    handle = None if inner is None else _USER_CONNECTIONS.get(inner)
    if handle is None:
        raise LockNotHeldError("this connection holds no lock: it does not come from connect(), or its block has ended")
    return handle


def register_user_connection(connection: Connection, handle: Held | AsyncHeld) -> None:
    """Register the lock of a connection from `connect()`, for `held`."""
    _USER_CONNECTIONS[connection] = handle


def forget_user_connection(connection: Connection) -> None:
    """Unregister a connection from `connect()` at the end of its block."""
    _USER_CONNECTIONS.pop(connection, None)
