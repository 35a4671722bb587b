"""Read and lock the versions of many rows with one statement."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Text,
    and_,
    bindparam,
    case,
    cast,
    column,
    false,
    func,
    literal_column,
    null,
    select,
    true,
)
from sqlalchemy.types import UserDefinedType

from pgfence._orm import get_key_columns
from pgfence._sql.transaction import read_driver_state
from pgfence.errors import TransactionStateError
from pgfence.versions._mapping import get_version_column

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import BindParameter, Column, ColumnElement, Connection, Dialect, TableValuedAlias
    from sqlalchemy.orm import Mapper
    from sqlalchemy.sql.type_api import _BindProcessorType, _ResultProcessorType
    from sqlalchemy.types import TypeEngine

    from pgfence._orm import AnySelect, Key

    Row: TypeAlias = tuple[Mapper[object], Key]
    Way: TypeAlias = Literal["locked", "counted"]
    Outcome: TypeAlias = Literal["written", "some updated", "some deleted"]

_T = TypeVar("_T")
_XIDS = 2**32


def versions_of(
    connection: Connection, mapper: Mapper[object], keys: Sequence[Key], lock: dict[str, bool] | None = None
) -> list[object]:
    """Return the version of each row, or None for a row that does not exist.

    `lock` contains the options of a row lock, which is taken in the order of the keys. None means that the rows are not locked.
    """
    query, names = _build_query(mapper, None if lock is None else tuple(lock.items()))
    values = {name: [key[place] for key in keys] for place, name in enumerate(names)}
    found: dict[int, object] = dict(iter(connection.execute(query, values)))
    return [found.get(place) for place in range(1, len(keys) + 1)]


@lru_cache(maxsize=1000)
def _build_query(mapper: Mapper[object], lock: tuple[tuple[str, bool], ...] | None) -> tuple[AnySelect, list[str]]:
    """Return a SELECT of versions, and the names of its parameters, each of which is an array for a column of the key."""
    version = get_version_column(mapper)
    wanted, same, columns, names = _build_key_table(mapper)
    query = select(wanted.c.place, version).select_from(version.table).join(wanted, same)
    if lock is not None:
        query = query.order_by(*columns).with_for_update(of=version.table, **dict(lock))
    return query, names


def _build_key_table(
    mapper: Mapper[object],
) -> tuple[TableValuedAlias, ColumnElement[bool], list[Column[object]], list[str]]:
    """Return keys as a table, the condition that joins rows to it, their columns, and the names of its parameters."""
    columns = get_key_columns(mapper, get_version_column(mapper).table)
    names = [f"key_{place}" for place in range(len(columns))]
    arrays = [_build_array(name, each.type) for name, each in zip(names, columns, strict=True)]
    given = [column(name, each.type) for name, each in zip(names, columns, strict=True)]
    # Rows are matched by position, because a returned key may have another type than the key that was sent.
    wanted = func.unnest(*arrays).table_valued(*given, with_ordinality="place").render_derived("wanted")
    return wanted, and_(*[each == wanted.c[name] for each, name in zip(columns, names, strict=True)]), columns, names


def lock_rows(
    connection: Connection, mapper: Mapper[object], keys: Sequence[Key], *, deleting: bool = False
) -> tuple[list[object], list[Key]]:
    """Lock rows in the order of their keys, and return their versions, and the keys of the rows that could not be locked.

    The version of a row that does not exist is None. A row cannot be locked if a row-level security policy allows this role only
    to read it. With `deleting`, some of the rows will be deleted, so no other transaction may add rows that refer to them.
    """
    found = versions_of(connection, mapper, keys, lock={"key_share": not deleting})
    missing = [place for place, version in enumerate(found) if version is None]
    if missing:
        seen = versions_of(connection, mapper, [keys[place] for place in missing])
        for place, version in zip(missing, seen, strict=True):
            found[place] = version
    return found, [keys[place] for place in missing if found[place] is not None]


def check_transaction(connection: Connection, way: str) -> None:
    """Raise an error unless a row lock lasts until the row is written."""
    if read_driver_state(connection).autocommit:
        raise TransactionStateError(
            "a versioned row was not locked, because the connection is in autocommit, where the lock would end before the row is"
            f" written: use a connection without AUTOCOMMIT, or {way}"
        )


def find_written_here(connection: Connection, mapper: Mapper[object], keys: Sequence[Key]) -> list[bool]:
    """Return, for each row, whether this transaction, or a savepoint in it, was the last to write the row."""
    query, names = _build_written_query(mapper)
    found = set(connection.scalars(query, {name: [key[place] for key in keys] for place, name in enumerate(names)}))
    return [place in found for place in range(1, len(keys) + 1)]


@lru_cache(maxsize=1000)
def _build_written_query(mapper: Mapper[object]) -> tuple[AnySelect, list[str]]:
    wanted, same, _, names = _build_key_table(mapper)
    # The name is unqualified, so that it resolves to the NULL column of `absent` if the table is a view, which has no xmin.
    name: ColumnElement[object] = literal_column("xmin")
    xmin = select(name).select_from(get_version_column(mapper).table).where(same).correlate(wanted).scalar_subquery()
    absent = select(null().label("xmin")).subquery("absent")
    rows = (
        select(wanted.c.place, _to_number(xmin).label("xmin")).select_from(wanted.join(absent, true())).subquery("rows")
    )
    own = _to_number(func.pg_catalog.pg_current_xact_id_if_assigned())
    end = _to_number(func.pg_catalog.pg_snapshot_xmax(func.pg_catalog.pg_current_snapshot()))
    # xmin is the lower 32 bits of the transaction id. A savepoint has a higher id than its transaction.
    later = (rows.c.xmin - own % _XIDS + _XIDS) % _XIDS
    status = func.pg_catalog.pg_xact_status(cast(cast(own + later, Text), _Xid8))
    # Other transactions whose rows this statement sees ended before its snapshot, so their ids are below `end`.
    # pg_xact_status would raise an error for higher ids.
    here = case(
        (later == 0, true()),
        (later >= _XIDS // 2, false()),
        (own + later >= end, true()),
        else_=status == "in progress",
    )
    return select(rows.c.place).where(here), names


class Xid(UserDefinedType[int]):
    """The type of the system column xmin. It is an int in Python and an xid in PostgreSQL, which wraps around after 2**32."""

    cache_ok = True

    @property
    def python_type(self) -> type[int]:
        return int

    def get_col_spec(self, **_: object) -> str:
        return "XID"

    def bind_expression(self, bindvalue: BindParameter[int]) -> ColumnElement[int]:
        # It is cast through text, because PostgreSQL does not compare an integer with an xid, and half of the xids would be
        # negative as int4.
        return cast(cast(bindvalue, Text), Xid)

    def bind_processor(self, dialect: Dialect) -> _BindProcessorType[int]:
        return lambda value: None if value is None else str(value)

    def result_processor(self, dialect: Dialect, coltype: object) -> _ResultProcessorType[int]:
        # psycopg and psycopg2 return a str, and asyncpg returns an int.
        return lambda value: None if value is None else int(value)


class _Xid8(UserDefinedType[int]):
    cache_ok = True

    def get_col_spec(self, **_: object) -> str:
        return "XID8"


def _to_number(expression: ColumnElement[object]) -> ColumnElement[int]:
    return cast(cast(expression, Text), BigInteger)


def _build_array(name: str, kind: TypeEngine[_T]) -> ColumnElement[object]:
    return cast(bindparam(name, type_=ARRAY(kind)), ARRAY(kind))
