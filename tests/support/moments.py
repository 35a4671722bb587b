"""Interrupt code of pgfence at a chosen moment, as a signal handler that raises would."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

import pgfence

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = str(Path(pgfence.__file__).parent)


class Stop(BaseException):
    """What a signal handler raises, as KeyboardInterrupt is: `except Exception` does not see it."""


class SoftLimit(Exception):
    """What a task queue raises from its signal handler; nothing may take it for a driver's error."""


class Interrupt:
    """Raises at the n-th moment in our own code; a profiler sees calls and returns, where CPython looks for signals."""

    def __init__(self, at: int, kind: type[BaseException]) -> None:
        self.left = at
        self.kind = kind
        self.where = ""

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        """Count, and raise when it is time."""
        if event == "c_call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        if finalising(frame):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            self.where = (
                f"{frame.f_code.co_filename[len(ROOT) :]}:{frame.f_lineno} {event} {getattr(arg, '__name__', '')}"
            )
            raise self.kind


def finalising(frame: Any) -> bool:
    """Say whether a finaliser runs: Python ignores an exception there, wherever it comes from."""
    while frame is not None:
        if frame.f_code.co_name in ("__del__", "_note_dropped"):
            return True
        frame = frame.f_back
    return False


@contextmanager
def interrupted(at: int, kind: type[BaseException] = Stop) -> Iterator[Interrupt]:
    """Interrupt the block at its n-th moment."""
    interrupt = Interrupt(at, kind)
    sys.setprofile(interrupt)
    try:
        yield interrupt
    finally:
        sys.setprofile(None)


def _open_connections() -> list[psycopg.Connection[Any]]:
    return [each for each in gc.get_objects() if isinstance(each, psycopg.Connection) and not each.closed]


@contextmanager
def torn_connections() -> Iterator[None]:
    """Close at the end of the block what interrupts have torn from its owner: collected later, it would fail another test."""
    before = weakref.WeakSet(_open_connections())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.collect()
        for each in _open_connections():
            if each not in before:
                each.close()
