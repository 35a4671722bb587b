"""The requests for leases, slots and attempts, and the results that the server returns for them, without I/O.

`run_steps` yields statements and receives their rows, so that sync and async callers run the same steps.
"""

from __future__ import annotations

import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from pgfence._holds.hold import format_names
from pgfence._leases import terms
from pgfence._leases.json_text import decode_json
from pgfence._sql.activity import build_lease_holder
from pgfence._sql.lease import lease_sql
from pgfence.keys import unqualify_name

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from datetime import datetime

    from pgfence._leases.terms import Heartbeat, LeaseTerms
    from pgfence._sql.params import ParamStyle, Row
    from pgfence._sql.storage import TableNames
    from pgfence.keys import LockKey
    from pgfence.types import Holder, Json, LeaseRef

log = logging.getLogger("pgfence.lease")


@dataclass(frozen=True, slots=True)
class Granted:
    """The server has granted the request."""

    token: int
    expires_at: datetime
    remaining: float
    hold_remaining: float | None
    checkpoint: Json
    slot: datetime | None = None
    attempt: int = 1
    rows: tuple[tuple[str, int], ...] = ()
    """The granted rows with their tokens, if there can be several. `token` is the token of the first row."""
    reclaimed: bool = False
    """Whether the previous grant had expired and was never released."""


@dataclass(frozen=True, slots=True)
class Busy:
    """The name is held by another holder, or not free yet.

    `remaining` is the number of seconds after which, as far as the server knows, the name is free at the earliest.
    """

    remaining: float
    holder: Holder | None = None
    limit: int | None = field(default=None, kw_only=True)
    """The number of permits, if the name is a semaphore."""


class Refused(Exception):
    """The request will not be granted, however long the caller waits."""


Outcome: TypeAlias = Granted | Busy
Steps: TypeAlias = Generator[tuple[str, "Sequence[object]"], Any, Outcome]


@dataclass(frozen=True, slots=True)
class Identity:
    """The description of the holder that the caller passed, for operators."""

    owner: str | None = None
    purpose: str = ""
    metadata: str | None = None


@dataclass(frozen=True, kw_only=True)
class AcquireRequest(ABC):
    """A request for one name."""

    stored: str
    place: TableNames
    terms: LeaseTerms
    identity: Identity = field(default_factory=Identity)
    heartbeat: Heartbeat = "auto"
    waiter: str | None = None
    """The id of the caller in a queue on the server, or None if it waits in none."""

    kind = "lease"
    needed: ClassVar[int | None] = None
    """The version of the tables that the request needs, if it differs from the manager's version."""

    @property
    def once_only(self) -> str:
        """The reason why the holder cannot acquire the name again, for messages."""
        return "a lease is not re-entrant. Pass the handle on"

    @property
    def weight(self) -> int | None:
        """The number of requested permits, or None.

        Contenders for permits do not queue in this process, because several may hold permits.
        """
        return None

    @property
    def row(self) -> tuple[TableNames, str] | None:
        """The requested row of the lease table, or None for an attempt at an effect, which has a row in another table."""
        return None if self.kind == "effect" else (self.place, self.stored)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return (unqualify_name(self.stored),)

    @property
    def keys(self) -> tuple[LockKey, ...]:
        return ()

    @property
    def places(self) -> tuple[Hashable, ...]:
        """The queues in which contenders of this process wait for the name."""
        return ((self.place, self.stored),)

    @abstractmethod
    def run_steps(self, style: ParamStyle, lease_id: str) -> Steps:
        """Yield the statements of one attempt, receive the row of each, and return the outcome."""


@dataclass(frozen=True, kw_only=True)
class LeaseRequest(AcquireRequest):
    def build_statement(self, style: ParamStyle, lease_id: str) -> tuple[str, tuple[object, ...]]:
        """Return the statement that acquires the lease, and its arguments."""
        terms, identity = self.terms, self.identity
        return lease_sql(self.place, style).acquire, (
            self.stored,
            self.stored,
            lease_id,
            terms.ttl,
            terms.min_hold,
            terms.lock_delay,
            terms.max_hold,
            owner_of(identity),
            get_host(),
            os.getpid(),
            identity.purpose,
            identity.metadata,
            self.kind,
        )

    def run_steps(self, style: ParamStyle, lease_id: str) -> Steps:
        row = yield self.build_statement(style, lease_id)
        before, granted, token, expires_at, remaining, hold_remaining, checkpoint, *holder, set_back = row
        warn_of_clock(self, set_back)
        if granted:
            told = decode_json(checkpoint)
            return Granted(token, expires_at, remaining, hold_remaining, told, reclaimed=before == token - 1)
        *who, since = holder
        return Busy(remaining, holder_of(self, (*who, token, since, expires_at)))


def holder_of(claim: AcquireRequest, row: Row) -> Holder:
    """Return the holder that a row of `look` describes."""
    return build_lease_holder(claim.names[0], row)


def warn_of_clock(claim: AcquireRequest, set_back: float | None) -> None:
    """Log a warning if the server's clock was set back by a second or more while the name was held."""
    if set_back is not None and set_back >= terms.NOTABLE_STEP:
        log.warning(
            "the database server's clock was set back by %.0f s or more while the %s %s was held. The times of this"
            " hold were moved back too. If the holder is dead, the name becomes available within one TTL from now. Check the"
            " time service of that server",
            set_back,
            claim.kind,
            format_names(claim.names),
        )


@cache
def get_host() -> str:
    return socket.gethostname()


def owner_of(identity: Identity) -> str:
    """Return the holder's name for operators: the owner that the caller passed, or the host and process id."""
    return identity.owner or f"{get_host()}:{os.getpid()}"


def build_adoption(
    style: ParamStyle, claim: AcquireRequest, reference: LeaseRef, new: str
) -> tuple[str, tuple[object, ...]]:
    """Return the statement that takes over a lease, and its arguments."""
    owner = claim.identity.owner
    args = (claim.stored, reference["lease_id"], reference["token"], new, owner, get_host(), os.getpid())
    return lease_sql(claim.place, style).adopt, args


def read_adoption(claim: AcquireRequest, token: int, row: Row) -> tuple[AcquireRequest, Granted] | str:
    """Return the adopted lease with the TTL and purpose from the table, or the reason why it was not adopted."""
    outcome, expires_at, remaining, hold_remaining, ttl, checkpoint, purpose, set_back = row
    warn_of_clock(claim, set_back)
    if outcome != "ok":
        return str(outcome)
    found = replace(
        claim,
        terms=claim.terms._replace(ttl=ttl),
        identity=replace(claim.identity, purpose=purpose or ""),
    )
    return found, Granted(token, expires_at, remaining, hold_remaining, decode_json(checkpoint))
