"""`pgfence elect`: be a candidate, run the command in each term, and become a candidate again if the restart policy says so."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from pgfence.cli.codes import Code, MisuseError
from pgfence.cli.guarded import PATIENCE, GuardedCommand, GuardedRun, report_interrupted
from pgfence.cli.locks import note, rename_arguments
from pgfence.cli.report import Report, choose_code
from pgfence.cli.server import open_engine
from pgfence.cli.supervise import Interrupted, Supervisor
from pgfence.election import Election
from pgfence.errors import PgfenceError, StandbyError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Engine

    from pgfence.cli.report import Console
    from pgfence.cli.server import Pooler
    from pgfence.cli.supervise import Ended
    from pgfence.election import Member, Term
    from pgfence.types import Holder

SHORTEST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
LONG_RUN = 60.0
"""A command that ran for at least this many seconds is not in a crash loop."""


class Restart(StrEnum):
    """Whether to become a candidate again when the command has ended."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class ElectOptions:
    """The options of one call. Times are in seconds, and options that were not given are None."""

    name: str
    command: Sequence[str]
    dsn: str | None
    engine: str | None
    namespace: str | None
    schema: str | None
    prefix: str | None
    pooler: Pooler | None
    owner: str | None
    ttl: float
    max_hold: float | None
    restart: Restart
    grace: float


def elect(options: ElectOptions, speaker: Console, environ: Mapping[str, str]) -> Report:
    """Keep one copy of a command running across all hosts that call this function. Return the report of the last term.

    Raises:
        MisuseError: the name, the engine, the URL or a time cannot be used.
    """
    with (
        Supervisor(grace=options.grace, ends_rest=True) as supervisor,
        open_engine(
            options.dsn,
            options.engine,
            name=options.name,
            namespace=options.namespace,
            schema=options.schema,
            prefix=options.prefix,
            pooler=None if options.pooler is None else options.pooler.value,
        ) as engine,
        _report_warnings(speaker),
    ):
        supervisor.handle_signals()
        return _FleetMember(options, speaker, environ, supervisor, engine).run()


