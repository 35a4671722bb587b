"""The statements of attempts at effects. All but `end` call one server function."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from pgfence._sql.errors import detail_of
from pgfence._sql.params import call, mark, name_of, style_of
from pgfence._sql.sqlstate import sqlstate_of
from pgfence._sql.transaction import send_quick

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames

LATE_ATTEMPT = "PF005"

_CLAIM = "text, text, bytea, text, double precision, double precision, boolean, text, text, integer"
_RENEW = "text[], text[], bigint[], double precision[]"
_STEP = "text, text, bigint, text, text"
_FINISH = "text, text, bigint, double precision, text, text, integer, text, bytea, boolean"
_FREE = "text, text, bigint"
_FORGET = "text, text"
_ENDED = "text, uuid, bigint, jsonb"


@dataclass(frozen=True, slots=True)
class EffectSql:
    """The statement texts of effects, for one set of tables and one parameter style.

    A name is scope, U+001F and key. The statements of the heartbeat use the same names as those of leases.

    Attributes:
        claim: scope, key, fingerprint, claim id, ttl, keep, whether to take over from a lost attempt, owner, host, pid, and scope
                and key again. One row: outcome, attempt, locked_until, remaining, steps as JSON, result as JSON, HTTP status,
                headers as JSON, body; owner, host, pid and since of the running attempt; and the TTL of the claim of a busy or
                lost attempt, NULL before version 3.
        renew: lists of names, claim ids, attempts, ttls. One value, for `lease.decode_renewals`.
        step: name, claim id, attempt, step, value as JSON. One value: the current attempt, -1 if the key has none, or NULL if the
            key does not exist.
        finish: name, claim id, attempt, keep, status, result as JSON, HTTP status, headers as JSON, body, whether pgfence opened
            the transaction. One value, as for `step`.
        free: name, claim id, attempt. One value: "released", or why not.
        finish_late: name, then as for `finish`; for the heartbeat, which must not wait for a row lock. NULL means that the
            heartbeat must try again.
        release_late: name, then as for `free`; for the heartbeat.
        forget_late: name twice, claim id; for the heartbeat. One value: whether the statement ended an attempt.
        end: name, claim id, attempt, a note as JSON, which the next caller reads as the result of the busy attempt. It waits for
            no lock. One row: whether the note was written, whether the claim is still this attempt's, and the status, attempt,
            seconds left and `locked_until` of the key; all NULL if the key does not exist.
    """

    claim: str
    renew: str
    step: str
    finish: str
    free: str
    finish_late: str
    release_late: str
    forget_late: str
    end: str


@cache
def effect_sql(place: TableNames, style: ParamStyle) -> EffectSql:

    def ask(function: str, kinds: str, columns: str = "r") -> str:
        return f"SELECT {columns} FROM {call(place, style, function, kinds)} AS r"

    def build_late(function: str, kinds: str, missing: str) -> str:
        return (
            f"WITH n AS (SELECT CAST({mark(style, 1)} AS text) AS name), s AS (SELECT name,"
            " pg_catalog.split_part(name, pg_catalog.chr(31), -1) AS key FROM n),"
            f" f AS MATERIALIZED (SELECT k.key FROM {keys} AS k, s WHERE k.key = s.key AND k.scope ="
            " pg_catalog.left(s.name, -1 - pg_catalog.length(s.key)) FOR NO KEY UPDATE OF k SKIP LOCKED)"
            f" SELECT CASE WHEN EXISTS (SELECT FROM f) THEN {call(place, style, function, kinds, 2)}"
            f" WHEN NOT EXISTS (SELECT FROM {keys} AS k, s WHERE k.key = s.key AND k.scope ="
            f" pg_catalog.left(s.name, -1 - pg_catalog.length(s.key))) THEN {missing} END"
        )

    keys = name_of(place, "idempotency_key", style)
    # Both times come from one version of the row. The tables of version 2 have no "locked_at".
    lifetime = (
        " LEFT JOIN LATERAL (SELECT EXTRACT(epoch FROM k.locked_until"
        " - (pg_catalog.to_jsonb(k) ->> 'locked_at')::timestamptz)::double precision AS ttl"
        f" FROM {keys} AS k WHERE k.scope = CAST({mark(style, 11)} AS text) AND k.key = CAST({mark(style, 12)} AS text)"
        " AND r.outcome IN ('busy', 'lost')) AS t ON true"
    )
    return EffectSql(
        claim=ask("claim_effect_v1", _CLAIM, "r.*, t.ttl") + lifetime,
        renew=ask("renew_keys_v1", _RENEW),
        step=ask("save_step_v1", _STEP),
        finish=ask("finish_effect_v1", _FINISH),
        free=ask("free_effect_v1", _FREE),
        finish_late=build_late("finish_effect_v1", _FINISH, "0"),
        release_late=build_late("free_effect_v1", _FREE, "'superseded'"),
        forget_late=build_late("forget_effect_v1", _FORGET, "false"),
        end=_build_end(keys, style),
    )


def _build_end(keys: str, style: ParamStyle) -> str:
    name, claim, attempt, note = (f"CAST({mark(style, n)} AS {kind})" for n, kind in enumerate(_ENDED.split(", "), 1))
    here = "k.key = n.key AND k.scope = pg_catalog.left(n.name, -1 - pg_catalog.length(n.key))"
    return (
        f"WITH g AS (SELECT {name} AS name, {claim} AS claim, {attempt} AS attempt, {note} AS note),"
        " n AS (SELECT g.*, pg_catalog.split_part(name, pg_catalog.chr(31), -1) AS key FROM g),"
        f" f AS MATERIALIZED (SELECT k.scope, k.key, n.note FROM {keys} AS k, n WHERE {here} AND k.claim_id = n.claim"
        " AND k.attempt = n.attempt AND k.status = 'in_progress' FOR NO KEY UPDATE OF k SKIP LOCKED),"
        f" u AS (UPDATE {keys} AS k SET result = f.note FROM f WHERE k.scope = f.scope AND k.key = f.key RETURNING 1)"
        " SELECT EXISTS (SELECT FROM u), k.claim_id = n.claim AND k.attempt = n.attempt, k.status, k.attempt,"
        " GREATEST(0, EXTRACT(epoch FROM k.locked_until - pg_catalog.clock_timestamp()))::double precision, k.locked_until"
        f" FROM n LEFT JOIN {keys} AS k ON {here}"
    )


def finish_inside(connection: Connection, place: TableNames, values: tuple[object, ...]) -> int | None:
    """Store the outcome of an attempt in the caller's own transaction, and return the result of `finish`.

    A result that is not the number of this attempt means that the transaction is aborted.
    """
    try:
        answer: int | None = send_quick(connection, effect_sql(place, style_of(connection.dialect)).finish, values)
    except DBAPIError as error:
        if sqlstate_of(error) != LATE_ATTEMPT:
            raise
        answer = detail_of(error).get("newest")
    return answer
