"""Pass each event to metrics and traces, on the thread or task where the event happens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._telemetry import recorder
from pgfence.retrying import TransactionAttempt

if TYPE_CHECKING:
    from pgfence._process.events import Timing
    from pgfence._telemetry.recorder import Recorder
    from pgfence._telemetry.spans import SpanWriter
    from pgfence.types import Event


class EngineObserver:
    """Passes the events of one engine to the metrics, and to the trace that is being recorded."""

    __slots__ = ("_database", "_pending", "_recorder", "_spans")

    def __init__(self, counting: Recorder, spans: SpanWriter, database: str) -> None:
        self._recorder = counting
        self._pending = counting.pending
        self._spans = spans
        self._database = database

    def observe_lock(
        self,
        event: str,
        name: str,
        kind: str,
        token: int | None,
        owner: str | None,
        waited: float | None,
        held: float | None,
        reason: str | None,
        contended: bool,
    ) -> None:
        """Record an event of a lock, and add the span that ends with the event."""
        self._pending.append((self._database, event, name, kind, waited, held, reason, contended))
        if len(self._pending) >= recorder.MOST_PENDING:
            self._recorder.count_early()
        if (contended or held is not None) and self._spans.is_tracing():
            self._spans.add_lock(event, name, kind, token, owner, waited, held, reason, contended)

    def observe(self, event: Event) -> None:
        """Record the end of an attempt of `run_transaction`."""
        if isinstance(event, TransactionAttempt):
            self._add(event.event, None)
            if self._spans.is_tracing():
                self._spans.add_attempt(event)

    def observe_timing(self, what: Timing, seconds: float) -> None:
        """Record a duration."""
        self._add(what, seconds)

    def _add(self, event: str, seconds: float | None) -> None:
        self._pending.append((self._database, event, "", "", None, seconds, None, False))
        if len(self._pending) >= recorder.MOST_PENDING:
            self._recorder.count_early()