class _FleetMember:
    """This host's membership in the election, over all of its terms."""

    def __init__(
        self,
        options: ElectOptions,
        speaker: Console,
        environ: Mapping[str, str],
        supervisor: Supervisor,
        engine: Engine,
    ) -> None:
        self._options = options
        self._speaker = speaker
        self._environ = environ
        self._supervisor = supervisor
        self._job = GuardedCommand(options.name, options.command, options.grace, noun="term of")
        if options.owner is not None and not (options.owner.strip() and options.owner.isprintable()):
            raise MisuseError(
                f"--owner {options.owner!r} is blank or cannot be printed: give a text without control characters"
            )
        try:
            self._election = Election(engine, options.name, ttl=options.ttl, max_hold=options.max_hold)
        except ValueError as error:
            raise MisuseError(rename_arguments(str(error))) from None

    def run(self) -> Report:
        report = Report(self._options.name)
        try:
            if self._look(report):
                return report
            backoff = Backoff()
            while True:
                report = Report(self._options.name)
                ended = self._serve_term(report)
                if self._is_over(report, ended):
                    return report
                pause = backoff.choose_pause(report)
                self._describe(report, pause)
                self._supervisor.wait_for(lambda: False, pause)
        except Interrupted as stop:
            return report_interrupted(report, stop, when="while the command was not running")

    def _look(self, report: Report) -> bool:
        """Query once who leads. Return whether the election can never work; in that case, the report is filled in."""
        # A member never gives up, so it would wait indefinitely for missing tables or a correct password.
        try:
            with self._supervisor.allow_interrupts():
                next(self._election.observe(timeout=0), None)
        except ValueError as error:
            raise MisuseError(str(error)) from None
        except (UnreachableError, StandbyError) as error:
            if not error.retryable:
                report.end("unavailable", choose_code(error), str(error))
                return True
        except PgfenceError as error:
            report.end("refused", Code.REFUSED, str(error))
            return True
        return False

    def _serve_term(self, report: Report) -> Ended | None:
        """Wait for a term, run the command in it, and release the term. Return how the command ended; None if it did not start."""
        gained, stopped = threading.Event(), threading.Event()
        self._supervisor.forget_loss()

        def start() -> None:
            gained.set()
            self._supervisor.wake()

        def stop() -> None:
            self._supervisor.lose()
            stopped.wait()  # the member releases the term when this returns

        member = self._election.stand(
            owner=self._options.owner, on_gained=start, on_lost=stop, on_changed=self._note_leader
        )

        def release(term: Term) -> None:
            try:
                term.check()
            finally:
                _resign(member, stopped)

        try:
            self._supervisor.wait_for(gained.is_set)
            if (term := member.term) is None:
                report.end("lost", Code.LOST, f"the {self._job.hold} was lost before the command was started")
                return None
            note(term, report)
            run = GuardedRun(self._job, self._speaker, report, term, lambda _: release(term))
            run.run(self._supervisor, self._environ)
            return run.ended
        finally:
            _resign(member, stopped)

    def _is_over(self, report: Report, ended: Ended | None) -> bool:
        """Return whether `pgfence elect` ends with this report."""
        if report.outcome in {"interrupted", "not started"} or (ended is not None and _has_stop_signal(ended)):
            return True
        if ended is None or ended.stopped:
            return False
        restart = self._options.restart
        return restart is Restart.NEVER or (restart is Restart.ON_FAILURE and report.exit_code == 0)

    def _describe(self, report: Report, pause: float) -> None:
        if report.outcome == "lost":
            if report.message is not None:  # otherwise, the supervised run has already printed why the term was lost
                self._speaker.warn(report.message, PATIENCE)
            self._speaker.tell(f"this host becomes a candidate again in {pause:g} s", PATIENCE)
        else:
            self._speaker.tell(
                f"the command ended with exit code {report.exit_code}; this host becomes a candidate again in {pause:g} s",
                PATIENCE,
            )

    def _note_leader(self, holder: Holder | None) -> None:
        leader = "no process leads" if holder is None else f"the leader is {holder}"
        self._speaker.trace(f"{self._options.name!r}: {leader}", PATIENCE)


def _resign(member: Member, stopped: threading.Event) -> None:
    stopped.set()
    member.resign()


def _has_stop_signal(ended: Ended) -> bool:
    """Return whether a signal asked this process to stop. SIGHUP may mean a reload, so it counts only if it ended the command."""
    return bool(ended.received - {signal.SIGHUP}) or (ended.signal == signal.SIGHUP and signal.SIGHUP in ended.received)


class Backoff:
    """The pauses between two terms of this host. They double each time that the command ends soon after its start."""

    def __init__(self) -> None:
        self._next = SHORTEST_PAUSE

    def choose_pause(self, report: Report) -> float:
        """Return the seconds to wait before the host is a candidate again."""
        if report.outcome == "lost" or (report.ran or 0.0) >= LONG_RUN:
            self._next = SHORTEST_PAUSE
        pause = self._next
        self._next = min(LONGEST_PAUSE, 2 * pause)
        return pause


@contextmanager
def _report_warnings(speaker: Console) -> Iterator[None]:
    """Print the warnings that the member logs. The member remains a candidate after each of them."""
    log, handler = logging.getLogger("pgfence.election"), _Printer(speaker)
    log.addHandler(handler)
    # The module of --engine may have configured logging, which by default disables the loggers that exist.
    log.disabled = False
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Printer(logging.Handler):
    def __init__(self, speaker: Console) -> None:
        super().__init__(logging.WARNING)
        self._speaker = speaker

    def emit(self, record: logging.LogRecord) -> None:
        self._speaker.warn(record.getMessage(), PATIENCE)
