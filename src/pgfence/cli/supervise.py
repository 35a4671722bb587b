"""Run one command while the lock is held, and handle signals, the terminal, the loss of the lock and the end of the command.

Guarantees:

- The command gets the descriptors that were open and inheritable when this process started, and none that this process opened,
  except the null device in place of a closed stdin, stdout or stderr (see `running.fill_standard_descriptors`).
- The exit status of the command is returned as in shells.
- Each HUP, INT, QUIT, TERM, USR1, USR2, CONT or WINCH signal that this process receives is delivered exactly once to the
  command and to what it started in its process group. A signal that was ignored at the start (nohup) stays ignored for this
  process and the command.
- Without a terminal, the command leads its own process group, to which signals are passed on.
- With a terminal, the command stays in the group of this process, as under time(1) or flock(1), so that the shell's job control,
  pipelines and scripts work as usual.
- When the lock is lost and the caller wants to stop the command, the command and everything that it started get SIGTERM (and
  CONT, because they may be stopped), and SIGKILL after the grace period. On Linux, this process is the reaper of the orphans, so
  it also finds orphans that left the group or session.
- When this process has received HUP, INT, QUIT or TERM, the processes that the command left behind are ended in the same
  way. After HUP or TERM, this applies to all of these processes; after INT or QUIT alone, only to those in the command's
  process group.
- If this process is killed with SIGKILL, a guard ends the command and what it started (see `guard`).
- As PID 1 of a container, this process reaps orphans, and signals work although PID 1 has no default actions.

Limitations: processes that the command leaves behind on a normal end are neither stopped nor waited for, unless the caller asks
for that (`ends_rest`). A command of another user (sudo) cannot be signalled. The guard does not find an orphan that left the
command's process group; on macOS, this process does not find it either, because PID 1 is the orphan's new parent. The guard gets
the command's process id immediately after the start; if this process is killed before that, the command continues.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, Self

from pgfence._process.clock import clock
from pgfence.cli import guard
from pgfence.cli.guard import FORWARDED, PAUSE, Ending
from pgfence.cli.job import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType, TracebackType

STOPPING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
LONGEST_PAUSE = 0.5
LONGEST_SLEEP = 3600.0
# A signal to the group reaches this process and the guard within microseconds, but on a loaded machine one may run later.
SAME_SIGNAL = 0.5
ANSWER = 5.0
PR_SET_CHILD_SUBREAPER = 36
# The guard is imported, not run as a script, because Python compiles a script at each start.
_START_GUARD = "import sys; sys.path.append(sys.argv[2].rpartition('/')[0]); import guard; guard.main()"


class Interrupted(BaseException):
    """A signal asked this process to stop while no command was running. Like KeyboardInterrupt, it is not an `Exception`."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Ended(NamedTuple):
    """How a command ended.

    Attributes:
        code: its exit status; 128 + N if signal N ended it.
        signal: the signal that ended it, or None if no signal did.
        stopped: whether it was stopped because of a loss.
        received: those of HUP, INT, QUIT and TERM that this process received while the command ran.
    """

    code: int
    signal: int | None
    stopped: bool
    received: frozenset[int] = frozenset()


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def list_inherited() -> tuple[int, ...]:
    """Return the inheritable descriptors above stderr. When this process starts, these are the descriptors of its caller."""
    found = []
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            found = [int(name) for name in os.listdir(folder)]  # noqa: PTH208
            break
    kept = []
    for descriptor in found:
        with suppress(OSError):
            if descriptor > 2 and os.get_inheritable(descriptor):
                kept.append(descriptor)
    return tuple(kept)


def _wait_readable(descriptor: int, seconds: float) -> bool:
    # select() fails for descriptors above 1023, and the caller may have passed on a thousand.
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(1000 * seconds)))


def _adopt_orphans(*, wanted: bool) -> None:
    """Become the reaper of orphaned descendants, or stop being the reaper. Linux only."""
    # This process then finds processes that left the group or session of the command among its children.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


class _Guard:
    """Starts the guard, and holds this process's end of the guard's pipes."""

    def __init__(self, grace: float, *, in_our_group: bool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START_GUARD, repr(grace), guard.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=not in_our_group,
            cwd="/",
        )
        self._heard: dict[int, float] = {}
        # Wait until the guard has set its handlers. Before that, Ctrl-C would end it.
        self._read_reports()

    def watch(self, command: int) -> None:
        self._write(b"%d\n" % command)

    def on_signal(self, signum: int) -> bool:
        """Return whether a signal that has just reached this process has also reached the guard."""
        if self._write(b"?\n"):
            self._read_reports()
        return clock() - self._heard.get(signum, -SAME_SIGNAL) < SAME_SIGNAL

    def _write(self, line: bytes) -> bool:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(line)
            return True
        return False

    def _read_reports(self) -> None:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        until = clock() + ANSWER
        while _wait_readable(pipe, max(0.0, until - clock())):
            reports = os.read(pipe, 4096)
            self._heard.update(dict.fromkeys(reports, clock()))
            if not reports or guard.READY in reports:
                return

    def dismiss(self) -> None:
        self.process.kill()
        with self.process:
            pass


