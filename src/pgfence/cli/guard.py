"""The guard process of a command. It ends the command if the `pgfence run` that started the command is killed.

If `pgfence run` is killed with SIGKILL, it can no longer stop the command, and the server frees an advisory lock immediately and
a lease after its TTL. This small second process therefore sends SIGTERM to the command and to everything that the command
started, and SIGKILL after the grace period.

The guard is a separate program (see `supervise`) and imports nothing from pgfence, so that it starts quickly and
`pkill -f "pgfence run"` does not match it. When the command has ended, `pgfence run` ends the guard with SIGKILL.

`pgfence run` also uses the functions of this module to find and end processes when a lock is lost.
"""

from __future__ import annotations

import os
import sys
import time

# The command waits until this process has started. Importing `typing` and `subprocess` would double that time. `signal` and
# `contextlib` would add a third, because they import `enum` and `collections`, so this module uses `_signal`, which `signal` wraps.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable
else:
    import _signal as signal

FORWARDED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGWINCH,
)
READY = b"\0"
PAUSE = 0.05
# Seconds to continue after SIGKILL, because a process in an uninterruptible system call may not end at all.
PATIENCE = 10.0


class ProcessRow:
    """A line of the process table. `started` counts ticks since boot; it is 0 where only ps(1) is available."""

    __slots__ = ("group", "parent", "running", "started")

    def __init__(self, parent: int, group: int, started: int, running: bool) -> None:
        self.parent, self.group, self.started, self.running = parent, group, started, running


def list_processes() -> dict[int, ProcessRow]:
    """Return all processes, keyed by process id."""
    if not os.path.exists("/proc/self/stat"):  # noqa: PTH110 - pathlib would double the guard's start
        return _from_ps()
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                    # The program's name, which ends with the last parenthesis, may contain spaces and parentheses.
                    fields = file.read().rpartition(b") ")[2].split()
            except OSError:  # the process has ended
                continue
            running = fields[0] not in {b"Z", b"X"}
            found[int(name)] = ProcessRow(int(fields[1]), int(fields[2]), int(fields[19]), running)
    return found


def _from_ps() -> dict[int, ProcessRow]:
    import subprocess

    with subprocess.Popen(
        ["ps", "-A", "-o", "pid=,ppid=,pgid=,stat="], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as asked:
        assert asked.stdout is not None
        lines = [line.split() for line in asked.stdout]
    table = {
        int(pid): ProcessRow(int(parent), int(group), 0, not state.startswith("Z"))
        for pid, parent, group, state in lines
    }
    table.pop(asked.pid, None)
    return table


def list_descendants(roots: Iterable[int], table: dict[int, ProcessRow]) -> set[int]:
    """Return those of `roots` that exist, and all their descendants."""
    found: set[int] = set()
    more = table.keys() & set(roots)
    while more:
        found |= more
        more = {pid for pid, process in table.items() if process.parent in more} - found
    return found


class Ending:
    """Ends processes. Each process that is found gets SIGTERM and, once the grace period is over, SIGKILL.

    Args:
        find: a function that returns the processes that still run. It is called repeatedly, because they may start others.
        grace: seconds between SIGTERM and SIGKILL; `math.inf` for no SIGKILL.
        told: processes that have already received SIGTERM.
    """

    def __init__(self, find: Callable[[], set[int]], grace: float, told: Iterable[int] = ()) -> None:
        self._find = find
        self._told = set(told)
        self._beyond: set[int] = set()
        self._deadline = time.monotonic() + grace

    def step(self) -> bool:
        """Signal the processes that must get a signal now. Return whether to call `step` again."""
        late = time.monotonic() - self._deadline
        found = self._find() - self._beyond
        for pid in found if late >= 0 else found - self._told:
            self._send(pid, signal.SIGKILL if late >= 0 else signal.SIGTERM)
        self._told |= found
        return bool(found - self._beyond) and late < PATIENCE

    def _send(self, pid: int, signum: int) -> None:
        try:
            os.kill(pid, signum)
            os.kill(pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
        except ProcessLookupError:
            return
        except PermissionError:
            self._beyond.add(pid)


class _Left:
    """The processes that remain of a command whose `pgfence run` has died."""

    def __init__(self, command: int) -> None:
        self._command = command
        self._known = {command}

    def find(self) -> set[int]:
        table = list_processes()
        us = table[os.getpid()]
        heirs = {
            pid
            for pid, process in table.items()
            if process.group == self._command
            # At a terminal, the group is that of the job, which may include other programs of a pipeline. An orphan of the
            # command has the same parent as this guard, and did not start before it. It may have started in the same tick.
            or (process.group == us.group and process.parent == us.parent and process.started >= us.started > 0)
        }
        self._known = list_descendants(self._known | heirs, table) - {os.getpid()}
        return {pid for pid in self._known if table[pid].running}


def main() -> None:
    """Report signals, and read which process to end. At the end of the input, end that process and what it started."""
    # At a terminal, the guard is in the process group of the shell's job. A signal that reaches it was sent to the group, so the
    # command already has it. The byte of each signal is sent directly to `pgfence run`.
    os.set_blocking(1, False)
    signal.set_wakeup_fd(1, warn_on_full_buffer=False)
    for signum in FORWARDED:
        signal.signal(signum, lambda _signum, _frame: None)
    command = 0
    os.write(1, READY)
    # Only `pgfence run` holds the other end of this pipe, so end of file means that it died.
    while words := os.read(0, 64).split():
        # A number is the process to end. A question mark requests all reports so far, and the READY byte follows them.
        command = next((int(word) for word in words if word.isdigit()), command)
        if b"?" in words:
            os.write(1, READY)
    if command:
        ending = Ending(_Left(command).find, float(sys.argv[1]))
        while ending.step():
            time.sleep(PAUSE)
