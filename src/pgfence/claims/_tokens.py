"""Write, extend and finish claims that outlive the transaction."""

from __future__ import annotations

import os
import secrets
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakKeyDictionary

from sqlalchemy import DateTime, Table, and_, func, or_, select, tuple_, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm.attributes import instance_state, set_committed_value

from pgfence._leases.request import get_host
from pgfence._orm import get_key_columns, identity_of
from pgfence._process.clock import seconds
from pgfence._sql.claims import abort_transaction
from pgfence._sql.effects import LATE_ATTEMPT
from pgfence._sql.errors import raise_translated
from pgfence.claims._mixin import OWNER, TOKEN, UNTIL, Claimable
from pgfence.claims._statements import STANDBY, claim_rows, find_connection
from pgfence.errors import AttemptLostError, LockNotHeldError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Column, ColumnElement
    from sqlalchemy.orm import Mapper, Session

    from pgfence._orm import AnySelect, Key, State
    from pgfence._process.clock import Seconds


_SHORTEST, _DAY, _YEAR = 0.3, 86_400.0, 366 * 86_400.0


class _Claim(NamedTuple):
    token: int
    owner: str
    ttl: float


# The claim is not read from the instance, because after a commit the instance is expired, and reading it again would return the
# claim of a newer owner.
_CLAIMS: WeakKeyDictionary[State, _Claim] = WeakKeyDictionary()


class _Columns(NamedTuple):
    """The table that has the mixin's columns, and these columns."""

    table: Table
    keys: list[Column[object]]
    token: ColumnElement[Any]
    until: ColumnElement[Any]
    owner: ColumnElement[Any]

    @classmethod
    def of(cls, mapper: Mapper[Any]) -> _Columns:
        token, until, owner = (mapper.column_attrs[name].columns[0] for name in (TOKEN, UNTIL, OWNER))
        table: object = getattr(token, "table", None)
        assert isinstance(table, Table)
        return cls(table, get_key_columns(mapper, table), token, until, owner)


def check_form(mapper: Mapper[Any], ttl: Seconds | None) -> float | None:
    """Return the TTL of a claim in seconds, or None for a claim that ends with the transaction."""
    claimable = issubclass(mapper.class_, Claimable)
    if ttl is None:
        if claimable:
            # A claim for the transaction would ignore the claims that other workers have committed.
            raise TypeError(
                f"{mapper.class_.__name__} is Claimable, so its claims need a TTL: call claim() with the class itself and ttl="
            )
        return None
    if not claimable:
        raise TypeError(
            f"{mapper.class_.__name__} has no columns for a claim with a TTL: put the mixin Claimable on the class, or omit ttl="
        )
    if getattr(mapper.class_, "__version_mode__", "client") != "client":
        raise TypeError(
            f"every claim would change the version of {mapper.class_.__name__}, and the next flush would fail: with Claimable,"
            " Versioned supports only the mode 'client'"
        )
    return _check_ttl(ttl)


def _check_ttl(ttl: Seconds) -> float:
    life = seconds(ttl, "ttl")
    most = _YEAR if isinstance(ttl, timedelta) else _DAY
    if not _SHORTEST <= life <= most:
        why = (
            ": even a short pause of the worker would let the claim expire"
            if life < _SHORTEST
            else ": if a worker dies, its row stays claimed until the ttl has passed. For longer work, call extend_claim()"
        )
        raise ValueError(
            f"ttl must be from {_SHORTEST:g} s to a day, or up to a year as a timedelta, not {life:g} s{why}"
        )
    return life


