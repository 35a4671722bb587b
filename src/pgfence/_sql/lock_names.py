"""Store the names of advisory locks, so that operators see names and not numbers."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pgfence._sql.params import call
from pgfence._sql.storage import is_in_place_sql, quote_literal
from pgfence.keys import SEPARATOR

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from sqlalchemy import Connection
    from sqlalchemy.engine.interfaces import Dialect

    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.keys import LockKey

MOST_REMEMBERED = 10_000
"""The maximum number of keys that are remembered as stored. When it is exceeded, all of them are forgotten, and their names are
sent again when they are next used.
"""
_REMEMBERED = "_pgfence_names"
_LAPSED = "{n}.seen_at < pg_catalog.clock_timestamp() - interval '30 days'"
# SKIP LOCKED skips rows that another purge has locked, or a process that stores the name again.
_FORGET = (
    "WITH gone AS (DELETE FROM {lock_name} AS n WHERE n.key = ANY (ARRAY(SELECT o.key FROM {lock_name} AS o WHERE "
    + _LAPSED.format(n="o")
    + " LIMIT {size} FOR UPDATE SKIP LOCKED)) AND "
    + _LAPSED.format(n="n")
    + " RETURNING n.key) SELECT pg_catalog.count(*) FROM gone"
)


@cache
def has_names_sql(place: TableNames, style: ParamStyle | None) -> str:
    """Return the condition that names can be stored: the table exists, and the role has the privileges for it.

    `style` is None if the statement has no parameters.
    """
    rights = "".join(
        f" AND pg_catalog.has_table_privilege(c.oid, '{right}')" for right in ("SELECT", "INSERT", "UPDATE")
    )
    text = (
        f"EXISTS (SELECT FROM pg_catalog.pg_class AS c WHERE c.relname = {quote_literal(place.prefix + 'lock_name')}"
        f" AND {is_in_place_sql(place, 'c')} AND pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'){rights})"
    )
    return text.replace("%", "%%") if style == "format" else text


@cache
def note_sql(place: TableNames, style: ParamStyle) -> str:
    """Return the statement that stores names.

    It takes keys and names, and returns a stored name with the same key as one of them, or NULL.
    """
    return f"SELECT {call(place, style, 'note_names_v1', 'bigint[], text[]')}"


def list_new_names(dialect: Dialect, place: TableNames, keys: Iterable[LockKey]) -> dict[int, str]:
    """Return a dict from keys to their names in stored form, without the names that this process has already stored."""
    known = _remembered_of(dialect, place)
    return {
        key.value: key._hashed.removeprefix(SEPARATOR)
        for key in keys
        if key.name is not None and key._hashed is not None and key.value not in known
    }


def record_names(dialect: Dialect, place: TableNames, keys: Iterable[int]) -> set[int]:
    """Remember that the names of these keys have been stored, and return the set of all remembered keys."""
    known = _remembered_of(dialect, place)
    if len(known) > MOST_REMEMBERED:
        known.clear()
    known.update(keys)
    return known


def _remembered_of(dialect: Dialect, place: TableNames) -> set[int]:
    home: MutableMapping[str, Any] = vars(dialect)
    found: set[int] = home.setdefault(_REMEMBERED, {}).setdefault(place, set())
    return found


def find_name(connection: Connection, place: TableNames, key: LockKey) -> tuple[str, str | None]:
    """Return the name of the database, and the stored name of a key.

    The stored name is None if no name is stored for the key, or if this role may not read the names.
    """
    can_read = has_names_sql(place, None).replace("'INSERT'", "'SELECT'").replace("'UPDATE'", "'SELECT'")
    options = {"no_parameters": True}
    text = f"SELECT pg_catalog.current_database(), {can_read}"
    database, readable = connection.exec_driver_sql(text, execution_options=options).one()
    if not readable or key.space != "bigint":
        return database, None
    text = f"SELECT n.name FROM {place.name('lock_name')} AS n WHERE n.key = {int(key.value)}"
    return database, connection.exec_driver_sql(text, execution_options=options).scalar_one_or_none()


def forget_old_names(connection: Connection, place: TableNames, size: int) -> None:
    """Delete the names that no process has started to use in the last 30 days, `size` names in each transaction.

    Nothing is done if the table does not exist or the role may not delete from it.
    """
    options = {"no_parameters": True}
    may_delete = (
        f"SELECT {has_names_sql(place, None)} AND pg_catalog.has_table_privilege(pg_catalog.to_regclass("
        f"{quote_literal(place.name('lock_name'))}), 'DELETE')"
    )
    forget = _FORGET.format(lock_name=place.name("lock_name"), size=int(size))
    with connection.begin():
        more: bool = connection.exec_driver_sql(may_delete, execution_options=options).scalar_one()
    while more:
        with connection.begin():
            more = connection.exec_driver_sql(forget, execution_options=options).scalar_one() == size
