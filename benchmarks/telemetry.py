"""Acquire and release a lock without contention, with events, metrics and spans."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from benchmarks import floor, report, rounds
from benchmarks.place import server
from pgfence import AdvisoryLock, configure, telemetry

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from benchmarks.place import Place
    from benchmarks.rounds import Make

OFF, AGAIN = "pgfence, hold()", "pgfence, hold(), again"
EVENTS, METRICS, SPANS = "with on_event", "with metrics", "with metrics, inside a trace"


def run(quick: bool) -> dict[str, Any]:
    """Measure what telemetry adds to the cycle of a lock."""
    result: dict[str, Any] = {
        "scenario": "telemetry",
        "title": "Telemetry",
        "method": (
            "One cycle acquires the lock and releases it. The OpenTelemetry SDK collects the metrics every"
            " second. A trace records one span for each hold."
        ),
        "bars": [],
        "tables": [],
        "skipped": {},
    }
    try:
        import opentelemetry.sdk  # noqa: F401
    except ModuleNotFoundError:
        result["skipped"] = {"telemetry": "opentelemetry-sdk is not installed"}
        return result
    field = {
        OFF: floor.ours("off", "hold"),
        AGAIN: floor.ours("again", "hold"),
        EVENTS: make_listening("events"),
        METRICS: make_measured("metrics"),
        SPANS: make_measured("spans", traced=True),
    }
    with server() as place:
        medians = rounds.alternate(place, field, rounds.Effort.of(quick=quick))
    figure = rounds.ratio(medians, METRICS, OFF)
    result["bars"] = [
        report.bar("uncontended acquire + release with metrics, against without", "at most 1.1x", figure, 1.1, "x"),
        report.null_test(rounds.ratio(medians, AGAIN, OFF), OFF),
    ]
    rows = [(name, f"{rounds.ratio(medians, name, OFF):.2f}x", rounds.spread(medians, name, OFF)) for name in medians]
    columns = ("Contestant", "Ratio to the first", "Middle half of the sets")
    result["tables"] = [report.table("Overhead of telemetry, psycopg", columns, rows) | {"seconds": medians}]
    return result


def make_listening(name: str) -> Make:
    """Acquire and release a lock whose events are counted by a function of the application."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        heard: list[object] = []
        configure(engine, on_event=lambda event: heard.append(event.event))
        return _hold(AdvisoryLock(engine, name))

    return make


def make_measured(name: str, *, traced: bool = False) -> Make:
    """Acquire and release a lock with metrics that are not exported. With `traced`, each cycle runs inside a span."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider

        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        exporter = ConsoleMetricExporter(out=io.StringIO(), formatter=lambda _: "")
        meters = MeterProvider([PeriodicExportingMetricReader(exporter, export_interval_millis=1000)])
        stack.callback(meters.shutdown)
        tracers = TracerProvider()
        telemetry.instrument(engine, meters, tracers)
        cycle = _hold(AdvisoryLock(engine, name))
        if not traced:
            return cycle
        tracer = tracers.get_tracer("benchmark")

        def run_traced() -> None:
            with tracer.start_as_current_span("request"):
                cycle()

        return run_traced

    return make


def _hold(lock: AdvisoryLock[Any]) -> Callable[[], object]:
    def cycle() -> None:
        with lock.hold():
            pass

    return cycle
