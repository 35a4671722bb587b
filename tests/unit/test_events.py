"""The listeners of an engine, and the fields of log records."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import create_engine

from pgfence._process.events import EventHub, build_log_fields, emit_event
from pgfence.config import config_of, configure, events_of
from pgfence.types import ProcessPause

if TYPE_CHECKING:
    import pytest

    from pgfence.types import Event


class Noting:
    """An observer that keeps what it is passed, or raises."""

    def __init__(self, seen: list[Any], *, raises: bool = False) -> None:
        self.seen = seen
        self.raises = raises

    def observe_lock(self, *values: Any) -> None:
        self.seen.append(values[:3])
        if self.raises:
            raise RuntimeError("observer")

    def observe(self, event: Event) -> None:
        self.observe_lock(event.event)

    def observe_timing(self, *values: Any) -> None:
        self.observe_lock(*values)


def test_exceptions_of_listener_and_observer_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the caller nor the other of the two sees them."""
    hub, seen, heard = EventHub(), [], []
    hub.set_listener(lambda event: heard.append(event) or 1 / 0)
    hub.set_observer(Noting(seen, raises=True))
    pause = ProcessPause("paused", None, None, None, None, datetime.now(UTC), 1.0, 5.0, 0.5)
    with caplog.at_level(logging.ERROR, "pgfence.advisory"):
        emit_event(hub, "acquired", "a, b", "advisory", waited=0.5)
        hub.record("pause", 0.1)
        hub.emit(pause)
    assert caplog.text.count("RuntimeError: observer") == 3
    assert caplog.text.count("ZeroDivisionError: ") == 2
    event, other = heard
    assert (event.event, event.name, event.kind, event.waited, event.held) == (
        "acquired",
        "a, b",
        "advisory",
        0.5,
        None,
    )
    assert event.at.tzinfo is not None
    assert other is pause
    assert seen == [("acquired", "a, b", "advisory"), ("pause", 0.1), ("paused",)]


def test_without_a_listener_no_event_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the time is read, also if there is an observer."""
    monkeypatch.setattr("pgfence.types.LockEvent", None)
    monkeypatch.setattr("pgfence._process.events.datetime", None)
    hub = EventHub()
    assert not hub.active
    emit_event(hub, "acquired", "a", "advisory")
    hub.set_observer(Noting([]))
    assert hub.active
    emit_event(hub, "acquired", "a", "advisory")


def test_an_observer_can_be_set_before_and_after_the_settings() -> None:
    """`configure()` accepts an engine that is observed already; copies of an engine share what is notified."""
    engine, heard, seen = create_engine("postgresql+psycopg://"), [], []
    events_of(engine).set_observer(Noting(seen))
    configure(engine, on_event=lambda event: heard.append(event.event))
    emit_event(config_of(engine.execution_options(isolation_level="AUTOCOMMIT")).events, "lost", "a", "lease")
    assert (heard, seen) == (["lost"], [("lost", "a", "lease")])


def test_log_records_have_the_documented_fields() -> None:
    """One attribute, because every record has a `name` of its own; all six fields are always there."""
    lease_id = UUID(int=1)
    fields = build_log_fields("lost", "close", owner="me", lease_id=lease_id, token=3, ttl=30.0)
    record = logging.getLogger("pgfence").makeRecord("pgfence", 30, "", 1, "text", (), None, extra=fields)
    assert record.pgfence == {  # type: ignore[attr-defined]
        "event": "lost",
        "name": "close",
        "owner": "me",
        "lease_id": str(lease_id),
        "token": 3,
        "ttl": 30.0,
    }
    assert set(build_log_fields("waiting")["pgfence"]) == set(fields["pgfence"])
