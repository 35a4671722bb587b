"""Set-up, and a look at an incident, as an operator writes them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pgfence.monitoring as monitoring
from app import async_engine, engine
from opentelemetry.metrics import get_meter_provider
from pgfence import Event, Holder, LockEvent, ProcessPause, configure, embedded, schema, telemetry
from typing_extensions import assert_type


def listen(event: Event) -> None:
    print(event.event, event.name, event.token)
    if isinstance(event, LockEvent):
        waited: float | None = event.waited
        print(event.kind, waited, event.held, event.reason, event.contended)
    elif isinstance(event, ProcessPause):
        print(event.seconds / event.margin)


def set_up() -> None:
    configure(
        engine,
        namespace="shop",
        schema="locks",
        default_timeout=timedelta(seconds=10),
        pooler="session",
        on_event=listen,
    )
    telemetry.instrument(engine, meter_provider=get_meter_provider())
    schema.create_all(engine)
    schema.add_fence(engine, "ledger", resource="close")


async def set_up_async() -> None:
    telemetry.instrument(async_engine)
    await schema.create_all(async_engine)


def incident() -> None:
    for row in monitoring.ps(engine, "close:"):
        print(row.holder.name, row.holder.owner, [w.waiting for w in row.waiters])
    for holder in monitoring.evict(engine, "close:2026-04", reason="hung worker", dry_run=True):
        print(holder.name, holder.owner, holder.token)
    monitoring.evict(engine, "close:2026-04", reason="hung worker", actor="ann")


def check() -> None:
    findings = monitoring.doctor(engine, alembic_ini="alembic.ini")
    assert_type(findings, Sequence[monitoring.Finding])
    print([finding.fix for finding in findings if finding.severity == "error"])
    assert_type(monitoring.release_leaked(engine, reason="stuck import", idle_for=timedelta(hours=1)), Sequence[Holder])
    for entry in monitoring.audit(engine, since=timedelta(days=1), action="evict"):
        print(entry.at, entry.resource, entry.actor, entry.reason)


async def check_async() -> None:
    assert_type(await monitoring.doctor(async_engine), Sequence[monitoring.Finding])
    assert_type(await monitoring.release_leaked(async_engine, reason="stuck import", dry_run=True), Sequence[Holder])
    assert_type(await monitoring.audit(async_engine), Sequence[monitoring.AuditEntry])


def throw_away() -> None:
    with embedded.server() as dsn:
        print(dsn)
