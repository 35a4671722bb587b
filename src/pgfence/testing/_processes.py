"""Pause and kill processes of this machine."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from pgfence.testing._errors import FaultUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def pause(*pids: int) -> Iterator[None]:
    """Stop processes with SIGSTOP until the end of the block. They stay alive and connected, but do not respond."""
    if not hasattr(signal, "SIGSTOP"):
        raise FaultUnavailableError("a process cannot be paused on this platform: it has no SIGSTOP")
    stopped: list[int] = []
    try:
        for pid in pids:
            _send(pid, signal.SIGSTOP)
            stopped.append(pid)
        yield
    finally:
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """End a process as a crash does, with SIGKILL, or TerminateProcess on Windows."""
    _send(pid, getattr(signal, "SIGKILL", signal.SIGTERM))


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except PermissionError as error:
        raise FaultUnavailableError(f"process {pid} belongs to another user, so no signal can be sent to it") from error
