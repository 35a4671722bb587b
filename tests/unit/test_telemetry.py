"""How events become metrics: one value for each, with a bounded number of attributes. Needs no server."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry import metrics
from opentelemetry.trace import NoOpTracerProvider
from sqlalchemy import create_engine

from pgfence import telemetry
from pgfence._process.events import emit_event
from pgfence._telemetry import recorder
from pgfence._telemetry.metrics import METRICS
from pgfence._telemetry.prefixes import LIMIT, OTHER
from pgfence.config import configure, events_of
from pgfence.retrying import TransactionAttempt
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Mapping

sdk = pytest.importorskip("opentelemetry.sdk.metrics")
export = pytest.importorskip("opentelemetry.sdk.metrics.export")

URL = "postgresql+psycopg://app:hunter2@127.0.0.1:1/shop"


class Bench:
    """An engine that is never connected, and its metrics."""

    def __init__(self) -> None:
        self.reader = export.InMemoryMetricReader()
        self.provider = sdk.MeterProvider([self.reader])
        self.engine = create_engine(URL)
        self.events = events_of(self.engine)
        telemetry.instrument(self.engine, self.provider)

    def emit(self, event: str, kind: str = "lease", name: str = "close:7", **details: Any) -> None:
        emit_event(self.events, event, name, kind, **details)

    def collect(self) -> Mapping[str, dict[tuple[str, ...], float]]:
        """Return the values of each metric by the values of its attributes, without the database; of a histogram the sum."""
        found: dict[str, dict[tuple[str, ...], float]] = {}
        data = self.reader.get_metrics_data()
        for metric in [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                attributes = dict(point.attributes or {})
                assert attributes.pop("db.namespace") == "shop"
                value = point.sum if hasattr(point, "sum") else point.value
                found.setdefault(metric.name, {})[tuple(map(str, attributes.values()))] = value
        return found


def emit_attempt(bench: Bench, outcome: str) -> None:
    now = datetime.now(UTC)
    bench.events.emit(TransactionAttempt(outcome, "pay", None, None, None, now, 1, None, None, 0.1, 0.0))


@every_row(
    "event, details, expected",
    [
        ("acquired", {"waited": 0.1}, {"pgfence.lock.attempts": {("lease", "granted"): 1}}),
        (
            "acquired",
            {"waited": 2.0, "contended": True},
            {
                "pgfence.lock.attempts": {("lease", "granted"): 1},
                "pgfence.lock.contention": {("lease", "close"): 1},
                "pgfence.lock.wait.duration": {("lease", "granted"): 2.0},
            },
        ),
        (
            "refused",
            {"waited": 0.1, "contended": True},
            {
                "pgfence.lock.attempts": {("lease", "refused"): 1},
                "pgfence.lock.contention": {("lease", "close"): 1},
            },
        ),
        (
            "timeout",
            {"kind": "effect", "waited": 5.0, "contended": True},
            {
                "pgfence.lock.attempts": {("effect", "timeout"): 1},
                "pgfence.lock.contention": {("effect", "close"): 1},
                "pgfence.lock.wait.duration": {("effect", "timeout"): 5.0},
                "pgfence.idempotency.conflicts": {("effect", "in_progress"): 1},
            },
        ),
        ("released", {"held": 3.0}, {"pgfence.lock.hold.duration": {("lease",): 3.0}}),
        (
            "lost",
            {"held": 4.0, "reason": "expired"},
            {
                "pgfence.lock.hold.duration": {("lease",): 4.0},
                "pgfence.lock.losses": {("lease", "expired"): 1},
            },
        ),
        ("release_failed", {"reason": "E"}, {"pgfence.lock.release.failures": {("lease", "E"): 1}}),
        ("renewal_failed", {"reason": "E"}, {"pgfence.lease.renewal.failures": {("lease", "E"): 1}}),
        ("reclaimed", {}, {"pgfence.lease.reclaims": {("lease",): 1}}),
        ("evicted", {"reason": "it hung"}, {"pgfence.lock.evictions": {("lease",): 1}}),
        ("fence_rejected", {"reason": "stale"}, {"pgfence.fence.rejections": {("stale",): 1}}),
        (
            "conflict",
            {"kind": "version", "name": "Page", "reason": "written"},
            {"pgfence.version.conflicts": {("Page", "written"): 1}},
        ),
        ("replayed", {"kind": "effect"}, {"pgfence.idempotency.replays": {("effect",): 1}}),
        ("reused", {"kind": "effect"}, {"pgfence.idempotency.conflicts": {("effect", "reused"): 1}}),
    ],
)
def test_each_event_counts_in_its_metrics(event: str, details: dict[str, Any], expected: Any) -> None:
    """Each event is counted in the expected metrics, with the expected attributes."""
    bench = Bench()
    bench.emit(event, **details)
    assert bench.collect() == expected


def test_attempts_and_durations_of_this_process_are_recorded() -> None:
    """The two figures from which a TTL is chosen, and the attempts of run_transaction."""
    bench = Bench()
    bench.events.record("renewal", 0.25)
    bench.events.record("pause", 0.5)
    for outcome in ("retried", "retried", "committed"):
        emit_attempt(bench, outcome)
    assert bench.collect() == {
        "pgfence.lease.renewal.duration": {(): 0.25},
        "pgfence.process.pause.duration": {(): 0.5},
        "pgfence.transaction.attempts": {("retried",): 2, ("committed",): 1},
    }


def test_the_number_of_prefixes_is_bounded() -> None:
    """However many names there are, and whatever they look like; the rest counts together."""
    bench = Bench()
    for number in range(3 * LIMIT):
        bench.emit("refused", name=f"user{number}", contended=True)
        bench.emit("conflict", kind="version", name=f"Model{number}", reason="written")
        bench.emit("release_failed", reason=f"Error{number}")
    found = bench.collect()
    for metric in ("pgfence.lock.contention", "pgfence.version.conflicts", "pgfence.lock.release.failures"):
        assert len(found[metric]) == LIMIT + 1
        (rest,) = [value for values, value in found[metric].items() if OTHER in values]
        assert rest == 2 * LIMIT


def test_a_prefix_ends_at_the_first_separator() -> None:
    """Colon, slash, number sign; of several names the first one counts."""
    bench = Bench()
    for name in ("a:1", "a/2", "a#3", "a, b", "a"):
        bench.emit("refused", name=name, contended=True)
    assert bench.collect()["pgfence.lock.contention"] == {("lease", "a"): 5}


def test_without_a_collection_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """All events are counted, and of the durations a sample is kept that represents all of them."""
    monkeypatch.setattr(recorder, "MOST_PENDING", 10)
    monkeypatch.setattr(recorder, "MOST_SAMPLES", 50)
    bench = Bench()
    for number in range(1000):
        bench.emit("refused")
        bench.emit("released", held=float(number))
    (kept,) = [each for each in telemetry._RECORDERS.values() if each._engines[-1][1]() is bench.engine.dialect]
    assert len(kept.pending) <= 10
    (samples,) = kept._samples.values()
    assert (len(samples.kept), samples.seen) == (50, 1000)
    found = bench.collect()
    assert found["pgfence.lock.attempts"] == {("lease", "refused"): 1000}
    assert 200 < found["pgfence.lock.hold.duration"]["lease",] / 50 < 800
    assert not kept._samples


def test_attempts_alone_are_all_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that takes no lock between two collections loses no attempts of run_transaction."""
    monkeypatch.setattr(recorder, "MOST_PENDING", 10)
    bench = Bench()
    for _ in range(1000):
        emit_attempt(bench, "committed")
    assert bench.collect()["pgfence.transaction.attempts"] == {("committed",): 1000}


