"""Values that describe locks, their holders and their events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict
from uuid import UUID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from uuid import UUID

    from pgfence.keys import LockKey

State: TypeAlias = Literal["held", "unknown", "lost", "released"]
OnLoss: TypeAlias = Literal["cancel", "flag"]


@dataclass(frozen=True, slots=True)
class Holder:
    """A holder of a lock, as the server reports it.

    Attributes:
        name: the readable name, if known.
        key: the key of an advisory or transaction lock. Leases and other kinds that are rows in a table have none.
        kind: for example "advisory", "session lock" (an advisory lock with a token), "transaction", "lease" or "slot".
        mode: "exclusive" or "shared".
        owner: the `owner=` that the holder passed, or by default its host name and process id, if its kind has an owner.
        host: the address of the client, or None on a Unix socket; for a kind with a token, the name of the holder's host.
        pid: the process id of the client, if the kind of the lock records it.
        backend_pid: the process id of the server process, or None for a prepared transaction.
        application_name: the `application_name` of the client.
        purpose: the `purpose=` that the holder passed.
        token: the fencing token, if its kind has one.
        since: for a kind with a token, when the lock was granted; otherwise, when the transaction of the holder's session began,
            or, if it has none, when the state of the session last changed; for a prepared transaction, when it was prepared.
        expires_at: when the hold expires by the server's clock, if its kind expires.
        user: the role of the holder's session; only `monitoring.ps()` fills it in.
        address: the address that the owner of a partition registered.
    """

    name: str | None
    key: LockKey | None
    kind: str
    mode: Literal["exclusive", "shared"] = "exclusive"
    owner: str | None = None
    host: str | None = None
    pid: int | None = None
    backend_pid: int | None = None
    application_name: str | None = None
    purpose: str = ""
    token: int | None = None
    since: datetime | None = None
    expires_at: datetime | None = None
    user: str | None = None
    address: str | None = None

    def __str__(self) -> str:
        who = self.owner or self.application_name or "a session without a name"
        where = f" on {self.host}" if self.host else ""
        process = f" (backend {self.backend_pid})" if self.backend_pid else ""
        since = f", since {self.since.isoformat(timespec='seconds')}" if self.since else ""
        return f"{who}{where}{process}{since}"


@dataclass(frozen=True, slots=True)
class Event:
    """An event that is passed to `configure(on_event=...)`. Every kind of event has these fields.

    The events of locks, leases, keys, fences and versions are of the class `LockEvent`, whose `event` is "acquired",
    "refused", "timeout", "released", "lost", "reclaimed", "renewal_failed", "release_failed", "evicted", "fence_rejected",
    "conflict", "replayed" or "reused". An attempt of `run_transaction` is a `TransactionAttempt`, and a pause of this
    process is a `ProcessPause` ("paused").

    Attributes:
        event: what happened.
        name: the name of the lock, key or fenced resource, without the namespace (several names are separated by commas); for
            "conflict", the name of the class.
        owner: the `owner=` that the holder passed, for leases, permits, partitions and terms.
        lease_id: identifies one grant of a lease.
        token: the fencing token of the grant; for "fence_rejected", the token that was rejected.
        at: the time of the event, on the clock of this process, in UTC.
    """

    event: str
    name: str | None
    owner: str | None
    lease_id: UUID | None
    token: int | None
    at: datetime


@dataclass(frozen=True, slots=True)
class LockEvent(Event):
    """An event of a lock, lease, idempotency key, fence or version. A field that does not apply is None.

    Attributes:
        kind: "advisory", "session lock" (an advisory lock with a token), "read", "write", "transaction", "lease", "slot", "permit",
            "term", "partition", "idempotency key", "effect", "fence" or "version".
        ttl: the TTL in seconds, if the kind has one.
        waited: the seconds from the call until the request was granted, rejected or timed out.
        held: the seconds for which the lock was held, for the events of its release and loss.
        reason: the `loss_reason` of a loss, or of the failed release of an advisory lock; the class of the error of another failed
            renewal or release; the reason that the operator gave for an eviction; "stale", "missing" or "timeout" for a rejection
            by a fence; "written" or "deleted" for a conflict of versions.
        attempt: the number of the attempt, for slots and effects.
        contended: whether another holder had the lock when it was requested.
    """

    kind: str = ""
    ttl: float | None = None
    waited: float | None = None
    held: float | None = None
    reason: str | None = None
    attempt: int | None = None
    contended: bool = False


@dataclass(frozen=True, slots=True)
class ProcessPause(Event):
    """The heartbeat thread woke up so late that a lease of this process was at risk.

    Attributes:
        seconds: how late the thread woke up.
        ttl: the shortest TTL among the leases held.
        margin: the seconds of that TTL that the holder keeps in reserve for pauses.
    """

    seconds: float
    ttl: float
    margin: float


Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


class LeaseRef(TypedDict):
    """A handed-over lease, as plain JSON for a queue. Any process that has this reference can adopt the lease, but only once."""

    name: str
    lease_id: str
    token: int


# The module is set because a pickled error contains its holders, and a later release may have renamed this module.
for _public in (Holder, Event, LockEvent, ProcessPause, LeaseRef):
    _public.__module__ = "pgfence"
