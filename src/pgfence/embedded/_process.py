"""Run one server process that never outlives this process and is not ended by a Ctrl-C meant for this process."""

from __future__ import annotations

import functools
import os
import pwd
import shutil
import signal
import subprocess
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Mode: TypeAlias = Literal["fast", "immediate"]

_NAMESPACE = ("unshare", "-U", "--map-user=1000", "--map-group=1000", "--")
_DEATH_SIGNAL = ("setpriv", "--pdeathsig", "INT", "--")
_WATCHDOG = 'read line; kill -INT "$0"'
_ESCALATION = {
    "fast": ((signal.SIGINT, 10.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)),
    "immediate": ((signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0)),
}


@functools.cache
def _works(prefix: tuple[str, ...]) -> bool:
    if shutil.which(prefix[0]) is None:
        return False
    return subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0


def find_other_user() -> pwd.struct_passwd | None:
    """Return the OS user that must run the server in place of root, or None if this process can run it, perhaps in a namespace."""
    if os.geteuid() != 0 or _works(_NAMESPACE):
        return None
    return pwd.getpwnam("nobody")


class ProcessOptions(TypedDict, total=False):
    """The arguments of `Popen` for a PostgreSQL binary."""

    env: dict[str, str]
    stdin: int
    cwd: str
    user: int
    group: int
    extra_groups: list[int]


def build_command(words: Sequence[str | Path]) -> tuple[list[str | Path], ProcessOptions]:
    """Return the command and the arguments of `Popen` that run a PostgreSQL binary as a user other than root."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_"))}
    environment |= {"LC_ALL": "C", "TZ": "UTC"}
    options: ProcessOptions = {"env": environment, "stdin": subprocess.DEVNULL, "cwd": "/"}
    if user := find_other_user():
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    prefix = _NAMESPACE if os.geteuid() == 0 and user is None else ()
    return [*prefix, *words], options


class ServerProcess:
    """A server process, started by the constructor. It inherits the descriptor `keep_open`, and its output is appended to `log`."""

    def __init__(
        self, words: Sequence[str | Path], log: Path, keep_open: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.ended = threading.Event()
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._environment = environment or {}
        started: Future[subprocess.Popen[bytes]] = Future()
        # The kernel sends the death signal when the *thread* that started the child ends, so a long-lived thread starts it.
        keeper = threading.Thread(target=self._keep, args=(words, log, keep_open, started), daemon=True)
        keeper.name = "pgfence-embedded"
        keeper.start()
        self._popen = started.result()
        self.pid = self._popen.pid

    def _keep(
        self, words: Sequence[str | Path], log: Path, keep_open: int, started: Future[subprocess.Popen[bytes]]
    ) -> None:
        try:
            popen = self._start(words, log, keep_open)
        except Exception as error:
            started.set_exception(error)
            return
        started.set_result(popen)
        popen.wait()
        if self._watchdog is not None:
            self._watchdog.kill()
            self._watchdog.communicate()
        self.ended.set()

    def _start(self, words: Sequence[str | Path], log: Path, keep_open: int) -> subprocess.Popen[bytes]:
        words, options = build_command([*(_DEATH_SIGNAL if _works(_DEATH_SIGNAL) else ()), *words])
        options["env"] = {**options.get("env", {}), **self._environment}
        with log.open("ab") as output:
            # The server runs in a separate session, because Ctrl-C in the terminal is for this process, which still needs the
            # server to clean up.
            popen = subprocess.Popen(
                words,
                stdout=output,
                stderr=output,
                pass_fds=(keep_open,),
                start_new_session=True,
                **options,
            )
        if not _works(_DEATH_SIGNAL):
            # The pipe is closed when this process dies.
            self._watchdog = subprocess.Popen(
                ["/bin/sh", "-c", _WATCHDOG, str(popen.pid)], stdin=subprocess.PIPE, start_new_session=True
            )
        return popen

    def stop(self, mode: Mode = "fast") -> None:
        """Stop the server and wait until it has ended, with stronger signals if it takes too long.

        The mode "immediate" is like a crash.
        """
        for number, patience in _ESCALATION[mode]:
            if not self.ended.is_set():
                self._popen.send_signal(number)
            if self.ended.wait(patience):
                return
        raise RuntimeError(f"PostgreSQL with process id {self.pid} did not stop, even after SIGKILL")
