"""Build the requests that list keys with unfinished effects and free one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pgfence._admin.requests import build_audit_fields
from pgfence._api.inputs import check_key, check_text
from pgfence._process.clock import seconds
from pgfence._sql.storage import table_names_of
from pgfence._sql.stuck_keys import FreeKeyRequest, StuckKeyQuery
from pgfence.config import config_of
from pgfence.keys import SEPARATOR, qualify_name

if TYPE_CHECKING:
    from datetime import datetime

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._process.clock import Seconds
    from pgfence._sql.stuck_keys import StuckKeyRow

_LONGEST = 1e9


@dataclass(frozen=True, slots=True)
class StuckKey:
    """A key whose effect had been started but not finished when the query ran. Stored results are not included.

    Attributes:
        scope: the scope, without the configured namespace.
        key: the key, as the client sent it.
        state: "running" while the attempt has the claim; "lost" after that, when the outcome of the attempt is unknown.
        attempt: the number of the attempt, starting at 1.
        steps: the names of the steps that are done, in alphabetical order.
        owner, host, pid: the owner, host and process id of the attempt, if known.
        since: when the key was claimed for the first time.
        locked_until: when the attempt's exclusive claim ends or ended.
        expires_at: when the record expires; after that the key counts as new.
    """

    scope: str
    key: str
    state: Literal["running", "lost"]
    attempt: int
    steps: tuple[str, ...]
    owner: str | None
    host: str | None
    pid: int | None
    since: datetime
    locked_until: datetime
    expires_at: datetime

    def __str__(self) -> str:
        who = f"{self.owner or 'an unknown owner'} on {self.host or 'an unknown host'} (pid {self.pid or 'unknown'})"
        return f"{self.key!r} of scope {self.scope!r}: attempt {self.attempt} of {who}, {self.state}"


def to_stuck_key(row: StuckKeyRow) -> StuckKey:
    """Convert a row of the result to a `StuckKey`."""
    return StuckKey(
        scope=row.scope.rpartition(SEPARATOR)[2],
        key=row.key,
        state="running" if row.running else "lost",
        attempt=row.attempt,
        steps=tuple(row.steps),
        owner=row.owner,
        host=row.host,
        pid=row.pid,
        since=row.since,
        locked_until=row.locked_until,
        expires_at=row.expires_at,
    )


def build_stuck_key_query(engine: Engine | AsyncEngine, *, older_than: Seconds, prefix: str) -> StuckKeyQuery:
    """Check the arguments of a search for stuck keys, and return the query."""
    check_text(prefix, "prefix")
    older = min(seconds(older_than, "older_than"), _LONGEST)
    return StuckKeyQuery(
        place=table_names_of(engine), namespace=config_of(engine).namespace, prefix=prefix, older=older
    )


def build_free_key_request(
    engine: Engine | AsyncEngine, scope: str, key: str, *, reason: str, actor: str | None
) -> FreeKeyRequest:
    """Check the arguments for freeing a key, and return the request."""
    reason, actor = build_audit_fields(reason, actor)
    return FreeKeyRequest(
        place=table_names_of(engine),
        scope=qualify_name(check_key(scope, "the scope"), config_of(engine).namespace, "the scope"),
        key=check_key(key, "the key"),
        reason=reason,
        actor=actor,
    )
