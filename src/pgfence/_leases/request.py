"""What is asked of the server for a lease, and what its answers mean. No I/O: a generator yields statements and gets rows.

So the sync and the async shell drive the very same steps.
"""

from __future__ import annotations

import json
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
    """The server has granted it."""

    token: int
    expires_at: datetime
    remaining: float
    hold_remaining: float | None
    checkpoint: Json
    slot: datetime | None = None
    attempt: int = 1
    rows: tuple[tuple[str, int], ...] = ()
    """The rows that were granted, with their tokens, if there may be several; `token` is that of the first."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Somebody has it, or had it: free in so many seconds at the earliest, as far as the server knows now."""

    remaining: float
    holder: Holder | None = None
    limit: int | None = field(default=None, kw_only=True)
    """Of a semaphore: how many permits it has."""


class Refused(Exception):
    """It will not be granted, however long one waits."""


Outcome: TypeAlias = Granted | Busy
Steps: TypeAlias = Generator[tuple[str, "Sequence[object]"], Any, Outcome]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is, as far as operators want to know."""

    owner: str | None = None
    purpose: str = ""
    metadata: str | None = None


@dataclass(frozen=True, kw_only=True)
class AcquireRequest(ABC):
    """One name that is asked for.

    Attributes:
        stored: as it stands in the table.
        place: of the tables.
        terms: what it is asked for, in seconds.
        identity: who asks.
        heartbeat: who renews it.
        waiter: the id with which it waits in a queue on the server, if it does.
    """

    stored: str
    place: TableNames
    terms: LeaseTerms
    identity: Identity = field(default_factory=Identity)
    heartbeat: Heartbeat = "auto"
    waiter: str | None = None

    kind = "lease"
    needed: ClassVar[int | None] = None
    """The version of the tables that it needs, if that is not the manager's."""

    @property
    def weight(self) -> int | None:
        """How many permits it asks for. Several contenders of this process may hold those, so none waits for another to end."""
        return None

    @property
    def row(self) -> tuple[TableNames, str] | None:
        """The row of the lease table that it asks for; None for an attempt at an effect, which has a row of its own."""
        return None if self.kind == "effect" else (self.place, self.stored)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return (unqualify_name(self.stored),)

    @property
    def keys(self) -> tuple[LockKey, ...]:
        return ()

    @property
    def places(self) -> tuple[Hashable, ...]:
        """Where its contenders of this process queue."""
        return ((self.place, self.stored),)

    @abstractmethod
    def run_steps(self, style: ParamStyle, lease_id: str) -> Steps:
        """Yield the statements of one attempt, get the row of each, and return what came of it."""


@dataclass(frozen=True, kw_only=True)
class LeaseRequest(AcquireRequest):
    """A lease."""

    def run_steps(self, style: ParamStyle, lease_id: str) -> Steps:
        terms, identity = self.terms, self.identity
        row = yield (
            lease_sql(self.place, style).acquire,
            (
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
            ),
        )
        granted, token, expires_at, remaining, hold_remaining, checkpoint, *holder, set_back = row
        warn_of_clock(self, set_back)
        if granted:
            return Granted(token, expires_at, remaining, hold_remaining, decode_json(checkpoint))
        *who, since = holder
        return Busy(remaining, holder_of(self, (*who, token, since, expires_at)))


def holder_of(claim: AcquireRequest, row: Row) -> Holder:
    """Return the holder that a row of `look` describes."""
    return build_lease_holder(claim.names[0], row)


def warn_of_clock(claim: AcquireRequest, set_back: float | None) -> None:
    """Log that the server's clock was set back while the name was blocked, and what that means."""
    if set_back is not None and set_back >= terms.NOTABLE_STEP:
        log.warning(
            "the clock of the database server was set back by %.0f s or more while the %s %s was held: its times were moved"
            " back too, so that it is free at the latest one TTL from now if its holder is dead. Check the time service of that"
            " server",
            set_back,
            claim.kind,
            format_names(claim.names),
        )


def decode_json(text: str | None) -> Json:
    found: Json = None if text is None else json.loads(text)
    return found


@cache
def get_host() -> str:
    return socket.gethostname()


def owner_of(identity: Identity) -> str:
    """Return what operators read of the holder: what it calls itself, or its process."""
    return identity.owner or f"{get_host()}:{os.getpid()}"


def build_adoption(
    style: ParamStyle, claim: AcquireRequest, reference: LeaseRef, new: str
) -> tuple[str, tuple[object, ...]]:
    """Return the statement that takes a lease over, and its arguments."""
    owner = claim.identity.owner
    args = (claim.stored, reference["lease_id"], reference["token"], new, owner, get_host(), os.getpid())
    return lease_sql(claim.place, style).adopt, args


def read_adoption(claim: AcquireRequest, token: int, row: Row) -> tuple[AcquireRequest, Granted] | str:
    """Return what was adopted, with the terms it has in the table; or why it was not."""
    outcome, expires_at, remaining, hold_remaining, ttl, checkpoint, purpose, set_back = row
    warn_of_clock(claim, set_back)
    if outcome != "ok":
        return str(outcome)
    found = replace(
        claim,
        terms=replace(claim.terms, ttl=ttl),
        identity=replace(claim.identity, purpose=purpose or ""),
    )
    return found, Granted(token, expires_at, remaining, hold_remaining, decode_json(checkpoint))


def encode_json(value: object, what: str) -> str | None:
    """Return a value as JSON that PostgreSQL takes.

    Raises:
        TypeError: it is no JSON.
        ValueError: it holds NaN, infinity or NUL.
    """
    if value is None:
        return None
    try:
        text = json.dumps(value, allow_nan=False)
    except TypeError as error:
        raise TypeError(f"{what} must be JSON: {error}") from None
    except ValueError as error:
        raise ValueError(f"{what} must be JSON: {error}") from None
    if "\\u0000" in text:
        raise ValueError(f"{what} must not contain NUL: PostgreSQL's jsonb cannot hold it")
    if "\\ud" in text:
        try:
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            found = error.object[max(0, error.start - 20) : error.end + 20]
            raise ValueError(f"{what} must be valid Unicode, it holds a lone surrogate: {found!r}") from None
    return text
