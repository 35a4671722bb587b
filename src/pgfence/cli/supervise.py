"""Run one command for as long as we may: signals, terminal, loss of the lock, end of the command.

What is promised:

- the command inherits stdin, stdout, stderr and nothing else of ours; its exit status comes back as shells count it;
- without a terminal it leads a process group of its own, and HUP, INT, QUIT, TERM, USR1, USR2, CONT and WINCH that reach
  us go to that whole group. A signal that was ignored when we started (nohup) stays ignored for both;
- in the foreground of a terminal it stays in our group, as under time(1) or flock(1): the terminal itself tells every
  process of the job about Ctrl-C, Ctrl-Z and a new window size, so we do not pass those on a second time, and job
  control and pipelines work. Then only the command itself is signalled by us, not what it started;
- when told of a loss, and the caller says stop: SIGTERM (and CONT, for it may be stopped), SIGKILL after the grace;
- once the command was told to end, by a signal or for a loss, we also wait for the rest of its group: a shell dies of
  SIGTERM at once while the program it started still cleans up. At most for the grace; after a loss SIGKILL then ends it;
- killed with SIGKILL ourselves, we leave a guard behind that does the same to the group (see `guard`);
- as PID 1 of a container we reap the orphans that come to us, and signals work though PID 1 has no default actions.

What is not promised: that processes which the command leaves behind on a normal end, or which left its group by setsid,
are stopped or waited for; that a command of another user (sudo) can be signalled at all; protection in the first
millisecond, before the guard has been told whom to end.

Nothing here polls while the command runs: signals, the end of the command and a loss all arrive as bytes in one pipe.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pgfence.cli import guard
from pgfence.timing import clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType, TracebackType

STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
FORWARDED = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)
BY_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGCONT, signal.SIGWINCH)
PAUSE = 0.05
LONGEST_SLEEP = 3600.0


class Interrupted(BaseException):
    """A signal asked us to stop while there was no command yet to pass it to. Like KeyboardInterrupt, no Exception."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Attributes:
        code: its exit status; 128 + N if signal N ended it.
        signal: that N.
        stopped: it was stopped because of a loss.
    """

    code: int
    signal: int | None
    stopped: bool


def in_foreground() -> bool:
    """Return whether there is a terminal whose keys reach this process."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


class _Guard:
    """Our end of the guard's pipe."""

    def __init__(self, grace: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, repr(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def watch(self, target: int) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(b"%d\n" % target)
            self.process.stdin.flush()

    def dismiss(self) -> None:
        self.process.kill()
        with self.process:
            pass


class _Job:
    """The command, and what it started."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, own_group: bool) -> None:
        self.process = subprocess.Popen(command, env=env, process_group=0 if own_group else None)
        self.target = -self.process.pid if own_group else self.process.pid

    @property
    def ended(self) -> bool:
        return self.process.returncode is not None

    def send(self, signum: int) -> None:
        """Send a signal to all of it, as far as that is permitted."""
        if self.target < 0 or not self.ended:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.target, signum)

    def gone(self) -> bool:
        """Return whether nothing of it is left that we could know of."""
        if not self.ended or self.target > 0:
            return self.ended
        try:
            os.kill(self.target, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False


def _reap(ours: Sequence[subprocess.Popen[bytes]]) -> None:
    """Notice who of ours has ended; as PID 1 also collect the orphans of the whole container."""
    if os.getpid() == 1:
        with suppress(ChildProcessError):
            while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                known = [process for process in ours if process.pid == child.si_pid]
                if known:
                    known[0].poll()
                else:
                    os.waitpid(child.si_pid, 0)
    for process in ours:
        process.poll()


class Supervisor:
    """Takes the signals of this process while it is entered, and runs commands.

    For the main thread only, because signals are. `lose` may be called from any thread, also too late.

    Args:
        grace: seconds between SIGTERM and SIGKILL; `math.inf` for no SIGKILL.
        own_group: whether a command leads a group of its own; None asks whether a terminal is at the front of us.
    """

    def __init__(self, *, grace: float, own_group: bool | None = None) -> None:
        self._grace = grace
        self._own_group = not in_foreground() if own_group is None else own_group
        self._raising = False
        self._lost = False
        self._lock = threading.Lock()
        self._open = False

    def __enter__(self) -> Self:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self._open = True
        taken = [s for s in FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
        # The command would not come back to a parent that ignores SIGCHLD, as some daemons leave it.
        self._before = {s: signal.signal(s, self._on_signal) for s in (*taken, signal.SIGCHLD)}
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        with self._lock:
            self._open = False
            os.close(self._reader)
            os.close(self._writer)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._raising and signum in STOPPING:
            self._raising = False
            raise Interrupted(signum)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let HUP, INT, QUIT and TERM raise `Interrupted` in the body. Outside of it they wait for the command."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def lose(self) -> None:
        """Tell that the lock is lost. From any thread; returns at once."""
        self._lost = True
        with self._lock:
            if self._open:
                with suppress(BlockingIOError):
                    os.write(self._writer, b"\0")

    def run(self, command: Sequence[str], env: Mapping[str, str], *, on_loss: Callable[[], bool]) -> Ended:
        """Run a command to its end.

        Args:
            command: program and arguments.
            env: its whole environment.
            on_loss: called once, in this thread, when the lock is lost while the command runs; returns whether to stop it.

        Raises:
            Interrupted: a signal asked to stop before the command was started.
            OSError: the command could not be started; nothing runs.
        """
        for signum in self._drain():
            if signum in STOPPING:
                raise Interrupted(signum)
        guarding = _Guard(self._grace)
        try:
            job = _Job(command, env, own_group=self._own_group)
        except BaseException:
            guarding.dismiss()
            raise
        guarding.watch(job.target)
        stopped = self._until_over(job, guarding, on_loss)
        # Any exception above leaves the guard in place: its pipe ends with us, and it ends the command.
        guarding.dismiss()
        status: int = job.process.returncode
        return Ended(128 - status, -status, stopped) if status < 0 else Ended(status, None, stopped)

    def _until_over(self, job: _Job, guarding: _Guard, on_loss: Callable[[], bool]) -> bool:
        told = stopped = asked = False
        patience = math.inf
        while True:
            if self._lost and not asked:
                asked = True
                if on_loss():
                    stopped = True
                    job.send(signal.SIGTERM)
                    job.send(signal.SIGCONT)
                    patience = clock() + self._grace
            _reap((job.process, guarding.process))
            if job.ended:
                if job.gone() or not (told or stopped):
                    return stopped
                patience = min(patience, clock() + self._grace)
            if clock() >= patience:
                if stopped:
                    job.send(signal.SIGKILL)
                if job.ended:
                    return stopped
                patience = math.inf
            for signum in self._wait(patience, brisk=job.ended):
                told = told or signum in STOPPING
                self._forward(job, signum)

    def _forward(self, job: _Job, signum: int) -> None:
        if signum in FORWARDED and (job.target < 0 or signum not in BY_TERMINAL):
            job.send(signum)

    def _wait(self, until: float, *, brisk: bool) -> bytes:
        # Who is left in a group can only be asked: once the command itself has ended, and not for longer than the grace.
        longest = PAUSE if brisk else LONGEST_SLEEP
        select.select([self._reader], [], [], max(0.0, min(until - clock(), longest)))
        return self._drain()

    def _drain(self) -> bytes:
        try:
            return os.read(self._reader, 4096)
        except BlockingIOError:
            return b""
