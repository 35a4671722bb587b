"""`pgfence run`: acquire the lock, run the command, release the lock; and report each way of failing."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from pgfence._api.decorators import find_unsafe_time
from pgfence._process.clock import clock
from pgfence.cli.codes import Code
from pgfence.cli.locks import Terms, build_variables, give_back, lock_on, note
from pgfence.cli.report import Report, as_data, describe
from pgfence.cli.server import describe_pooler, find_engine, settle
from pgfence.cli.supervise import Interrupted, Supervisor
from pgfence.errors import (
    CapacityError,
    LockLostError,
    LockTimeoutError,
    PgfenceError,
    PoolerError,
    StandbyError,
    UnreachableError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Engine

    from pgfence._api.handles import Held
    from pgfence.advisory import AdvisoryLock
    from pgfence.cli.report import Console
    from pgfence.lease import Lease
    from pgfence.once import Once

# Lets a script check that it runs under a lock, and under which one.
NAME_VARIABLE = "PGFENCE_NAME"


class OnLost(StrEnum):
    """What to do with the command when its lock is lost."""

    STOP = "stop"
    WARN = "warn"


class OnUnreachable(StrEnum):
    """What to do when no server can be reached."""

    FAIL = "fail"
    SKIP = "skip"
    RUN = "run"


class Pooler(StrEnum):
    """The kind of pooler in front of the server, as the user declares it."""

    AUTO = "auto"
    DIRECT = "direct"
    SESSION = "session"
    TRANSACTION = "transaction"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The options of one call; times in seconds."""

    name: str
    command: Sequence[str]
    dsn: str | None
    engine: str | None
    namespace: str | None
    schema: str | None
    prefix: str | None
    pooler: Pooler | None
    wait: float
    busy_code: int
    on_lost: OnLost
    on_unreachable: OnUnreachable
    grace: float
    terms: Terms = field(default_factory=Terms)


def run(options: RunOptions, speaker: Console, environ: Mapping[str, str]) -> Report:
    """Run one command under a lock and return the report.

    Raises:
        MisuseError: the name, the engine or the URL cannot be used.
    """
    report = Report(options.name)
    with Supervisor(grace=options.grace) as supervisor:
        try:
            with supervisor.allow_interrupts():
                held = _acquire(options, speaker, environ, report)
        except Interrupted as stop:
            return _report_interrupted(report, stop)
        except LockTimeoutError as error:
            return _report_busy(options, report, error)
        except UnreachableError as error:
            if options.on_unreachable is not OnUnreachable.RUN or not error.retryable:
                return _report_unreachable(options, report, error)
            speaker.warn(
                f"{error}. Running WITHOUT the lock because of --on-unreachable=run: other hosts may run the same"
                " command now"
            )
            held = None
        except PgfenceError as error:
            if isinstance(error, CapacityError):
                return report.end("unavailable", Code.UNAVAILABLE, str(error))
            from pgfence.once import SlotZoneError

            if isinstance(error, SlotZoneError):
                return report.end("zone", Code.TIME, str(error))
            return report.end("refused", Code.REFUSED, str(error))
        environment = {**environ, NAME_VARIABLE: options.name, **build_variables(held)}
        return _GuardedRun(options, speaker, report, held).run(supervisor, environment)


def _find_engine(options: RunOptions, environ: Mapping[str, str]) -> Engine:
    engine = find_engine(dsn=options.dsn, path=options.engine, environ=environ)
    pooler = None if options.pooler is None else options.pooler.value
    settle(engine, pooler=pooler, schema=options.schema, prefix=options.prefix)
    return engine


def _acquire(options: RunOptions, speaker: Console, environ: Mapping[str, str], report: Report) -> Held:
    engine = _find_engine(options, environ)
    lock = lock_on(engine, options.name, options.namespace, options.terms, report)
    start = clock()
    try:
        held = _take(lock, options, speaker, start)
    except PoolerError as error:
        raise describe_pooler(engine, error) from error
    finally:
        report.waited = clock() - start
    note(held, report)
    speaker.trace(f"acquired {options.name!r} after {report.waited:.3f} s")
    return held


def _take(lock: Once | Lease | AdvisoryLock[Held], options: RunOptions, speaker: Console, start: float) -> Held:
    try:
        return lock.acquire(timeout=0)
    except LockTimeoutError as error:
        from pgfence.once import SlotOverError

        if options.wait <= 0 or isinstance(error, SlotOverError):
            raise
        speaker.tell(f"waiting for {options.name!r}, held by {describe(error.holders)}")
    except (UnreachableError, StandbyError) as error:
        if options.wait <= 0 or not error.retryable:
            raise
        speaker.tell(f"waiting for {options.name!r}: {error}")
    timeout = _seconds_left(options, start)
    while True:
        try:
            return lock.acquire(timeout=timeout)
        except UnreachableError as error:
            # The holder that was seen may still be running without the server. The command must not start before its TTL is over.
            runs = options.on_unreachable is OnUnreachable.RUN and error.retryable
            timeout = find_unsafe_time(error) if runs else 0.0
            if not timeout:
                raise


