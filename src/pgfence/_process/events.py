"""Pass the events of one engine to the listener of `configure(on_event=...)` and to `pgfence.telemetry`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from pgfence._process.callbacks import call_logged

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from pgfence.types import Event

    Timing: TypeAlias = Literal["renewal", "pause"]


class EventObserver(Protocol):
    """The methods with which telemetry receives events.

    The event of a lock is passed as values, because building a `LockEvent` costs as much as a statement.
    """

    def observe_lock(
        self,
        event: str,
        name: str,
        kind: str,
        token: int | None,
        owner: str | None,
        waited: float | None,
        held: float | None,
        reason: str | None,
        contended: bool,
    ) -> object: ...

    def observe(self, event: Event) -> object: ...

    def observe_timing(self, what: Timing, seconds: float) -> object:
        """Note a duration in seconds: that of a renewal, or the delay with which the heartbeat's thread woke up."""


class EventHub:
    """Passes the events of one engine to its listener and its observer.

    Callers check `active` before they compute what an event contains, so that an event without a listener costs nothing.
    """

    __slots__ = ("active", "listener", "observer")

    def __init__(self) -> None:
        self.listener: Callable[[Event], object] | None = None
        self.observer: EventObserver | None = None
        self.active = False

    def set_listener(self, listener: Callable[[Event], object] | None) -> None:
        """Set the listener of `configure(on_event=...)`."""
        self.listener = listener
        self.active = listener is not None
        if self.observer is not None:  # read last, because another thread may set the observer in the meantime
            self.active = True

    def set_observer(self, observer: EventObserver) -> None:
        """Set the observer, which is notified in addition to the listener."""
        self.observer = observer
        self.active = True

    def emit(self, event: Event) -> None:
        """Pass on an event that is not a `LockEvent`. Do not call this under a lock of pgfence. Exceptions are logged."""
        if (observer := self.observer) is not None:
            call_logged(observer.observe, event)
        self.notify(event)

    def notify(self, event: Event) -> None:
        """Call the listener. An exception of the listener is logged, because it must not affect the lock."""
        if (listener := self.listener) is not None:
            call_logged(listener, event)

    def record(self, what: Timing, seconds: float) -> None:
        """Pass a duration to the observer."""
        if (observer := self.observer) is not None:
            call_logged(observer.observe_timing, what, seconds)


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
    """Notify the observer and the listener. Do not call this under a lock of pgfence, because a listener may block."""
    if (observer := events.observer) is not None:
        call_logged(observer.observe_lock, event, name, kind, token, owner, waited, held, reason, contended)
    if events.listener is not None:
        from pgfence.types import LockEvent  # only a listener needs the event object

        events.notify(
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
    """Return the `extra` of a log record.

    All fields are in one attribute, because every record already has an attribute `name`.
    """
    fields = {"event": event, "name": name, "owner": owner, "lease_id": lease_id and str(lease_id), "token": token}
    return {"pgfence": {**fields, "ttl": ttl}}
