"""The statements of leases and slots. Each statement calls one server function or is a query.

Through a pooler, statements must not be prepared. asyncpg always prepares, so it needs a transaction around the statement.
Otherwise, the pooler could send the preparation and the execution to two servers.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from pgfence._sql.params import call, mark, name_of
from pgfence._sql.semaphore import PermitSql, permit_sql
from pgfence._sql.storage import quote_literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.errors import LossReason

BATCH = 500
"""The maximum number of leases that one statement renews."""


_ACQUIRE = (
    "text, text, double precision, double precision, double precision, "
    "double precision, text, text, integer, text, text, text"
)
_RENEW = "text[], text[], bigint[], double precision[]"
_RELEASE = "text, text, bigint"
_FINISH = "text, text, bigint, timestamptz, boolean"
_FORGET = "text, text"
_ADOPT = "text, text, bigint, text, text, text, integer"


class LeaseSql(NamedTuple):
    """The statement texts of leases, for one set of tables and one parameter style: their parameters in order, and the result.

    Attributes:
        acquire: name (twice), lease id, ttl, min_hold, lock_delay, max_hold or None, owner, host, pid, purpose, metadata as JSON or
            None, kind. One row: the token of a lease that had expired unreleased when the statement began, if there is one,
                granted, token, expires_at, remaining, hold_remaining, checkpoint as JSON, kind, owner, host, pid, backend_pid,
                application_name, purpose, since, set_back. If the lease is not granted, the row describes the holder, and
                `remaining` is the time until the name is free. `set_back` is None, or the seconds by which the server's clock was
                set back.
        renew: lists of names, lease ids, tokens, ttls. One value: JSON, for `decode_renewals`.
        release: name, lease id, token. One value: "released", or why not.
        finish: the release of a slot: name, lease id, token, slot, whether it is done.
        forget: name, lease id. One value: whether it ended a grant.
        adopt: name, lease id, token, new lease id, owner or None, host, pid. One row: outcome, expires_at, remaining,
            hold_remaining, ttl, checkpoint as JSON, purpose, set_back.
        release_late: name, and the parameters of `release`. For the heartbeat, which must not wait for a row lock while other
            leases need renewal. NULL means that another session has the row locked.
        finish_late: name, and the parameters of `finish`; for the heartbeat.
        forget_late: name, and the parameters of `forget`; for the heartbeat.
        look: name. One row if a lease or a session lock with a token is held: kind, owner, host, pid, backend_pid,
            application_name, purpose, token, since, expires_at.
        permits: the texts of semaphores.
        check: lists of names, lease ids, tokens. One value: JSON, for `decode_losses`.
    """

    acquire: str
    renew: str
    release: str
    finish: str
    forget: str
    adopt: str
    release_late: str
    finish_late: str
    forget_late: str
    look: str
    check: str
    permits: PermitSql


@cache
def lease_sql(place: TableNames, style: ParamStyle) -> LeaseSql:

    def ask(function: str, kinds: str, columns: str) -> str:
        return f"SELECT {columns} FROM {call(place, style, function, kinds)} AS r"

    def build_late(function: str, kinds: str) -> str:
        return (
            f"WITH f AS MATERIALIZED (SELECT 1 FROM {lease} AS l WHERE l.name = CAST({mark(style, 1)} AS text)"
            " FOR NO KEY UPDATE SKIP LOCKED) SELECT CASE WHEN EXISTS (SELECT FROM f)"
            f" THEN {call(place, style, function, kinds, 2)} END"
        )

    lease = name_of(place, "lease", style)
    session_holds = name_of(place, "session_holds_v1", style)
    return LeaseSql(
        permits=permit_sql(place, style),
        acquire=(
            f"SELECT {read_unreleased(place, style)}, r.*"
            f" FROM {call(place, style, 'acquire_lease_v2', _ACQUIRE, 2)} AS r"
        ),
        renew=ask("renew_leases_v1", _RENEW, "r"),
        release=ask("release_lease_v1", _RELEASE, "r"),
        finish=ask("finish_slot_v1", _FINISH, "r"),
        forget=ask("forget_lease_v1", _FORGET, "r"),
        adopt=ask("adopt_lease_v2", _ADOPT, "r.*"),
        release_late=build_late("release_lease_v1", _RELEASE),
        finish_late=build_late("finish_slot_v1", _FINISH),
        forget_late=build_late("forget_lease_v1", _FORGET),
        look=(
            "SELECT CASE WHEN l.live THEN COALESCE(NULLIF(l.kind, 'session lock'), 'lease') ELSE l.kind END, l.owner, l.host,"
            " l.pid, l.backend_pid, CASE WHEN NOT l.live THEN (SELECT a.application_name FROM pg_catalog.pg_stat_activity AS a"
            " WHERE a.pid = l.backend_pid) END, l.purpose, l.token, l.acquired_at,"
            # No lease ends later than its TTL from now, even if the clock was set back since it was renewed.
            " CASE WHEN l.live THEN LEAST(l.expires_at, l.now + pg_catalog.make_interval(secs => l.ttl)) END"
            " FROM (SELECT t.*, n.now, t.released_at IS NULL AND t.expires_at > n.now AS live"
            f" FROM {lease} AS t, (SELECT pg_catalog.clock_timestamp() AS now) AS n"
            f" WHERE t.name = CAST({mark(style, 1)} AS text)) AS l"
            f" WHERE l.live OR l.lock_key IS NOT NULL AND {session_holds}(l.backend_pid, l.lock_key)"
        ),
        check=(
            "SELECT pg_catalog.json_agg(COALESCE((SELECT CASE WHEN l.evicted >= g.token THEN 'evicted'"
            " WHEN l.token = g.token AND l.lease_id = g.lease_id::uuid AND l.released_at IS NULL THEN 'held'"
            f" ELSE 'superseded' END FROM {lease} AS l WHERE l.name = g.name), 'superseded') ORDER BY g.n)::text"
            f" FROM ROWS FROM (pg_catalog.unnest(CAST({mark(style, 1)} AS text[])),"
            f" pg_catalog.unnest(CAST({mark(style, 2)} AS text[])), pg_catalog.unnest(CAST({mark(style, 3)} AS bigint[])))"
            " WITH ORDINALITY AS g(name, lease_id, token, n)"
        ),
    )


def read_unreleased(place: TableNames, style: ParamStyle) -> str:
    """Return the expression for the token of a lease that had expired unreleased when the statement began.

    Its parameter is the name of the lease.
    """
    # The expression reads the row as it was before the function of the same statement changes it, although PostgreSQL evaluates
    # the expression afterwards. The function may have waited for a release, so a lease that expired in the meantime does not
    # count.
    return (
        f"(SELECT l.token FROM {name_of(place, 'lease', style)} AS l WHERE l.name = CAST({mark(style, 1)} AS text)"
        " AND l.released_at IS NULL AND l.expires_at <= pg_catalog.statement_timestamp() AND l.lock_key IS NULL)"
    )


Verdict: TypeAlias = Literal["ok", "busy", "lost"]


class LeaseResult(NamedTuple):
    """The result of one renewal."""

    verdict: Verdict
    remaining: float = 0.0
    expires_at: datetime | None = None
    reason: LossReason | None = None
    asked: bool = False
    """Whether the leader of an election was asked to resign."""


_BUSY = LeaseResult("busy")


def decode_renewals(text: str) -> list[LeaseResult]:
    """Return the results of `renew`, in the order of its lists."""
    return [_decode_renewal(item) for item in json.loads(text)]


def combine_results(results: Sequence[LeaseResult]) -> LeaseResult:
    """Combine the results of the rows of one grant.

    The grant is lost if any row is lost, and renewed only if all rows are renewed.
    """
    lost = next((each for each in results if each.verdict == "lost"), None)
    busy = next((each for each in results if each.verdict == "busy"), None)
    return lost or busy or min(results, key=lambda each: each.remaining)


def decode_losses(text: str) -> list[LossReason | None]:
    """Return the results of `check`, in the order of its lists. Each is the reason for a loss, or None if the grant is held."""
    return [None if found == "held" else found for found in json.loads(text)]


def _decode_renewal(item: list[object]) -> LeaseResult:
    match item:
        case ["ok", float() | int() as epoch, float() | int() as left]:
            return LeaseResult("ok", float(left), datetime.fromtimestamp(epoch, UTC))
        case ["ok", float() | int() as epoch, float() | int() as left, "asked"]:
            return LeaseResult("ok", float(left), datetime.fromtimestamp(epoch, UTC), asked=True)
        case ["lost", str() as reason]:
            return LeaseResult("lost", reason=reason)  # type: ignore[arg-type]
    return _BUSY


# ---------------------------------------------------------------- slots

_ACQUIRE_SLOT = (
    "text, timestamptz, timestamptz, text, double precision, double precision, "
    "text, text, integer, text, text, text, integer, timestamptz"
)


class SlotSql(NamedTuple):
    """The statement texts of slots, for one set of tables and one parameter style.

    Attributes:
        read: name. One row: the server's clock, the newest slot done, the newest slot tried; None if it does not exist.
        read_zone: zone, name. One row: as for `read`, the zone's UTC offset in seconds, None for an unknown zone, and the zone's
            offset at the newest slot done as the host that ran that slot knew it, None if it is not known.
        offset: instant, zone. One row: the zone's UTC offset in seconds at that instant, or None for an unknown zone.
        home: the quoted name of the slot table. One row: its schema.
        acquire: name, name, slot, until when it counts or None, lease id, ttl, max_hold or None, owner, host, pid, purpose,
            metadata as JSON or None, zone or None, its UTC offset in seconds at the slot or None, the newest slot done as it was
            read. One row: the token of a lease that had expired unreleased, as for `LeaseSql.acquire`, the outcome ("granted",
            "busy", "done", "moved", "zone"), then as for the `acquire` of a lease, and the number of attempts at the slot.
    """

    read: str
    read_zone: str
    offset: str
    home: str
    acquire: str


def build_repair(place: TableNames, stored: str) -> str:
    """Return the statement with which an operator allows a job to run again after a clock error.

    The statement is for a slot that was finished while the clock was ahead. It can be pasted into psql, and has no effect once
    the server's clock has passed the slot.
    """
    return (
        f"UPDATE {place.name('slot')} SET done = NULL, tried = NULL WHERE name = {_quote_pasteable(stored)}"
        " AND done > pg_catalog.clock_timestamp();"
    )


def _quote_pasteable(value: str) -> str:
    """Return a string as an SQL literal that survives log lines, terminals and emails."""
    # The literal has no line breaks and no adjacent spaces.
    if value.isprintable() and "  " not in value:
        return quote_literal(value)
    parts = []
    for before, char in zip(f"x{value}", value, strict=False):
        if char.isprintable() and char not in "'\\" and not before == char == " ":
            parts.append(char)
        else:
            code = ord(char)
            parts.append(f"\\x{code:02x}" if code < 0x80 else f"\\U{code:08x}")
    return f"E'{''.join(parts)}'"


@cache
def slot_sql(place: TableNames, style: ParamStyle) -> SlotSql:
    return SlotSql(
        read=(
            "SELECT pg_catalog.clock_timestamp(), s.done, s.tried FROM (SELECT) AS one"
            f" LEFT JOIN {name_of(place, 'slot', style)} AS s ON s.name = CAST({mark(style, 1)} AS text)"
        ),
        read_zone=(
            f"SELECT one.at, s.done, s.tried, {name_of(place, 'zone_offset_v1', style)}(one.at, CAST({mark(style, 1)} AS text)),"
            " CASE WHEN s.done = s.tried THEN s.tried_offset ELSE s.done_offset END"
            " FROM (SELECT pg_catalog.clock_timestamp() AS at OFFSET 0) AS one"
            f" LEFT JOIN {name_of(place, 'slot', style)} AS s ON s.name = CAST({mark(style, 2)} AS text)"
        ),
        offset=f"SELECT {call(place, style, 'zone_offset_v1', 'timestamptz, text')}",
        home=(
            "SELECT n.nspname FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace"
            f" WHERE c.oid = pg_catalog.to_regclass(CAST({mark(style, 1)} AS text))"
        ),
        acquire=(
            f"SELECT {read_unreleased(place, style)}, r.*"
            f" FROM {call(place, style, 'acquire_slot_v2', _ACQUIRE_SLOT, 2)} AS r"
        ),
    )
