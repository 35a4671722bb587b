"""The listeners to the events of one engine: that of `configure(on_event=...)` and those of `pgfence.telemetry`."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, TypeAlias

from pgfence.types import LockEvent

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from pgfence.types import Event

    Listener: TypeAlias = Callable[[Event], object]
    Timing: TypeAlias = Literal["renewal", "pause"]
    TimingListener: TypeAlias = Callable[[Timing, float], object]

log = logging.getLogger("pgfence.advisory")


class EventHub:
    """The listeners of one engine.

    Callers check `listeners` before they build an event, so that an event nobody listens to costs nothing.
    """

    __slots__ = ("_added", "_application", "listeners", "timings")

    def __init__(self) -> None:
        self._application: tuple[Listener, ...] = ()
        self._added: tuple[Listener, ...] = ()
        self.listeners: tuple[Listener, ...] = ()
        """All listeners, the application's first."""
        self.timings: tuple[TimingListener, ...] = ()
        """Called with each duration of a renewal, and each delay with which the heartbeat's thread woke up."""

    def set_application(self, listener: Listener | None) -> None:
        """Set the listener of `configure(on_event=...)`."""
        self._application = () if listener is None else (listener,)
        self.listeners = self._application + self._added

    def add(self, listener: Listener, timing: TimingListener) -> None:
        """Add listeners in addition to the application's."""
        self._added = (*self._added, listener)
        self.timings = (*self.timings, timing)
        self.listeners = self._application + self._added

    def remove(self, listener: Listener, timing: TimingListener) -> None:
        """Remove listeners that were added."""
        self._added = tuple(each for each in self._added if each != listener)
        self.timings = tuple(each for each in self.timings if each != timing)
        self.listeners = self._application + self._added

    def emit(self, event: Event) -> None:
        """Call all listeners, without a lock of pgfence held. Their exceptions are logged."""
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                log.exception("a callback of a lock failed")

    def record(self, what: Timing, seconds: float) -> None:
        """Pass a duration to the timing listeners. Their exceptions are logged."""
        for timing in self.timings:
            try:
                timing(what, seconds)
            except Exception:
                log.exception("a callback of a lock failed")


def emit_event(
    events: EventHub,
    event: str,
    name: str,
    kind: str,
    *,
    owner: str | None = None,
    lease_id: UUID | None = None,
    token: int | None = None,
    ttl: float | None = None,
    waited: float | None = None,
    held: float | None = None,
    reason: str | None = None,
    attempt: int | None = None,
    contended: bool = False,
) -> None:
    """Call the listeners, if there are any. Not under the mutex or another lock of pgfence, because a listener may block."""
    if events.listeners:
        events.emit(
            LockEvent(
                event=event,
                name=name,
                owner=owner,
                lease_id=lease_id,
                token=token,
                at=datetime.now(UTC),
                kind=kind,
                ttl=ttl,
                waited=waited,
                held=held,
                reason=reason,
                attempt=attempt,
                contended=contended,
            )
        )


def build_log_fields(
    event: str,
    name: str | None = None,
    *,
    owner: str | None = None,
    lease_id: UUID | None = None,
    token: int | None = None,
    ttl: float | None = None,
) -> dict[str, dict[str, object]]:
    """Return the `extra` of a log record. It has one attribute, because `name` is an attribute of every record already."""
    fields = {"event": event, "name": name, "owner": owner, "lease_id": lease_id and str(lease_id), "token": token}
    return {"pgfence": {**fields, "ttl": ttl}}