class Supervisor:
    """Handles the signals of this process inside the `with` block, and runs commands.

    Use it only in the main thread, because only that thread can set signal handlers. `lose` may be called from any thread, even
    after the block.

    Args:
        grace: seconds between SIGTERM and SIGKILL; `math.inf` for no SIGKILL.
        ends_rest: whether the processes that a command leaves behind are also ended after a normal end.
    """

    def __init__(self, *, grace: float, ends_rest: bool = False) -> None:
        self._grace = grace
        self._ends_rest = ends_rest
        self._own_group = not has_terminal()
        self._descriptors = list_inherited()
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
        # Some daemons start their children with SIGCHLD ignored. This process would then get no exit status of the command.
        self._before = {s: signal.getsignal(s) for s in (*taken, signal.SIGCHLD)}
        self._wakeup_before = self.handle_signals()
        return self

    def handle_signals(self) -> int:
        """Set the handlers, and return the previous wake-up descriptor.

        Call this again after running code of the user, such as the module of --engine, which may have set handlers of its own.
        """
        # The descriptor comes first. Otherwise, nothing would record a signal that arrives before it is set.
        before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in self._before:
            signal.signal(signum, self._on_signal)
        return before

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
    def allow_interrupts(self) -> Iterator[None]:
        """Let HUP, INT, QUIT and TERM raise `Interrupted` in the block, including signals that were received before it.

        Outside of the block, these signals are kept for the command.
        """
        try:
            self._raising = True
            self._raise_pending(self._drain())
            yield
        finally:
            self._raising = False

    def lose(self) -> None:
        """Report that the lock is lost. May be called from any thread; returns immediately."""
        self._lost = True
        self.wake()

    def forget_loss(self) -> None:
        """Prepare for another command, under another lock. After this, no thread may call `lose` for the previous lock."""
        self._lost = False

    def wake(self) -> None:
        """Make `wait_for` evaluate its condition. May be called from any thread; returns immediately."""
        with self._lock:
            if self._open:
                with suppress(BlockingIOError):
                    os.write(self._writer, b"\0")

    def wait_for(self, condition: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Wait until a condition is true, and return whether it is. The condition is evaluated after each `wake`.

        Raises:
            Interrupted: a signal asked to stop, now or since the end of the last command.
        """
        ends_at = clock() + seconds
        while True:
            self._raise_pending(self._drain())
            if condition():
                return True
            if (left := ends_at - clock()) <= 0:
                return False
            self._raise_pending(self._wait(min(left, LONGEST_SLEEP)))

    def _raise_pending(self, signals: bytes) -> None:
        for signum in signals:
            if signum in STOPPING:
                raise Interrupted(signum)

    def run(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        on_loss: Callable[[], bool],
        on_continue: Callable[[], object] = lambda: None,
    ) -> Ended:
        """Run a command to completion.

        Args:
            command: program and arguments.
            env: the whole environment of the command.
            on_loss: called once, in this thread, when the lock is lost while the command runs; returns whether to stop it.
            on_continue: called after SIGCONT, because this process may have been stopped. If it calls `lose`, the command gets
                SIGTERM before SIGCONT.

        Raises:
            Interrupted: a signal asked to stop before the command was started.
            OSError: the command could not be started; nothing runs.
        """
        guarding = _Guard(self._grace, in_our_group=not self._own_group)
        try:
            self._raise_pending(self._drain())
            _adopt_orphans(wanted=True)
            job = Job(command, env, own_group=self._own_group, descriptors=self._descriptors)
        except BaseException:
            guarding.dismiss()
            _adopt_orphans(wanted=False)
            raise
        guarding.watch(job.process.pid)
        stopped, received = self._wait_until_over(job, guarding, on_loss, on_continue)
        # An exception above leaves the guard running. Its pipe is closed when this process ends, and the guard then ends the
        # command.
        guarding.dismiss()
        _adopt_orphans(wanted=False)
        status: int = job.process.returncode
        if status < 0:
            return Ended(128 - status, -status, stopped, received)
        return Ended(status, None, stopped, received)

    def _wait_until_over(
        self, job: Job, guarding: _Guard, on_loss: Callable[[], bool], on_continue: Callable[[], object]
    ) -> tuple[bool, frozenset[int]]:
        told: set[int] = set()
        ending: Ending | None = None
        asked = stopped = False
        pause, signals = PAUSE, b""
        while True:
            if self._lost and not asked:
                asked = True
                if stopped := on_loss():
                    ending = Ending(job.list_everything, self._grace)
                    ending.step()
            # A signal to the whole group (Ctrl-C, a shell) has already reached the command. Only a signal to this process alone
            # is passed on. The guard is also in the group, so it shows whether a signal was sent to the group.
            for signum in signals:
                if signum in FORWARDED and (self._own_group or not guarding.on_signal(signum)):
                    job.send(signum)
                if signum in STOPPING:
                    told.add(signum)
            job.reap(guarding.process)
            if job.ended and ending is None:
                if not told and not self._ends_rest:
                    return stopped, frozenset()
                ending = self._wait_for_rest(job, told)
            left = ending is not None and ending.step()
            if job.ended and not left:
                return stopped, frozenset(told)
            signals = self._wait(pause if left else LONGEST_SLEEP)
            if signal.SIGCONT in signals:
                on_continue()
            pause = min(pause * 1.2, LONGEST_PAUSE)

    def _wait_for_rest(self, job: Job, told: set[int]) -> Ending:
        """Return an `Ending` for the processes that a command left behind."""
        everything = self._ends_rest or bool(told & {signal.SIGHUP, signal.SIGTERM})
        find = job.list_everything if everything else job.list_group
        return Ending(find, self._grace, job.list_group() if signal.SIGTERM in told else ())

    def _wait(self, longest: float) -> bytes:
        # One pipe reports signals, the end of the command (SIGCHLD) and a loss, so that nothing is polled.
        _wait_readable(self._reader, longest)
        return self._drain()

    def _drain(self) -> bytes:
        try:
            return os.read(self._reader, 4096)
        except BlockingIOError:
            return b""
