"""Run a command under a lock: start it, stop it if the lock is lost, and release the lock when it has ended."""

from __future__ import annotations

import math
import shutil
import signal
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pgfence._process.clock import clock
from pgfence.cli.codes import Code
from pgfence.cli.locks import VARIABLES, build_variables, find_repeated_release, give_back
from pgfence.cli.supervise import Interrupted
from pgfence.errors import LockLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pgfence._api.handles import Held
    from pgfence.cli.report import Console, Report
    from pgfence.cli.supervise import Ended, Supervisor

# A script can read from this variable whether it runs under a lock, and under which one.
NAME_VARIABLE = "PGFENCE_NAME"
_POLL = 0.1
PATIENCE = 0.5
"""The longest wait, in seconds, until a line can be printed, because a command, its lock or an election waits meanwhile."""


class OnLost(StrEnum):
    """What to do with the command when its lock is lost."""

    STOP = "stop"
    WARN = "warn"


class GuardedCommand(NamedTuple):
    """The command, the name of its lock, and what to do when the lock is lost.

    `grace` is the time between SIGTERM and SIGKILL, in seconds, and `noun` is the word for the lock in messages.
    """

    name: str
    command: Sequence[str]
    grace: float
    on_lost: OnLost = OnLost.STOP
    noun: str = "lock"

    @property
    def hold(self) -> str:
        """Noun and name, for messages."""
        return f"{self.noun} {self.name!r}"


def report_interrupted(report: Report, stop: Interrupted, when: str = "before the command was started") -> Report:
    """Return the report of a run that was ended by a signal while no command was running."""
    name = signal.Signals(stop.signum).name
    return report.end("interrupted", Code.SIGNAL + stop.signum, f"received {name} {when}")


class GuardedRun:
    """The command and its lock, from start to release."""

    def __init__(
        self,
        job: GuardedCommand,
        speaker: Console,
        report: Report,
        held: Held | None,
        release: Callable[[bool], None] | None = None,
    ) -> None:
        """Prepare a run of the command, which fills in the report.

        If `held` is None, the command runs without a lock. Otherwise, the caller must report the loss of the lock to the
        supervisor. `release` replaces `give_back`: its argument says whether the command succeeded, and it raises LockLostError if
        the lock was lost.
        """
        self._job = job
        self._speaker = speaker
        self._report = report
        self._held = held
        self._give_back = release
        self.ended: Ended | None = None
        """How the command ended, or None if it was not started."""
        report.locked = held is not None

    def run(self, supervisor: Supervisor, environ: Mapping[str, str]) -> Report:
        """Run the command, release the lock and return the report."""
        # Within the command of another `pgfence`, the environment has that one's token, which belongs to another name.
        inherited = {name: value for name, value in environ.items() if name not in VARIABLES}
        environment = {**inherited, NAME_VARIABLE: self._job.name, **build_variables(self._held)}
        start = clock()
        try:
            ended = self.ended = supervisor.run(
                self._job.command,
                environment,
                on_loss=self._on_loss,
                on_continue=lambda: self._on_continue(supervisor),
            )
        except Interrupted as stop:
            self._release(well=False)
            return report_interrupted(self._report, stop)
        except OSError as error:
            self._release(well=False)
            return self._report_not_started(error)
        self._report.ran = clock() - start
        self._report.command_code = ended.code
        self._speaker.trace(f"the command ended with exit code {ended.code} after {self._report.ran:.3f} s", PATIENCE)
        lost = self._release(well=ended.code == 0)
        if not lost and ended.code == 0 and not self._is_recorded(supervisor):
            return self._report_unrecorded()
        return self._report_end(ended.code, stopped=ended.stopped, lost=lost)

    def _is_recorded(self, supervisor: Supervisor) -> bool:
        """Wait until the server has responded to the release of a slot, or the TTL is over. Return whether it has responded.

        Without the wait, this process could end before the slot is recorded as done, and the command could run again.
        """
        repeated = find_repeated_release(self._held)
        if repeated is None:
            return True
        left = max(0.0, repeated.until - clock())
        self._speaker.tell(
            f"the slot of {self._job.name!r} is not recorded as done yet: trying again for up to {left:.0f} s"
        )
        with suppress(Interrupted):
            while repeated.answer is None and (left := repeated.until - clock()) > 0:
                supervisor.wait_for(lambda: repeated.answer is not None, min(left, _POLL))
        return repeated.answer is not None

    def _report_unrecorded(self) -> Report:
        self._report.loss_reason = "expired"
        return self._report.end(
            "lost",
            Code.OK if self._job.on_lost is OnLost.WARN else Code.LOST,
            f"the command succeeded, but the server did not confirm that the slot of {self._job.name!r} is recorded as done:"
            " another attempt may run the command again",
        )

    def _report_end(self, code: int, *, stopped: bool, lost: bool) -> Report:
        if not lost:
            return self._report.end("ran", code)
        if self._job.on_lost is OnLost.WARN:
            return self._report.end("lost", code)
        why = self._report.loss_reason
        late = f"the {self._job.hold} was lost ({why}) before it was released: the command may have finished after the loss"
        return self._report.end("lost", Code.LOST, None if stopped else late)

    def _on_continue(self, supervisor: Supervisor) -> None:
        """Check whether a lease has expired while this process was stopped."""
        if self._held is not None and self._held.lost:
            supervisor.lose()

    def _on_loss(self) -> bool:
        assert self._held is not None
        lost = f"the {self._job.hold} was lost ({self._held.loss_reason})"
        if self._job.on_lost is OnLost.WARN:
            self._speaker.warn(
                f"{lost}: other hosts may run the same command now. The command continues because of --on-lost=warn",
                PATIENCE,
            )
            return False
        self._speaker.warn(
            f"{lost}: stopping the command{_describe_kill(self._job.grace)}",
            PATIENCE,
        )
        return True

    def _release(self, *, well: bool) -> bool:
        """Release the lock and return whether it had been lost before."""
        if self._held is None:
            return False
        try:
            if self._give_back is not None:
                self._give_back(well)
            else:
                give_back(self._held, well=well)
        except LockLostError as error:
            self._report.loss_reason = error.reason
            return True
        self._speaker.trace(f"released {self._job.name!r}", PATIENCE)
        return False

    def _report_not_started(self, error: OSError) -> Report:
        program = self._job.command[0]
        # An unreadable directory on PATH turns "not found" into "permission denied".
        if "/" not in program and shutil.which(program) is None:
            why = "there is no such program on PATH"
            return self._report.end("not started", Code.NOT_FOUND, f"cannot run {program!r}: {why}")
        code, why = Code.NOT_EXECUTABLE, error.strerror or str(error)
        if isinstance(error, FileNotFoundError):
            code = Code.NOT_FOUND
            if Path(shutil.which(program) or program).exists():
                why = "the file exists, but the interpreter in its first line, or its loader, does not"
        return self._report.end("not started", code, f"cannot run {program!r}: {why}")


def _describe_kill(grace: float) -> str:
    return "" if math.isinf(grace) else f", with SIGKILL in {grace:g} s if it has not ended by then"
