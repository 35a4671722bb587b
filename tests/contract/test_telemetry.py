"""`telemetry.instrument()` reports locks and leases as OpenTelemetry metrics and spans."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.trace import StatusCode

from pgfence import configure, monitoring, telemetry
from pgfence.errors import LockTimeoutError
from pgfence.retrying import run_transaction
from support.leases import lapse, lease, rival
from support.locking import elsewhere, lock
from support.transactions import factory
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Mapping

    import psycopg

    from support.worlds import World

metrics = pytest.importorskip("opentelemetry.sdk.metrics")
metrics_export = pytest.importorskip("opentelemetry.sdk.metrics.export")
tracing = pytest.importorskip("opentelemetry.sdk.trace")
trace_export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


class Backend:
    """A test backend, to which an application would export."""

    def __init__(self, *engines: Any) -> None:
        self._reader = metrics_export.InMemoryMetricReader()
        self._exporter = memory.InMemorySpanExporter()
        tracers = tracing.TracerProvider()
        tracers.add_span_processor(trace_export.SimpleSpanProcessor(self._exporter))
        self.tracer = tracers.get_tracer("application")
        meters = metrics.MeterProvider([self._reader])
        for engine in engines:
            telemetry.instrument(engine, meters, tracers)

    def collect(self) -> Mapping[str, dict[tuple[str, ...], Any]]:
        """Return the values of each metric by the values of its attributes, without the database; of a histogram the count."""
        found: dict[str, dict[tuple[str, ...], Any]] = {}
        data = self._reader.get_metrics_data()
        for metric in [] if data is None else data.resource_metrics[0].scope_metrics[0].metrics:
            for point in metric.data.data_points:
                attributes = dict(point.attributes or {})
                assert attributes.pop("db.namespace")
                value = point.count if hasattr(point, "count") else point.value
                found.setdefault(metric.name, {})[tuple(map(str, attributes.values()))] = value
        return found

    def read_spans(self) -> list[Any]:
        return [span for span in self._exporter.get_finished_spans() if span.name.startswith("pgfence.")]


async def test_attempts_and_holds_of_locks(world: World, name: str, dsn: str) -> None:
    """Granted, refused and timed-out calls are counted, also if the application has its own listener."""
    engine, heard = world.engine(), []
    backend = Backend(engine)
    configure(engine, on_event=lambda event: heard.append(event.event))
    one = lock(world, engine, f"report:{name}")
    async with world.enter(one.hold()):
        assert await world.other().call(one.try_acquire) is None
        now = backend.collect()
    with elsewhere(dsn, f"report:{name}"), pytest.raises(LockTimeoutError):
        await world.call(one.acquire, timeout=0.1)
    found = backend.collect()
    assert found["pgfence.lock.attempts"] == {
        ("advisory", "granted"): 1,
        ("advisory", "refused"): 1,
        ("advisory", "timeout"): 1,
    }
    assert found["pgfence.lock.contention"] == {("advisory", "report"): 2}
    assert found["pgfence.lock.wait.duration"] == {("advisory", "timeout"): 1}
    assert found["pgfence.lock.hold.duration"] == {("advisory",): 1}
    assert heard == ["acquired", "refused", "released", "timeout"]
    assert now["pgfence.lock.held"] == {("advisory",): 1}
    assert 0 < now["pgfence.lock.hold.age"]["advisory", "report"] < 60
    assert "pgfence.lock.held" not in found
    assert now["pgfence.lock.connections"]["session", "used"] == 1
    assert found["pgfence.lock.connections"] == {("session", "used"): 0, ("session", "idle"): 1}
    assert found["pgfence.lock.connections.max"] == {("session",): 20}
    assert 0 < found["pgfence.lock_table.usage"][()] < found["pgfence.lock_table.limit"][()]


@pytest.mark.one_driver
@pytest.mark.parametrize("way", ["engine", "function", "function that raises"])
async def test_gauges_include_the_engine_for_locks(world: World, name: str, way: str) -> None:
    """With `lock_engine`, its connections are those of the engine that was instrumented."""
    engine, other, ready = world.engine(), world.engine(), True

    def find() -> Any:
        if not ready:
            raise RuntimeError("no application context")
        return other

    backend = Backend(engine)
    configure(engine, lock_engine=other if way == "engine" else find)
    async with world.enter(lock(world, engine, name).hold()):
        ready = way != "function that raises"
        found = backend.collect()
    assert found["pgfence.lock.attempts"] == {("advisory", "granted"): 1}
    assert ("pgfence.lock.connections" in found) == ready
    assert ("pgfence.lock.held" in found) == ready


@pytest.mark.one_driver
async def test_an_engine_for_locks_that_two_engines_share_counts_once(world: World, name: str) -> None:
    """Connections and locks of a shared lock engine are counted once, whichever engine acquired them."""
    first, second, shared = world.engine(), world.engine(), world.engine()
    for engine in (first, second):
        configure(engine, lock_engine=shared)
    backend = Backend(first, second)
    async with world.enter(lock(world, second, name).hold()):
        found = backend.collect()
    assert (found["pgfence.lock.held"], found["pgfence.lock.connections"]["session", "used"]) == ({("advisory",): 1}, 1)


async def test_waiters_are_counted_in_the_queue(world: World, name: str) -> None:
    """With one holder and two waiters, the gauge is 2."""
    engine = world.engine()
    backend, one = Backend(engine), lock(world, engine, name)
    async with world.enter(one.hold()):
        waiting = [asyncio.create_task(world.other().call(one.acquire, timeout=30)) for _ in range(2)]
        await eventually(lambda: backend.collect()["pgfence.lock.waiters"]["session",] == 2)
    for each in asyncio.as_completed(waiting):
        await world.call((await each).release)
    assert backend.collect()["pgfence.lock.waiters"]["session",] == 0


async def test_renewals_losses_and_reclaims_of_leases(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Durations of renewals, a loss with its reason, and a reclaimed lease are recorded."""
    engine = world.engine()
    backend, one = Backend(engine), lease(world, engine, name)
    held = await world.call(one.acquire)
    await world.call(held.renew)
    assert backend.collect()["pgfence.lock.held"] == {("lease",): 1}
    await world.call(monitoring.evict, engine, name, reason="test")
    await eventually(lambda: held.lost)
    rival(admin, name)
    lapse(admin, name)
    await world.call((await world.call(one.acquire)).release)
    found = backend.collect()
    assert found["pgfence.lease.renewal.duration"][()] >= 1
    assert found["pgfence.lock.losses"] == {("lease", "evicted"): 1}
    assert found["pgfence.lock.evictions"] == {("lease",): 1}
    assert found["pgfence.lease.reclaims"] == {("lease",): 1}
    assert found["pgfence.lock.hold.duration"] == {("lease",): 2}


