"""The guard of insert(), update() and delete() of a fenced class, before they are sent.

Where all rows belong to one resource and the gate protects them, to ask for its token is enough. Otherwise the rows that the
statement will change are read and locked first, each is asked as in a flush, and the statement is bound to exactly these: a
row that comes to match between the two is left for another statement, as if this one had run a moment earlier.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import ARRAY, BigInteger, BindParameter, bindparam, cast, column, func, select
from sqlalchemy.orm.exc import StaleDataError

from pgfence.fence._flush import keys_in
from pgfence.fence._rows import (
    ATTRIBUTE,
    Guarded,
    column_of,
    constant,
    placing,
    refusal,
    refuse_stale,
    resource_of,
    token_for,
    view,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import ColumnElement, Connection, Result, Row, TableValuedAlias
    from sqlalchemy.orm import Mapper, ORMExecuteState

_NEW = "pgfence_new_"


class Work(NamedTuple):
    """One statement, and whom it is for."""

    state: ORMExecuteState
    mapper: Mapper[Any]
    cls: type[Guarded]
    statement: Any
    connection: Connection


def guard(state: ORMExecuteState) -> Result[Any] | None:
    """Let a statement go out if this transaction brought a token for each row that it writes."""
    mapper = state.bind_mapper
    if mapper is None or not (state.is_insert or state.is_update or state.is_delete):
        return None
    if not issubclass(mapper.class_, Guarded):
        return None
    connection = state.session.connection(bind_arguments=dict(state.bind_arguments))
    work = Work(state, mapper, mapper.class_, state.statement, connection)
    _refuse_assigned(work)
    if constant(work.cls):
        token_for(work.cls, resource_of(work.cls, None), connection)
    if state.is_insert:
        _guard_insert(work)
        return None
    if constant(work.cls) and work.cls.__fence__ == "gate":
        return None
    if not isinstance(state.parameters, list):
        _bind_to_rows(work)
        return None
    if state.is_delete or state.execution_options.get("dml_strategy") == "core_only":
        raise refusal(work.cls, "a statement that is sent once for each set of parameters cannot be told beforehand")
    return _guard_batch(work)


def _guard_insert(work: Work) -> None:
    """Refuse what the column's default, which is asked for each row, does not see."""
    statement, cls = work.statement, work.cls
    if statement.select is not None and not (constant(cls) and statement.include_insert_from_select_defaults):
        raise refusal(cls, "the rows of this INSERT from SELECT cannot be told before it runs")
    conflict = getattr(statement, "_post_values_clause", None)
    if not hasattr(conflict, "update_values_to_set"):
        return
    if not constant(cls) or cls.__fence__ == "row":
        raise refusal(cls, "the rows that an upsert meets cannot be told before it runs")
    work.state.statement = _with_token(statement, conflict, column_of(work.mapper))


def _with_token(statement: Any, conflict: Any, token: Any) -> Any:
    """Return an upsert that writes the token into the row it meets, too."""
    given = dict(conflict.update_values_to_set)
    kept = {key: value for key, value in given.items() if _named(key) not in {ATTRIBUTE, token.key}}
    kept[token.key] = statement.excluded[token.key]
    changed, clause = statement._generate(), copy(conflict)
    # A list of pairs in SQLAlchemy 2.0, a dict later.
    clause.update_values_to_set = kept if isinstance(conflict.update_values_to_set, dict) else list(kept.items())
    changed._post_values_clause = clause
    return changed


def _refuse_assigned(work: Work) -> None:
    names = {ATTRIBUTE, column_of(work.mapper).key}
    parameters = work.state.parameters
    sets = parameters if isinstance(parameters, list) else [parameters or {}]
    values = [*sets, dict(values_of(work.statement))]
    values += [row for many in getattr(work.statement, "_multi_values", ()) for row in many if isinstance(row, dict)]
    values.append(dict.fromkeys(getattr(work.statement, "_select_names", None) or ()))
    if any(name in names for row in values for name in map(_named, row)):
        raise ValueError(f"{work.cls.__name__}.{ATTRIBUTE} is set by the fence and by nobody else: leave it out")


def values_of(statement: Any) -> Iterator[tuple[str, Any]]:
    """Yield what `values()` was given, by name."""
    sets: list[Any] = [getattr(statement, "_values", None) or (), getattr(statement, "_ordered_values", None) or ()]
    for given in sets:
        pairs = given.items() if hasattr(given, "items") else given
        for key, value in pairs:
            yield _named(key), value


def _named(key: Any) -> str:
    """Return the name of the attribute, or of the column, that a key of `values()` stands for."""
    if isinstance(key, str):
        return key
    found: str = getattr(key, "_annotations", {}).get("proxy_key") or key.key
    return found


# ------------------------------------------------------------ by criteria


def _bind_to_rows(work: Work) -> None:
    """Read and lock the rows, ask for each, and bind the statement to these."""
    token = column_of(work.mapper)
    inside = token.table is work.mapper.local_table
    if work.cls.__fence__ == "row" and not inside:
        raise refusal(work.cls, "its fencing column is in another table than this statement")
    query = _query(work, _changes(work)).where(*work.statement._where_criteria)
    rows = _read(work, query, work.state.parameters or {})
    tokens = [_pass(work, row) for row in rows]
    keys = keys_in(work.mapper, work.mapper.local_table)
    listed = _listed(keys, [_key(work, row) for row in rows], tokens)
    statement = work.statement.where(*_same(keys, listed))
    if work.state.is_update and inside:
        statement = statement.values({ATTRIBUTE: listed.c[_NEW]})
    work.state.statement = statement
    if work.state.execution_options.get("synchronize_session") == "evaluate":
        work.state.update_execution_options(synchronize_session="fetch")


