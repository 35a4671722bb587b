"""OpenTelemetry metrics and spans for locks, leases, idempotency keys, fences and versions.

This module requires the extra `otel`, which installs the OpenTelemetry API. An application also needs the SDK and an exporter.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from pgfence.config import events_of

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import TracerProvider
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._telemetry.recorder import Recorder

__all__ = ["instrument"]

_ATTRIBUTE = "_pgfence_telemetry"
_SCOPE = "pgfence"

_RECORDERS: weakref.WeakKeyDictionary[object, Recorder] = weakref.WeakKeyDictionary()
"""The recorder of each meter provider. Engines share a recorder, because a meter has each instrument only once."""


class _Global:
    """The key of the global meter provider, which the application may set later."""


_GLOBAL = _Global()


def instrument(
    engine: Engine | AsyncEngine,
    meter_provider: MeterProvider | None = None,
    tracer_provider: TracerProvider | None = None,
) -> None:
    """Report what happens to the locks, leases and keys of an engine as OpenTelemetry metrics and spans.

    Call this function once for each engine, at any time, before or after `configure()`; a listener that was set with
    `configure(on_event=...)` is still called. A second call with the same providers does nothing.

    The reader of the meter provider collects the metrics. An acquire or release appends its event to a list; durations are
    recorded when the metrics are collected. If more than 1,000 durations with the same attributes occur between two collections, a
    random sample of 1,000 is recorded. Counters include every event.

    Spans are added only to a trace that is already being recorded: `pgfence.acquire` for a call that found another holder,
    `pgfence.hold` for the time from the grant to the release, and `pgfence.transaction.attempt` for each attempt of
    `run_transaction`. The span of a hold is created when the hold has ended, so spans of the work inside it are its siblings.

    Limitations: locks on your own Connection are not part of the gauges. A process that ends without a final collection loses the
    events since the previous collection.

    Args:
        engine: an Engine or AsyncEngine.
        meter_provider: the provider of the metrics; None means the global provider.
        tracer_provider: the provider of the spans; None means the global provider.

    Raises:
        ModuleNotFoundError: OpenTelemetry is not installed.
        ValueError: the engine already reports to other providers.
        TypeError: `engine` is not an Engine or AsyncEngine.
    """
    hub = events_of(engine)
    try:
        from opentelemetry import metrics, trace
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("OpenTelemetry is not installed: pip install 'pgfence[otel]'") from error
    from pgfence._telemetry.observer import EngineObserver
    from pgfence._telemetry.recorder import Recorder
    from pgfence._telemetry.spans import SpanWriter

    providers = (meter_provider, tracer_provider)
    if (before := vars(engine.dialect).get(_ATTRIBUTE)) is not None:
        if before != providers:
            raise ValueError("this engine already reports to other providers: call instrument() once for each engine")
        return
    database = engine.url.database or ""
    spans = SpanWriter(trace.get_tracer(_SCOPE, tracer_provider=tracer_provider), database)
    # A provider gets only one recorder, because it would ignore the callbacks of a second recorder, whose instruments are equal.
    now = metrics.get_meter_provider()
    keys = [_GLOBAL, now] if meter_provider in (None, now) else [meter_provider]
    recorder = next((_RECORDERS[key] for key in keys if key in _RECORDERS), None)
    if recorder is None:
        recorder = _RECORDERS[keys[0]] = Recorder(metrics.get_meter(_SCOPE, meter_provider=meter_provider))
    vars(engine.dialect)[_ATTRIBUTE] = providers
    recorder.add_engine(database, engine.dialect)
    hub.set_observer(EngineObserver(recorder, spans, database))