def test_a_forked_child_counts_although_the_parent_held_the_lock() -> None:
    """The lock of a thread that does not exist in the child is replaced."""
    bench = Bench()
    (kept,) = [each for each in telemetry._RECORDERS.values() if each._engines[-1][1]() is bench.engine.dialect]
    with kept._lock:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                bench.emit("refused")
                code = int(bench.collect().get("pgfence.lock.attempts") != {("lease", "refused"): 1})
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_one_process_reports_several_engines() -> None:
    """Engines share the instruments of their provider, and one that is gone takes its gauges with it."""
    bench, other = Bench(), create_engine(URL)
    telemetry.instrument(other, bench.provider)
    emit_event(events_of(other), "refused", "a", "lease")
    bench.emit("refused")
    assert bench.collect()["pgfence.lock.attempts"] == {("lease", "refused"): 2}
    del other
    gc.collect()
    telemetry.instrument(third := create_engine(URL), bench.provider)
    (kept,) = [each for each in telemetry._RECORDERS.values() if each._engines[-1][1]() is third.dialect]
    assert len(kept._engines) == 2


def test_the_global_provider_may_also_be_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that reports to it by default and one to which it was passed share its instruments."""
    bench, other = Bench(), create_engine(URL)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: bench.provider)
    telemetry.instrument(other)
    emit_event(events_of(other), "refused", "a", "lease")
    bench.emit("refused")
    assert bench.collect()["pgfence.lock.attempts"] == {("lease", "refused"): 2}


def test_a_provider_of_a_wrong_type_leaves_the_engine_as_it_was() -> None:
    """After the error, the right provider is accepted and receives the events."""
    bench, engine = Bench(), create_engine(URL)
    with pytest.raises((TypeError, AttributeError)):
        telemetry.instrument(engine, object())  # type: ignore[arg-type]
    telemetry.instrument(engine, bench.provider)
    emit_event(events_of(engine), "refused", "a", "lease")
    assert bench.collect()["pgfence.lock.attempts"] == {("lease", "refused"): 1}


def test_an_engine_is_instrumented_once() -> None:
    """The same providers again change nothing; others raise. The application's listener is called in any case."""
    bench, seen = Bench(), []
    configure(bench.engine, on_event=seen.append)
    telemetry.instrument(bench.engine, bench.provider)
    bench.emit("refused")
    assert bench.collect()["pgfence.lock.attempts"] == {("lease", "refused"): 1}
    assert len(seen) == 1
    (kept,) = [each for each in telemetry._RECORDERS.values() if each._engines[-1][1]() is bench.engine.dialect]
    assert len(kept._engines) == 1
    with pytest.raises(ValueError, match="already reports to other providers"):
        telemetry.instrument(bench.engine, bench.provider, NoOpTracerProvider())
    with pytest.raises(TypeError):
        telemetry.instrument("postgresql://", bench.provider)  # type: ignore[arg-type]


def test_without_opentelemetry_the_error_names_the_extra() -> None:
    """`import pgfence.telemetry` works, and `instrument()` says what to install."""
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from sqlalchemy import create_engine\n"
        "from pgfence import telemetry\n"
        "try: telemetry.instrument(create_engine('postgresql+psycopg://'))\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "OpenTelemetry is not installed: pip install 'pgfence[otel]'\n"


def test_importing_pgfence_does_not_import_opentelemetry() -> None:
    """Neither does the module itself, before an engine is instrumented."""
    program = "import sys, pgfence, pgfence.telemetry; print(any(n.startswith('opentelemetry') for n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_names_and_units_follow_the_conventions() -> None:
    """Lower case with dots, no unit and no plural suffix of Prometheus in the name, and a unit for each."""
    for metric in METRICS:
        assert metric.name == metric.name.lower()
        assert metric.name.startswith("pgfence.")
        assert not metric.name.endswith(("_total", ".total", "seconds"))
        assert metric.unit in {"s", "1"} or (metric.unit[0], metric.unit[-1]) == ("{", "}")
        assert (metric.unit == "s") == metric.name.endswith((".duration", ".age"))
        assert metric.description
    assert len({metric.name for metric in METRICS}) == len(METRICS)
