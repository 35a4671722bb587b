"""The warning about a process that was stopped for a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pgfence._leases.grant import Pauses
from pgfence._process.events import EventHub
from pgfence.types import ProcessPause

if TYPE_CHECKING:
    import pytest


def told(caplog: pytest.LogCaptureFixture) -> int:
    """Return how many warnings there were since the last look."""
    count = len(caplog.records)
    caplog.clear()
    return count


def test_a_pause_is_logged_if_it_uses_up_a_share_of_the_margin(caplog: pytest.LogCaptureFixture) -> None:
    """A quarter of a margin of 1 s; the ttl of the shortest lease is named; without a lease there is nothing to say."""
    held: list[Any] = [SimpleNamespace(ttl=60.0), SimpleNamespace(ttl=10.0)]
    pauses, events = Pauses(), EventHub()
    for late, leases in ((5, []), (0.2, held)):
        pauses.note(late, leases)
        pauses.report(events)
    assert told(caplog) == 0
    pauses.note(0.3, held)
    pauses.report(events)
    assert "stopped for 0.30 s, and a lease with ttl=10 s has a safety margin of only 1.00 s" in caplog.text
    assert caplog.records[0].levelname == "WARNING"
    assert caplog.records[0].pgfence["ttl"] == 10.0


def test_a_pause_is_logged_again_only_when_it_is_twice_as_long(caplog: pytest.LogCaptureFixture) -> None:
    """A machine that is always a little late does not fill the log; listeners get every pause."""
    held: list[Any] = [SimpleNamespace(ttl=10.0)]
    pauses, events, heard, delays = Pauses(), EventHub(), [], []
    events.set_listener(heard.append)
    observer = SimpleNamespace(observe=heard.append, observe_timing=lambda *values: delays.append(values))
    events.set_observer(observer)
    for late, lines in ((0.3, 1), (0.3, 0), (0.6, 0), (0.61, 1), (1.2, 0), (3, 1)):
        pauses.note(late, held)
        pauses.report(events)
        assert told(caplog) == lines
    assert [(type(each), each.event, each.seconds) for each in heard[::2]] == [
        (ProcessPause, "paused", late) for late in (0.3, 0.3, 0.6, 0.61, 1.2, 3)
    ]
    assert delays == [("pause", late) for late in (0.3, 0.3, 0.6, 0.61, 1.2, 3)]
