"""The listeners of an engine, and the fields of log records."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from uuid import UUID

from sqlalchemy import create_engine

from pgfence._process.events import EventHub, build_log_fields, emit_event
from pgfence.config import config_of, configure, events_of

if TYPE_CHECKING:
    import pytest


def test_a_listener_that_raises_is_logged_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the caller nor the next listener sees its exception, and the application's listener comes first."""
    hub, seen = EventHub(), []
    hub.set_application(lambda _: 1 / 0)
    hub.add(seen.append, lambda *_: 1 / 0)
    with caplog.at_level(logging.ERROR, "pgfence.advisory"):
        emit_event(hub, "acquired", "a, b", "advisory", waited=0.5)
        hub.record("pause", 0.1)
    assert caplog.text.count("ZeroDivisionError") >= 2
    (event,) = seen
    assert (event.event, event.name, event.kind, event.waited, event.held) == (
        "acquired",
        "a, b",
        "advisory",
        0.5,
        None,
    )
    assert event.at.tzinfo is not None


def test_without_a_listener_no_event_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the time is read."""
    monkeypatch.setattr("pgfence._process.events.LockEvent", None)
    monkeypatch.setattr("pgfence._process.events.datetime", None)
    emit_event(EventHub(), "acquired", "a", "advisory")


def test_listeners_can_be_added_before_and_after_the_settings() -> None:
    """`configure()` accepts an engine that already has other listeners, and its own is called too."""
    engine, seen = create_engine("postgresql+psycopg://"), []

    def add(what: str) -> Any:
        return lambda event: seen.append((what, event.event))

    early, timing = add("early"), print
    events_of(engine).add(early, timing)
    configure(engine, on_event=add("application"))
    events_of(engine.execution_options(isolation_level="AUTOCOMMIT")).add(add("late"), timing)
    emit_event(config_of(engine).events, "lost", "a", "lease")
    assert seen == [("application", "lost"), ("early", "lost"), ("late", "lost")]
    events_of(engine).remove(early, timing)
    emit_event(config_of(engine).events, "lost", "a", "lease")
    assert [what for what, _ in seen[3:]] == ["application", "late"]


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