def _seconds_left(options: RunOptions, start: float) -> float:
    return max(0.0, options.wait - (clock() - start))


def _report_busy(options: RunOptions, report: Report, error: LockTimeoutError) -> Report:
    from pgfence.once import SlotClockError, SlotOverError

    report.holders = [as_data(holder) for holder in error.holders]
    if isinstance(error, SlotOverError):
        report.slot = error.slot.isoformat()
    if isinstance(error, SlotClockError):
        return report.end("clock", Code.TIME, str(error))
    if isinstance(error, SlotOverError):
        return report.end("done", options.busy_code, str(error))
    waited = f"; waited {options.wait:g} s" if options.wait > 0 else ""
    return report.end("busy", options.busy_code, f"{options.name!r} is held by {describe(error.holders)}{waited}")


def _report_interrupted(report: Report, stop: Interrupted) -> Report:
    name = signal.Signals(stop.signum).name
    return report.end("interrupted", Code.SIGNAL + stop.signum, f"received {name} before the command was started")


def _report_unreachable(options: RunOptions, report: Report, error: UnreachableError) -> Report:
    if options.on_unreachable is OnUnreachable.SKIP and error.retryable:
        return report.end("skipped", Code.OK, f"{error}. The command was not run because of --on-unreachable=skip")
    return report.end("unavailable", Code.UNAVAILABLE, str(error))


class _GuardedRun:
    """The command and its lock, from start to release."""

    def __init__(self, options: RunOptions, speaker: Console, report: Report, held: Held | None) -> None:
        self._options = options
        self._speaker = speaker
        self._report = report
        self._held = held
        report.locked = held is not None

    def run(self, supervisor: Supervisor, environment: Mapping[str, str]) -> Report:
        if self._held is not None:
            self._held.on_lost(supervisor.lose)
        start = clock()
        try:
            ended = supervisor.run(
                self._options.command,
                environment,
                on_loss=self._on_loss,
                on_continue=lambda: self._on_continue(supervisor),
            )
        except Interrupted as stop:
            self._release(well=False)
            return _report_interrupted(self._report, stop)
        except OSError as error:
            self._release(well=False)
            return self._report_not_started(error)
        self._report.ran = clock() - start
        self._report.command_code = ended.code
        self._speaker.trace(f"the command ended with {ended.code} after {self._report.ran:.3f} s")
        return self._report_end(ended.code, stopped=ended.stopped, lost=self._release(well=ended.code == 0))

    def _report_end(self, code: int, *, stopped: bool, lost: bool) -> Report:
        if not lost:
            return self._report.end("ran", code)
        if self._options.on_lost is OnLost.WARN:
            return self._report.end("lost", code)
        name, why = self._options.name, self._report.loss_reason
        late = f"the lock {name!r} was lost ({why}) before it was released: the command may have finished without it"
        return self._report.end("lost", Code.LOST, None if stopped else late)

    def _on_continue(self, supervisor: Supervisor) -> None:
        """Check whether a lease has expired while this process was stopped."""
        if self._held is not None and self._held.lost:
            supervisor.lose()

    def _on_loss(self) -> bool:
        assert self._held is not None
        lost = f"the lock {self._options.name!r} was lost ({self._held.loss_reason})"
        if self._options.on_lost is OnLost.WARN:
            self._speaker.warn(
                f"{lost}: other hosts may run the same command now. The command continues because of --on-lost=warn"
            )
            return False
        self._speaker.warn(f"{lost}: stopping the command; SIGKILL in {self._options.grace:g} s if it does not end")
        return True

    def _release(self, *, well: bool) -> bool:
        """Release the lock and return whether it was lost before."""
        if self._held is None:
            return False
        try:
            give_back(self._held, well=well)
        except LockLostError as error:
            self._report.loss_reason = error.reason
            return True
        self._speaker.trace(f"released {self._options.name!r}")
        return False

    def _report_not_started(self, error: OSError) -> Report:
        program = self._options.command[0]
        # An unreadable folder on PATH turns "not found" into "permission denied".
        if "/" not in program and shutil.which(program) is None:
            return self._report.end("not started", Code.NOT_FOUND, f"{program}: not found on PATH")
        code = Code.NOT_FOUND if isinstance(error, FileNotFoundError) else Code.NOT_EXECUTABLE
        return self._report.end("not started", code, f"{program}: {error.strerror}")
