"""`pgfence run`: acquire the lock, run the command, release the lock, and report each way of failing."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from pgfence._api.decorators import find_unsafe_time
from pgfence._process.clock import clock
from pgfence.cli.codes import Code
from pgfence.cli.guarded import PATIENCE, GuardedCommand, GuardedRun, OnLost, report_interrupted
from pgfence.cli.locks import Terms, lock_on, note
from pgfence.cli.report import Report, as_data, describe
from pgfence.cli.server import Pooler, describe_pooler, find_engine, settle
from pgfence.cli.supervise import Interrupted, Supervisor
from pgfence.errors import (
    CapacityError,
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


class OnUnreachable(StrEnum):
    """What to do when no server can be reached."""

    FAIL = "fail"
    SKIP = "skip"
    RUN = "run"


class RunOptions(NamedTuple):
    """The options of one call. Times are in seconds."""

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
    terms: Terms = Terms()


def run(options: RunOptions, speaker: Console, environ: Mapping[str, str]) -> Report:
    """Run one command under a lock and return the report.

    Raises:
        MisuseError: the name, the engine or the URL cannot be used.
    """
    report = Report(options.name)
    with Supervisor(grace=options.grace) as supervisor:
        try:
            with supervisor.allow_interrupts():
                engine = _find_engine(options, environ)
                supervisor.handle_signals()
                held = _acquire(engine, options, speaker, report)
        except Interrupted as stop:
            return report_interrupted(report, stop)
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
        if held is not None:
            held.on_lost(supervisor.lose)
        job = GuardedCommand(options.name, options.command, options.grace, options.on_lost)
        return GuardedRun(job, speaker, report, held).run(supervisor, environ)


def _find_engine(options: RunOptions, environ: Mapping[str, str]) -> Engine:
    engine = find_engine(dsn=options.dsn, path=options.engine, environ=environ, name=options.name)
    pooler = None if options.pooler is None else options.pooler.value
    settle(engine, pooler=pooler, schema=options.schema, prefix=options.prefix)
    return engine


def _acquire(engine: Engine, options: RunOptions, speaker: Console, report: Report) -> Held:
    lock = lock_on(engine, options.name, options.namespace, options.terms, report)
    start = clock()
    try:
        held = _take(lock, options, speaker, start)
    except PoolerError as error:
        raise describe_pooler(engine, error) from error
    finally:
        report.waited = clock() - start
    note(held, report)
    speaker.trace(f"acquired {options.name!r} after {report.waited:.3f} s", PATIENCE)
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
            # The known holder may still be running without the server. The command must not start before the TTL of that holder has passed.
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


def _report_unreachable(options: RunOptions, report: Report, error: UnreachableError) -> Report:
    if options.on_unreachable is OnUnreachable.SKIP and error.retryable:
        return report.end("skipped", Code.OK, f"{error}. The command was not run because of --on-unreachable=skip")
    return report.end("unavailable", Code.UNAVAILABLE, str(error))