def _read(work: Work, query: Any, parameters: Any) -> Sequence[Row[Any]]:
    """Return the rows of a query that runs where the statement runs: on its connection, in its schema."""
    found: Sequence[Row[Any]] = work.state.session.execute(
        query,
        parameters,
        execution_options=placing(work.state.execution_options),
        bind_arguments={"bind": work.connection},
    ).all()
    return found


def _query(work: Work, changes: dict[str, Any]) -> Any:
    """Return the SELECT of the columns that matter, in one order and with a lock; `changes` are their values to be."""
    columns = {prop.key: prop.class_attribute for prop in work.mapper.column_attrs if _needed(work, prop)}
    asked = [attribute.label(key) for key, attribute in columns.items()]
    asked += [value.label(_NEW + key) for key, value in changes.items() if not isinstance(value, BindParameter)]
    keys = [columns[work.mapper.get_property_by_column(key).key] for key in work.mapper.primary_key]
    return select(*asked).order_by(*keys).with_for_update(of=work.cls)


def _needed(work: Work, prop: Any) -> bool:
    if not constant(work.cls):
        return not prop.deferred
    return prop.key == ATTRIBUTE or any(column in work.mapper.primary_key for column in prop.columns)


def _changes(work: Work) -> dict[str, Any]:
    """Return the new values that an UPDATE gives to columns."""
    if constant(work.cls) or not work.state.is_update:
        return {}
    names = {column.key: prop.key for prop in work.mapper.column_attrs for column in prop.columns}
    given = dict(values_of(work.statement))
    return {names.get(name, name): value for name, value in given.items()}


def _pass(work: Work, row: Row[Any], given: dict[str, Any] | None = None) -> int:
    """Return the token for one row, under which the transaction may change it from what it is to what it will be."""
    cls, old = work.cls, dict(row._mapping)
    resource = resource_of(cls, view(cls, old))
    token = token_for(cls, resource, work.connection)
    if cls.__fence__ == "row" and old[ATTRIBUTE] > token:
        refuse_stale(work.connection, resource, token, old[ATTRIBUTE])
    if constant(cls) or work.state.is_delete:
        return token
    new = old | {key.removeprefix(_NEW): value for key, value in old.items() if key.startswith(_NEW)}
    new |= _plain(work) if given is None else given
    return token_for(cls, resource_of(cls, view(cls, new)), work.connection)


def _plain(work: Work) -> dict[str, Any]:
    """Return the new values that stand in the statement as they are."""
    parameters: Any = work.state.parameters or {}
    found = {key: value for key, value in parameters.items() if key in work.mapper.column_attrs}
    for key, value in _changes(work).items():
        if isinstance(value, BindParameter):
            found[key] = parameters.get(value.key, value.effective_value)
    return found


def _key(work: Work, row: Row[Any]) -> tuple[Any, ...]:
    keys = [work.mapper.get_property_by_column(column).key for column in work.mapper.primary_key]
    return tuple(row._mapping[key] for key in keys)


def _listed(keys: Sequence[Any], rows: Sequence[tuple[Any, ...]], tokens: Sequence[int]) -> TableValuedAlias:
    """Return a table of primary keys, each with its token: one array for each column, however many rows there are."""
    arrays = [_array([row[i] for row in rows], key.type) for i, key in enumerate(keys)]
    columns = [column(f"key_{i}", key.type) for i, key in enumerate(keys)]
    rows_of = func.unnest(*arrays, _array(tokens, BigInteger())).table_valued(*columns, column(_NEW, BigInteger))
    return rows_of.alias("pgfence_rows").render_derived()


def _array(values: Sequence[Any], kind: Any) -> ColumnElement[Any]:
    return cast(bindparam(None, list(values), type_=ARRAY(kind)), ARRAY(kind))


def _same(keys: Sequence[Any], listed: TableValuedAlias) -> list[ColumnElement[bool]]:
    return [key == listed.c[f"key_{i}"] for i, key in enumerate(keys)]


# ------------------------------------------------------------ by primary key, one set of parameters for each row


def _guard_batch(work: Work) -> Result[Any]:
    """Read and lock the rows of an UPDATE by primary key, ask for each, and give each its token."""
    parameters: Any = work.state.parameters
    names = [work.mapper.get_property_by_column(column).key for column in work.mapper.primary_key]
    wanted = [tuple(row[name] for name in names) for row in parameters]
    keys = list(work.mapper.primary_key)
    listed = _listed(keys, wanted, [0] * len(wanted))
    found = {_key(work, row): row for row in _read(work, _query(work, {}).where(*_same(keys, listed)), {})}
    if missing := [key for key in wanted if key not in found]:
        raise StaleDataError(f"rows of {work.cls.__name__} that were to be written are not there: {missing[:5]}")
    tokens = [_pass(work, found[key], given) for key, given in zip(wanted, parameters, strict=True)]
    return work.state.invoke_statement(params=[{ATTRIBUTE: token} for token in tokens])
