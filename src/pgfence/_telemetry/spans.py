"""Turn the events of engines into OpenTelemetry spans. A span is created when its wait, hold or attempt has ended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pgfence._telemetry import metrics

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

    from pgfence.retrying import TransactionAttempt

ACQUIRE = "pgfence.acquire"
HOLD = "pgfence.hold"
ATTEMPT = "pgfence.transaction.attempt"

NAME = "pgfence.lock.name"
OWNER = "pgfence.lock.owner"
FUNCTION = "code.function.name"
TOKEN = "pgfence.lock.token"  # noqa: S105

_ENDS = {"acquired": "granted", "refused": "refused", "timeout": "timeout"}


class SpanWriter:
    """Adds spans to the trace of the thread or task in which an event happens."""

    def __init__(self, tracer: Tracer, database: str) -> None:
        from opentelemetry import trace

        self._trace = trace
        self._tracer = tracer
        self._database = database

    def is_tracing(self) -> bool:
        """Return whether this thread or task is in a trace that is recorded."""
        # A hold outside of a trace gets no span, because that span would be the only one of its trace.
        return self._trace.get_current_span().is_recording()

    def add_lock(
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
        """Add the span of a wait or a hold that ends with an event of a lock."""
        attributes: dict[str, str | int] = {NAME: name, metrics.KIND: kind}
        if token is not None:
            attributes[TOKEN] = token
        if owner is not None:
            attributes[OWNER] = owner
        if contended and waited is not None and event in _ENDS:
            attributes[metrics.OUTCOME] = _ENDS[event]
            self._write(ACQUIRE, waited, attributes, "timeout" if event == "timeout" else None)
        elif held is not None:
            self._write(HOLD, held, attributes, reason if event == "lost" else None)

    def add_attempt(self, attempt: TransactionAttempt) -> None:
        """Add the span of an attempt of `run_transaction` that has ended."""
        attributes: dict[str, str | int] = {FUNCTION: attempt.name or "", metrics.OUTCOME: attempt.event}
        self._write(ATTEMPT, attempt.seconds, attributes, attempt.error)

    def _write(self, name: str, seconds: float, attributes: dict[str, str | int], error: str | None) -> None:
        end = time.time_ns()
        attributes[metrics.DATABASE] = self._database
        span = self._tracer.start_span(name, attributes=attributes, start_time=end - int(seconds * 1e9))
        if error is not None:
            span.set_attribute(metrics.ERROR, error)
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end)
