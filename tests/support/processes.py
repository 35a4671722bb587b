"""Processes that hold something, to be killed. `pgfence.testing` pauses them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

_PRELUDE = """
import os, signal, sys

def say(*words):
    print(*words, flush=True)

def park():
    sys.stdin.read()

def fork_child():
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    say("child", pid)
"""


class Script:
    """A Python script in a separate process.

    The script has `say(*words)` to print a line, `park()` to wait until it is told to go on or killed, and `fork_child()`
    to leave a child that does nothing and lives on when the script is killed.

    Attributes:
        pid: of the process.
        child: process id of the forked child, once its line was read.
    """

    def __init__(self, code: str, *arguments: str) -> None:
        """Start it.

        Args:
            code: the script.
            *arguments: its `sys.argv[1:]`, e.g. a DSN and a name.
        """
        self._popen = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.pid = self._popen.pid
        self.child: int | None = None
        self._unread = b""

    def wait_for(self, line: str, deadline: float = 30) -> None:
        """Read what it says until it says this line.

        Raises:
            AssertionError: it ended or said something else for too long.
        """
        end = time.monotonic() + deadline
        while (said := self.read_line(end - time.monotonic())) != line:
            pass
        assert said == line

    def read_line(self, deadline: float = 30) -> str:
        """Return the next line that it says.

        Raises:
            AssertionError: it ended or said nothing in time.
        """
        output, end = self._popen.stdout, time.monotonic() + deadline
        while b"\n" not in self._unread:
            ready, _, _ = select.select([output], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"the script said nothing within {deadline:.0f} s"
            piece = os.read(output.fileno(), 4096)
            assert piece, f"the script ended, with exit code {self._popen.wait()}"
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        words = line.decode().split()
        if words[:1] == ["child"]:
            self.child = int(words[1])
            return self.read_line(end - time.monotonic())
        return line.decode()

    def go_on(self) -> int:
        """End `park()` and return the exit code."""
        self._popen.stdin.close()
        return self._popen.wait(15)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal, and wait for the end if it is SIGKILL."""
        self._popen.send_signal(number)
        if number == signal.SIGKILL:
            self._popen.wait()

    def close(self) -> None:
        """Kill it and its child, whatever they do."""
        self.kill()
        if self.child is not None:
            with suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGKILL)
        self._popen.stdin.close()
        self._popen.stdout.close()


def family(pid: int) -> list[int]:
    """Return a process and its children, e.g. of a private server all its backends."""
    return [pid, *children_of(pid)]


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def alive(pid: int) -> bool:
    """Say whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
