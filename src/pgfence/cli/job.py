"""Start the supervised command, and signal, list and reap the command and the processes that it started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pgfence.cli.guard import list_descendants, list_processes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pgfence.cli.guard import ProcessRow


def _list_children() -> frozenset[int]:
    """Return the ids of the child processes of this process."""
    lists = list(Path("/proc/self/task").glob("*/children"))
    if not lists:  # not Linux, or a kernel without this option: slower
        return frozenset(pid for pid, process in list_processes().items() if process.parent == os.getpid())
    found: set[int] = set()
    for file in lists:
        with suppress(OSError):  # the thread has ended
            found.update(map(int, file.read_text(encoding="ascii").split()))
    return frozenset(found)


class Job:
    """The command, and the processes that it started."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], *, own_group: bool, descriptors: Sequence[int]
    ) -> None:
        command, env = _with_sockets(command, env)
        self._strangers = _list_children()
        self._own_group = own_group
        self.process = subprocess.Popen(command, env=env, process_group=0 if own_group else None, pass_fds=descriptors)

    @property
    def ended(self) -> bool:
        """Whether the command has ended. Processes that it started may still run."""
        return self.process.returncode is not None

    @property
    def group(self) -> int:
        """The process group of the command."""
        return self.process.pid if self._own_group else os.getpgrp()

    def send(self, signum: int) -> None:
        """Send a signal to the command and to what it started in its process group, as far as permissions allow."""
        for target in (-self.group,) if self._own_group else self.list_group():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(target, signum)

    def list_group(self) -> set[int]:
        """Return the running processes of the command that are in the command's process group."""
        table = list_processes()
        return {pid for pid in self._list_all(table) if table[pid].group == self.group}

    def list_everything(self) -> set[int]:
        """Return all running processes of the command."""
        return self._list_all(list_processes())

    def _list_all(self, table: dict[int, ProcessRow]) -> set[int]:
        us = os.getpid()
        # Orphans are now children of this process; its other children, such as the guard, existed before the command.
        roots = {pid for pid, process in table.items() if process.parent == us} - self._strangers
        if self._own_group:
            roots |= {pid for pid, process in table.items() if process.group == self.group}
        return {pid for pid in list_descendants(roots, table) if table[pid].running}

    def reap(self, guarding: subprocess.Popen[bytes]) -> None:
        """Reap the child processes that have ended, including adopted orphans."""
        with suppress(ChildProcessError):
            while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                known = [process for process in (self.process, guarding) if process.pid == child.si_pid]
                if known:
                    known[0].poll()
                elif child.si_pid in self._strangers:
                    break  # started by other code, which reaps the process itself
                else:
                    os.waitpid(child.si_pid, 0)
        self.process.poll()
        guarding.poll()


_EXEC_WITH_OUR_NUMBER = (
    "import os, signal, sys; signal.signal(signal.SIGPIPE, signal.SIG_DFL); signal.signal(signal.SIGXFSZ, signal.SIG_DFL);"
    " os.environ['LISTEN_PID'] = str(os.getpid()); os.execvp(sys.argv[1], sys.argv[1:])"
)


def _with_sockets(command: Sequence[str], env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return the command and its environment, adapted so that it accepts the sockets that systemd opened for this process.

    A program accepts these sockets only if LISTEN_PID is its own process id.
    """
    if env.get("LISTEN_PID") != str(os.getpid()) or shutil.which(command[0], path=env.get("PATH")) is None:
        return command, env
    # systemd also compares the inode of the process if this variable is set.
    kept = {name: value for name, value in env.items() if name != "LISTEN_PIDFDID"}
    return [sys.executable, "-I", "-S", "-c", _EXEC_WITH_OUR_NUMBER, *command], kept
