"""Build the query for the audit table, and convert its rows to entries."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from pgfence._admin.requests import check_non_empty
from pgfence._sql.audit import AuditQuery
from pgfence._sql.params import from_microseconds
from pgfence._sql.storage import table_names_of
from pgfence.keys import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._sql.params import Row

_FREE_KEY = "free key"
# PostgreSQL raises an error for an age that its timestamps cannot represent.
_LONGEST = timedelta(days=36_525).total_seconds()


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A row of the audit table. It records what an operator did to a hold, a leader, a key or a leaked lock.

    Attributes:
        action: "evict", "ask to resign", "free key" or "release leaked".
        namespace: the namespace of the name; empty if it has none.
        resource: the name of the lock or election; for a key, its scope and the key, separated by a space; for a leaked lock,
            the session.
        actor: the person or program that performed the action.
        reason: the reason that was given.
        at: the time of the action, by the server's clock.
        detail: what the action found, such as the holder, as JSON values.
    """

    action: str
    namespace: str
    resource: str
    actor: str | None
    reason: str | None
    at: datetime
    detail: Mapping[str, Any]


def build_audit_query(
    engine: Engine | AsyncEngine, *, since: datetime | timedelta | None, action: str | None
) -> AuditQuery:
    """Check the arguments of a search in the audit table, and return the query."""
    wanted = None if action is None else check_non_empty(action, "action")
    place = table_names_of(engine)
    if since is None:
        return AuditQuery(place, None, None, wanted)
    if isinstance(since, timedelta):
        return AuditQuery(place, None, min(since.total_seconds(), _LONGEST), wanted)
    if not isinstance(since, datetime):
        raise TypeError(f"since must be a datetime or a timedelta, not {type(since).__name__}")
    if since.tzinfo is None:
        raise ValueError(
            f"since={since} has no time zone, and the server's may differ from that of this process: use datetime(..., tzinfo=UTC)"
        )
    return AuditQuery(place, since.timestamp(), None, wanted)


def to_audit_entry(row: Row) -> AuditEntry:
    """Convert a row of the audit table to an `AuditEntry`."""
    _, action, stored, actor, reason, at, detail = row
    parts = stored.split(SEPARATOR)
    own = 2 if action == _FREE_KEY else 1
    namespace = parts[0] if len(parts) > own else ""
    return AuditEntry(
        action=action,
        namespace=namespace,
        resource=" ".join(parts[-own:]),
        actor=actor,
        reason=reason,
        at=from_microseconds(at),
        detail=json.loads(detail) if detail else {},
    )
