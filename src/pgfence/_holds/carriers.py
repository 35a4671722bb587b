"""Run a contender in a thread or in a task of an event loop.

The runtime is written once, as coroutines over a carrier. A thread's carrier blocks and never suspends, so that `run_sync` can
run the same coroutines. Only the carriers are written twice. Another thread can end a thread's waits (`cancel_waits`), and
cancelling a task ends the task's waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from pgfence._holds.queue import Contender
from pgfence._holds.wait_plan import SLICE
from pgfence._process.callbacks import must_propagate
from pgfence._process.clock import clock
from pgfence._process.lifecycle import PROCESS
from pgfence._process.monitor import MONITOR
from pgfence.errors import WaitCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

R = TypeVar("R")


class CancelEvent(Protocol):
    """A `threading.Event`, or another object that can report that waits must end."""

    def is_set(self) -> bool:
        """Return whether waits must end."""
        ...


class Cancelled(BaseException):
    """A wait was cancelled. `acquire` translates this to `WaitCancelledError`, so it never reaches a caller."""


class _Here(threading.local):
    """The cancel event of each thread."""

    event: CancelEvent | None = None


_HERE = _Here()


@contextmanager
def cancel_waits(event: CancelEvent, /) -> Iterator[None]:
    """End this thread's waits for locks, leases, slots, permits and rate limits inside the block once `event` is set.

    ::

        stop = threading.Event()  # set by a signal handler, or by another thread

        with cancel_waits(stop), AdvisoryLock(engine, "indexer").hold(timeout=math.inf):
            index()

    A cancelled wait raises `WaitCancelledError` after at most about half a second, and leaves no lock and no place in a queue
    behind. A wait that begins after the event was set raises this error immediately. The event has no effect on tries
    (`timeout=0`) and releases.

    Limitations: the event does not end the waits of an async lock (cancel its task instead) or of a `TransactionLock`, which
    waits in the server (use `pg_cancel_backend` or the server's `statement_timeout`). If the server hangs, the wait ends when
    the running statement is given up, after up to 30 s. In nested blocks only the innermost event applies.

    Args:
        event: a `threading.Event`, or any object with `is_set()`.

    Raises:
        TypeError: the object has no `is_set()`.
    """
    if not callable(getattr(event, "is_set", None)):
        raise TypeError(
            f"cancel_waits() needs a threading.Event, or another object with is_set(), not {type(event).__name__}"
        )
    before = cancel_here()
    _HERE.event = event
    try:
        yield
    finally:
        _HERE.event = before


def cancel_here() -> CancelEvent | None:
    """Return the event with which `cancel_waits` ends the waits of this thread, or None."""
    return _HERE.event


def build_cancelled_error(names: tuple[str, ...]) -> WaitCancelledError:
    quoted = ", ".join(repr(name) for name in names)
    return WaitCancelledError(
        f"the wait for {quoted} was cancelled by the event of cancel_waits(); nothing was acquired", names=names
    )


def expect_uncancelled(cancel: CancelEvent | None) -> None:
    """Raise `Cancelled` if the event is set."""
    if cancel is not None and cancel.is_set():
        raise Cancelled


def wait(waits: Callable[[float], bool], left: float, cancel: CancelEvent | None) -> bool:
    """Call `waits` for at most `left` seconds, in slices so that it can be cancelled, and return its last result.

    Raises:
        Cancelled: the event was set.
    """
    if cancel is None:
        return waits(left)
    end = clock() + left
    while True:
        expect_uncancelled(cancel)
        left = end - clock()
        if waits(max(0.0, min(left, SLICE))):
            return True
        if left <= SLICE:
            return False


class WakeEvent(Protocol):
    """An event on which one contender waits, and which any thread can set once."""

    def set(self) -> None:
        """Wake the contender."""
        ...

    async def wait(self, seconds: float, cancel: CancelEvent | None = None) -> bool:
        """Wait for at most `seconds`, and return whether the event is set."""
        ...


class Carrier(Protocol):
    """The operations that the runtime needs from a thread, or from the event loop of a task."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the tasks, or None for threads."""
        ...

    def get_contender(self) -> Contender: ...

    def cancel_event(self) -> CancelEvent | None:
        """Return the event that ends the waits of the caller, or None. A task's waits end when the task is cancelled."""
        ...

    def make_event(self) -> WakeEvent: ...

    async def sleep(self, seconds: float, cancel: CancelEvent | None = None) -> None: ...

    async def call(self, work: Callable[[], R]) -> R:
        """Run synchronous SQLAlchemy code, which may call the driver, and return its result."""
        ...

    def run_cleanup(self, clean: Callable[[], None]) -> None:
        """Run a clean-up to completion. The clean-up may run twice."""
        ...

    def run_at_home(self, work: Callable[[], object]) -> None:
        """Run `work` where connections may be closed: immediately in this thread, or on the event loop of the connections."""
        ...

    def run_later(self, work: Callable[[], object]) -> None:
        """Run `work` in the background. This takes no lock, because the caller may be a finaliser."""
        ...


class ThreadEvent:
    """An event on which one thread waits."""

    __slots__ = ("_lock", "_set")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()
        self._set = False

    def set(self) -> None:
        if not self._set:
            self._set = True
            self._lock.release()

    async def wait(self, seconds: float, cancel: CancelEvent | None = None) -> bool:
        return wait(self._wait, seconds, cancel)

    def _wait(self, seconds: float) -> bool:
        return self._set or self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


class ThreadCarrier:
    """The carrier for the threads of this process."""

    make_event = ThreadEvent
    loop = None

    def __init__(self) -> None:
        self._here = threading.local()

    def get_contender(self) -> Contender:
        try:
            me: Contender = self._here.contender
        except AttributeError:
            me = self._here.contender = Contender("thread")
        # A forked child inherits the thread's contender, whose holds belong to the parent.
        if me.pid != PROCESS.known_pid:
            me = self._here.contender = Contender("thread")
        return me

    cancel_event = staticmethod(cancel_here)

    async def sleep(self, seconds: float, cancel: CancelEvent | None = None) -> None:
        if cancel is None:
            time.sleep(seconds)  # noqa: ASYNC251  # a thread must block
        else:
            await ThreadEvent().wait(seconds, cancel)

    async def call(self, work: Callable[[], R]) -> R:
        return work()

    def run_cleanup(self, clean: Callable[[], None]) -> None:
        try:
            clean()
        except BaseException:
            # An exception, perhaps of a signal handler, ended the clean-up early. Run it again in a thread that receives no
            # signals.
            MONITOR.post(clean)
            raise

    def run_at_home(self, work: Callable[[], object]) -> None:
        work()

    def run_later(self, work: Callable[[], object]) -> None:
        MONITOR.post(work)


THREADS = ThreadCarrier()


class TaskEvent:
    """An event on which one task waits."""

    __slots__ = ("_future", "_loop", "_thread")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._future: asyncio.Future[None] = self._loop.create_future()

    def set(self) -> None:
        # call_soon_threadsafe() costs a wake-up of the event loop, which a call from the loop's own thread does not need.
        if threading.get_ident() == self._thread:
            _resolve(self._future)
        else:
            run_on_loop(self._loop, lambda: _resolve(self._future))

    async def wait(self, seconds: float, cancel: CancelEvent | None = None) -> bool:
        # A second future is used, so that a timeout or a cancellation leaves the event itself unchanged.
        over = self._loop.create_future()
        timer = None if math.isinf(seconds) else self._loop.call_later(seconds, _resolve, over)
        self._future.add_done_callback(lambda _: _resolve(over))
        try:
            await over
        finally:
            if timer is not None:
                timer.cancel()
        return self._future.done()


class TaskCarrier:
    """The carrier for the tasks of one event loop."""

    make_event = TaskEvent

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def get_contender(self) -> Contender:
        return get_task_contender()

    def cancel_event(self) -> None:
        """Return None, because asyncio cancels tasks."""

    async def sleep(self, seconds: float, cancel: CancelEvent | None = None) -> None:
        await asyncio.sleep(seconds)

    async def call(self, work: Callable[[], R]) -> R:
        return await run_in_greenlet(work)

    def run_cleanup(self, clean: Callable[[], None]) -> None:
        clean()

    def run_at_home(self, work: Callable[[], object]) -> None:
        if is_running(self.loop):
            work()
        else:
            run_on_loop(self.loop, work)

    def run_later(self, work: Callable[[], object]) -> None:
        run_on_loop(self.loop, work)


_CONTENDERS: weakref.WeakKeyDictionary[asyncio.Task[object], Contender] = weakref.WeakKeyDictionary()


def find_task_contender() -> Contender | None:
    """Return the contender of the current task, or None if there is no task or it has no contender."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return None
    return None if task is None else _CONTENDERS.get(task)


def get_task_contender() -> Contender:
    """Return the contender of the current task, creating it on first use."""
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("an async lock must be acquired in an asyncio task")
    me = _CONTENDERS.get(task)
    if me is None or me.pid != PROCESS.known_pid:
        me = _CONTENDERS[task] = Contender("task")
    return me


_TASKS: set[asyncio.Task[object]] = set()


def keep_task(task: asyncio.Task[object]) -> None:
    """Keep a task alive until it is done, because the event loop holds only a weak reference to it."""
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)


def run_on_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Run a call on an event loop, from any thread. The call does nothing if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def is_callers_failure(error: BaseException) -> bool:
    """Return whether an exception of the application's function is a failure of that function.

    Otherwise, this thread or task itself has to end.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is None:
        return not must_propagate(error)
    # A function that cancels a task and awaits it raises CancelledError, although nothing has cancelled its caller.
    return isinstance(error, Exception) or (isinstance(error, asyncio.CancelledError) and not task.cancelling())


def is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether this thread is running the given event loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


async def run_in_greenlet(call: Callable[[], R]) -> R:
    """Run synchronous SQLAlchemy code over an async driver, on the calling task."""
    from sqlalchemy.util import greenlet_spawn

    result: R = await greenlet_spawn(call)
    return result


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