def claim_until(session: Session, query: AnySelect, mapper: Mapper[Any], limit: int, ttl: float) -> Sequence[Any]:
    """Lock rows without a live claim, write a new claim into each, and return them."""
    columns = _Columns.of(mapper)
    # statement_timestamp() is not later than the present time, so a claim that has expired by that time has certainly
    # expired. Unlike clock_timestamp(), it can be used with an index. A row that another transaction extends in the meantime
    # is checked again.
    expired = columns.until <= func.pg_catalog.statement_timestamp()
    rows = claim_rows(session, query.where(or_(columns.until.is_(None), expired)), mapper, limit)
    if not rows:
        return rows
    # The owner contains a random number, because after a rollback the next claim has the same token.
    owner = f"{get_host()}:{os.getpid()}:{secrets.token_hex(4)}"
    states = [instance_state(row) for row in rows]
    statement = (
        update(columns.table)
        .where(tuple_(*columns.keys).in_([identity_of(state) for state in states]))
        .values({columns.token: func.coalesce(columns.token, 0) + 1, columns.until: _add(ttl), columns.owner: owner})
        .returning(*columns.keys, columns.token, columns.until)
    )
    result = find_connection(session, mapper).execute(statement)
    written: dict[Key, Any] = {tuple(found[:-2]): found[-2:] for found in result}
    for row, state in zip(rows, states, strict=True):
        token, until = written[identity_of(state)]
        _CLAIMS[state] = _Claim(token, owner, ttl)
        _set(row, {TOKEN: token, UNTIL: until, OWNER: owner})
    return rows


def extend(session: Session, row: Claimable, ttl: Seconds | None) -> None:
    state, claim = _find_claim(row)
    claim = claim if ttl is None else claim._replace(ttl=_check_ttl(ttl))
    until = _write(session, state, claim, {UNTIL: _add(claim.ttl)})
    _CLAIMS[state] = claim
    _set(row, {UNTIL: until})


def finish(session: Session, row: Claimable) -> None:
    state, claim = _find_claim(row)
    _write(session, state, claim, {UNTIL: None, OWNER: None})
    _set(row, {UNTIL: None, OWNER: None})


def _add(ttl: float) -> ColumnElement[Any]:
    return func.pg_catalog.clock_timestamp(type_=DateTime(timezone=True)) + timedelta(seconds=ttl)


def _set(row: object, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        set_committed_value(row, name, value)


def _find_claim(row: object) -> tuple[State, _Claim]:
    if not isinstance(row, Claimable):
        raise TypeError(f"expected an instance of a class with the mixin Claimable, not {type(row).__name__}")
    state: State = instance_state(cast("object", row))
    claim = _CLAIMS.get(state)
    if claim is None:
        raise LockNotHeldError(
            f"this instance of {type(row).__name__} was not returned by claim(): pass the returned instance, not a copy of it"
        )
    return state, claim


def _write(session: Session, state: State, claim: _Claim, values: Mapping[str, object]) -> object:
    """Write the columns of a claim that is still the row's claim, and return when it expires."""
    columns = _Columns.of(state.mapper)
    connection = find_connection(session, state.mapper)
    same = and_(*(key == value for key, value in zip(columns.keys, identity_of(state), strict=True)))
    named = {{TOKEN: columns.token, UNTIL: columns.until, OWNER: columns.owner}[name]: values[name] for name in values}
    own = and_(same, columns.token == claim.token, columns.owner == claim.owner)
    try:
        result = connection.execute(update(columns.table).where(own).values(named).returning(columns.until))
    except DBAPIError as error:
        raise_translated(error, None, STANDBY)
        raise
    written = result.one_or_none()
    if written is None:
        newest = connection.execute(select(columns.token, columns.until).where(same)).one_or_none()
        raise _lost_error(state, claim, newest) from abort_transaction(connection)
    return written[0]


def _lost_error(state: State, claim: _Claim, newest: Any) -> AttemptLostError:
    table, key = state.mapper.base_mapper.local_table.description, ", ".join(map(str, identity_of(state)))
    token: int = claim.token if newest is None else newest[0] or 0
    if newest is None:
        why = "the row was deleted"
    elif token > claim.token:
        why = f"the claim expired, and another worker has claimed the row since (claim {token})"
    elif token == claim.token and newest[1] is None:
        why = "it has already been finished"
    else:
        why = "the transaction of the claim was rolled back"
    return AttemptLostError(
        f"claim {claim.token} of {table} {key} is lost: {why}. PostgreSQL has aborted this transaction: roll back, and do not"
        " write the result",
        scope=table,
        key=key,
        attempt=claim.token,
        newest=token,
        sqlstate=LATE_ATTEMPT,
    )
