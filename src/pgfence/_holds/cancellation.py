"""Waits of a thread that another thread can end."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from pgfence._holds.wait_plan import SLICE
from pgfence._process.clock import clock
from pgfence.errors import WaitCancelledError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class CancelEvent(Protocol):
    """A `threading.Event`, or another object that says when waits end."""

    def is_set(self) -> bool:
        """Return whether waits should end."""
        ...


class Cancelled(BaseException):
    """The wait was cancelled; `acquire` says so by a WaitCancelledError. Never reaches a caller."""


class _Here(threading.local):
    """What belongs to this thread."""

    event: CancelEvent | None = None


_HERE = _Here()


@contextmanager
def cancel_waits(event: CancelEvent, /) -> Iterator[None]:
    """End this thread's waits for locks, leases and slots inside the block once `event` is set.

    ::

        stop = threading.Event()  # set by a signal handler, or by another thread

        with cancel_waits(stop), AdvisoryLock(engine, "indexer").hold(timeout=math.inf):
            index()

    A wait that is cancelled raises `WaitCancelledError` at most about half a second later, and leaves nothing behind: no lock, no
    place in a queue. A wait that begins after the event was set raises it at once. A try and a release are not affected.

    Limitations: it ends neither the waits of an async lock, whose task can be cancelled, nor those of a `TransactionLock`, which
    waits in the server: `pg_cancel_backend` or the server's `statement_timeout` ends that. If the server hangs, the wait ends when
    the running statement is given up, after up to 30 s. In nested blocks only the innermost event applies.

    Args:
        event: a `threading.Event`, or anything with `is_set()`.

    Raises:
        TypeError: it has no `is_set()`.
    """
    if not callable(getattr(event, "is_set", None)):
        raise TypeError(
            f"cancel_waits() needs a threading.Event, or the like with is_set(), not {type(event).__name__}"
        )
    before = cancel_here()
    _HERE.event = event
    try:
        yield
    finally:
        _HERE.event = before


def cancel_here() -> CancelEvent | None:
    """Return what can end the waits of this thread."""
    return _HERE.event


def build_cancelled_error(names: tuple[str, ...]) -> WaitCancelledError:
    """Return the error of a cancelled wait."""
    quoted = ", ".join(repr(name) for name in names)
    return WaitCancelledError(
        f"the wait for {quoted} was cancelled by the event of cancel_waits(); nothing is held", names=names
    )


def expect_uncancelled(cancel: CancelEvent | None) -> None:
    """Raise Cancelled if the event is set."""
    if cancel is not None and cancel.is_set():
        raise Cancelled


def wait(waits: Callable[[float], bool], left: float, cancel: CancelEvent | None) -> bool:
    """Wait by `waits` for at most `left` seconds, in slices so that it can be cancelled, and return what it returned.

    Raises:
        Cancelled: it was cancelled.
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