async def test_spans_belong_to_the_trace_of_the_caller(world: World, name: str, dsn: str) -> None:
    """A hold, a wait that found another holder, and an attempt; outside of a trace there is none."""
    engine = world.engine()
    backend, one = Backend(engine), lock(world, engine, name)
    sessions = factory(world, engine)

    async def work_async(session: Any) -> None:
        await session.connection()

    def work(session: Any) -> None:
        session.connection()

    async def run_all() -> None:
        # Not through `world.call`: in the sync worlds that is another thread, which has another context.
        if world.is_async:
            async with one.hold():
                pass
            with elsewhere(dsn, name), pytest.raises(LockTimeoutError):
                await one.acquire(timeout=0.1)
            await run_transaction(sessions, work_async)
        else:
            with one.hold():
                pass
            with elsewhere(dsn, name), pytest.raises(LockTimeoutError):
                one.acquire(timeout=0.1)
            run_transaction(sessions, work)

    await run_all()
    assert backend.read_spans() == []
    with backend.tracer.start_as_current_span("request") as request:
        await run_all()
    hold, acquire, attempt = backend.read_spans()
    assert [span.name for span in (hold, acquire, attempt)] == [
        "pgfence.hold",
        "pgfence.acquire",
        "pgfence.transaction.attempt",
    ]
    for span in (hold, acquire, attempt):
        assert span.parent.span_id == request.get_span_context().span_id
        assert request.start_time <= span.start_time <= span.end_time <= request.end_time
    assert (hold.attributes["pgfence.lock.name"], hold.attributes["pgfence.lock.kind"]) == (name, "advisory")
    assert (hold.status.status_code, acquire.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert acquire.attributes["pgfence.outcome"] == acquire.attributes["error.type"] == "timeout"
    assert (acquire.end_time - acquire.start_time) >= 0.1e9
    assert attempt.attributes["pgfence.outcome"] == "committed"
