"""Turn the events of engines into OpenTelemetry metrics.

The thread or task where an event happens appends it to a list, because recording one value costs a quarter of what an acquire and a
release cost. The appended events are counted in bulk, at the latest when the metrics are collected.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from pgfence._process.lifecycle import PROCESS
from pgfence._telemetry import metrics
from pgfence._telemetry.prefixes import Prefixes
from pgfence._telemetry.state import read_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation
    from sqlalchemy.engine.interfaces import Dialect

    from pgfence._telemetry.metrics import Metric

    Values: TypeAlias = tuple[str, ...]
    Pending: TypeAlias = tuple[str, str, str, str, float | None, float | None, str | None, bool]
    """The fields are database, event, name, kind, waited, held, reason and contended."""

MOST_PENDING = 2000
"""The number of events that may be appended before the thread of the next event counts them."""
MOST_SAMPLES = 1000
"""The maximum number of durations with the same attributes that are recorded between two collections.

If there are more, a random sample is recorded.
"""

_OUTCOMES = {"acquired": "granted", "refused": "refused", "timeout": "timeout"}
_KEYS = ("idempotency key", "effect")
_DURATIONS = {
    "released": metrics.HOLD,
    "lost": metrics.HOLD,
    "renewal": metrics.RENEWAL,
    "pause": metrics.PAUSE,
}
_MAXIMA = (metrics.HOLD_AGE, metrics.LOCK_TABLE_USAGE, metrics.LOCK_TABLE_LIMIT)
"""The gauges that report the largest of the values of several managers. All other gauges report the sum of the values."""


class Samples:
    """The durations with the same attributes since the last collection, or a random sample of them."""

    __slots__ = ("kept", "seen")

    def __init__(self) -> None:
        self.kept: list[float] = []
        self.seen = 0

    def add(self, seconds: float) -> None:
        self.seen += 1
        if len(self.kept) < MOST_SAMPLES:
            self.kept.append(seconds)
        elif (place := random.randrange(self.seen)) < MOST_SAMPLES:
            self.kept[place] = seconds


class Recorder:
    """The instruments of one meter, and their values, for all engines that use the meter."""

    def __init__(self, meter: Meter) -> None:
        from opentelemetry.metrics import Observation

        self._observation: type[Observation] = Observation
        # Bounded, because events are appended even if the thread that counts them makes no progress.
        self.pending: deque[Pending] = deque(maxlen=10 * MOST_PENDING)
        self._lock = threading.Lock()
        self._pid = PROCESS.known_pid
        self._counts: dict[Metric, dict[Values, int]] = {each: {} for each in metrics.METRICS}
        self._samples: dict[tuple[Metric, Values], Samples] = {}
        self._prefixes = Prefixes()
        self._models = Prefixes()
        self._errors = Prefixes()
        self._engines: list[tuple[str, weakref.ref[Dialect]]] = []
        self._unread: dict[Metric, dict[Values, float]] = {}
        """The values of gauges that were read from the process and not yet collected."""
        self._histograms: dict[Metric, Histogram] = {}
        for each in metrics.METRICS:
            self._create_instrument(meter, each)

    def _create_instrument(self, meter: Meter, metric: Metric) -> None:
        name, unit, description = metric.name, metric.unit, metric.description
        if metric.instrument == "histogram":
            self._histograms[metric] = meter.create_histogram(
                name, unit, description, explicit_bucket_boundaries_advisory=metrics.BUCKETS
            )
        elif metric.instrument == "counter":
            meter.create_observable_counter(name, [self._make_callback(metric, self._read_counts)], unit, description)
        else:
            meter.create_observable_gauge(name, [self._make_callback(metric, self._read_gauge)], unit, description)

    def _make_callback(
        self, metric: Metric, read: Callable[[Metric], Mapping[Values, float]]
    ) -> Callable[[CallbackOptions], Iterator[Observation]]:
        names = metrics.get_attribute_names(metric)

        def observe(_: CallbackOptions) -> Iterator[Observation]:
            for values, value in read(metric).items():
                yield self._observation(value, dict(zip(names, values, strict=True)))

        return observe

    # ------------------------------------------------------------ where events happen

    def add_engine(self, database: str, dialect: Dialect) -> None:
        """Read the gauges of an engine from now on, as long as it exists."""
        self._engines = [each for each in self._engines if each[1]() is not None]
        self._engines.append((database, weakref.ref(dialect)))

    def count_early(self) -> None:
        """Count the appended events now, before the metrics are collected, because many events have been appended."""
        self._count_pending(wait=0.0)

    # ------------------------------------------------------------ where metrics are collected

    def _read_counts(self, metric: Metric) -> dict[Values, float]:
        # The SDK calls this before it collects the histograms, so this collection includes everything that has happened so far.
        if self._count_pending(wait=1.0):
            self._record_samples()
        return dict(self._counts[metric])

    def _read_gauge(self, metric: Metric) -> dict[Values, float]:
        # The state is read once for all gauges of a collection. Each gauge is collected once.
        if metric not in self._unread:
            self._unread = self._read_gauges()
        return self._unread.pop(metric)

    def _read_gauges(self) -> dict[Metric, dict[Values, float]]:
        found: dict[Metric, dict[Values, float]]
        found = {each: {} for each in metrics.METRICS if each.instrument == "gauge"}
        seen: set[object] = set()  # several engines may share one lock_engine
        for database, reference in self._engines:
            if (dialect := reference()) is None:
                continue
            for metric, values, value in read_state(dialect, self._prefixes, seen):
                gauge, key = found[metric], (database, *values)
                before = gauge.get(key, 0.0)
                gauge[key] = max(before, value) if metric in _MAXIMA else before + value
        return found

    def _record_samples(self) -> None:
        samples, self._samples = self._samples, {}
        for (metric, values), found in samples.items():
            histogram = self._histograms[metric]
            attributes = dict(zip(metrics.get_attribute_names(metric), values, strict=True))
            for seconds in found.kept:
                histogram.record(seconds, attributes)

    def _count_pending(self, wait: float) -> bool:
        """Count the appended events. Return False if another thread is counting and does not finish within `wait` seconds."""
        if self._pid != PROCESS.known_pid:
            # A thread of the parent may have held the lock at the fork. It does not exist in this process.
            self._pid, self._lock = PROCESS.known_pid, threading.Lock()
        if not self._lock.acquire(timeout=wait) if wait else not self._lock.acquire(blocking=False):
            return False
        try:
            take, granted, samples = self.pending.popleft, self._counts[metrics.ATTEMPTS], self._samples
            for _ in range(len(self.pending)):
                item = database, event, _, kind, _, held, _, contended = take()
                # Every uncontended lock causes these two events, so they are counted here without a call.
                if event == "acquired" and not contended:
                    values = database, kind, "granted"
                    granted[values] = granted.get(values, 0) + 1
                elif event == "released" and held is not None and (key := (metrics.HOLD, (database, kind))) in samples:
                    samples[key].add(held)
                else:
                    self._count_event(*item)
        finally:
            self._lock.release()
        return True

    def _count(self, metric: Metric, *values: str) -> None:
        counts = self._counts[metric]
        counts[values] = counts.get(values, 0) + 1

    def _add_sample(self, metric: Metric, seconds: float, values: Values) -> None:
        samples = self._samples.get((metric, values))
        if samples is None:
            samples = self._samples[metric, values] = Samples()
        samples.add(seconds)

    def _count_event(
        self,
        database: str,
        event: str,
        name: str,
        kind: str,
        waited: float | None,
        held: float | None,
        reason: str | None,
        contended: bool,
    ) -> None:
        if (outcome := _OUTCOMES.get(event)) is not None:
            self._count(metrics.ATTEMPTS, database, kind, outcome)
            if contended:
                self._count(metrics.CONTENTION, database, kind, self._prefixes.find(name))
                if outcome != "refused" and waited is not None:
                    self._add_sample(metrics.WAIT, waited, (database, kind, outcome))
            if outcome != "granted" and kind in _KEYS:
                self._count(metrics.KEY_CONFLICTS, database, kind, "in_progress")
            return
        if held is not None:
            self._add_sample(_DURATIONS[event], held, (database, kind) if kind else (database,))
        if event != "released":
            self._count_incident(database, event, name, kind, reason or "")

    def _count_incident(self, database: str, event: str, name: str, kind: str, reason: str) -> None:
        match event:
            case "lost":
                self._count(metrics.LOSSES, database, kind, reason)
            case "release_failed":
                self._count(metrics.RELEASE_FAILURES, database, kind, self._errors.limit(reason))
            case "renewal_failed":
                self._count(metrics.RENEWAL_FAILURES, database, kind, self._errors.limit(reason))
            case "reclaimed":
                self._count(metrics.RECLAIMS, database, kind)
            case "evicted":
                self._count(metrics.EVICTIONS, database, kind)
            case "fence_rejected":
                self._count(metrics.REJECTIONS, database, reason)
            case "conflict":
                self._count(metrics.CONFLICTS, database, self._models.limit(name), reason)
            case "replayed":
                self._count(metrics.REPLAYS, database, kind)
            case "reused":
                self._count(metrics.KEY_CONFLICTS, database, kind, "reused")
            case "committed" | "retried" | "failed":
                self._count(metrics.TRANSACTIONS, database, event)
