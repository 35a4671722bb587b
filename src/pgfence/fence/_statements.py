"""Check insert(), update() and delete() of a fenced class before they are sent.

If all rows belong to one resource in mode "gate", checking its token is enough. Otherwise, the rows that the statement will
change are read and locked first, and each is checked as in a flush.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    BindParameter,
    ColumnElement,
    Delete,
    Insert,
    Update,
    bindparam,
    cast,
    column,
    func,
    select,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm.exc import StaleDataError

from pgfence._orm import find_value_name, get_key_columns, set_on_conflict, upsert_of
from pgfence.fence._rows import (
    ATTRIBUTE,
    FLUSH,
    NO_SELECT,
    NO_UPSERT,
    Guarded,
    choose_token,
    column_of,
    has_single_resource,
    read_schema_options,
    reject_stale,
    resource_of,
    undetermined_error,
    view_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection, TableValuedAlias
    from sqlalchemy.orm import ColumnProperty, Mapper, ORMExecuteState
    from sqlalchemy.types import TypeEngine

    from pgfence._orm import AnyResult, AnyRow, AnySelect, Key


_T = TypeVar("_T")

_NEW = "pgfence_new_"
_NOT_DEFERRED = "map the column without deferred()"


class Work(NamedTuple):
    """An insert(), update() or delete() of a fenced class, and where it runs."""

    state: ORMExecuteState
    mapper: Mapper[object]
    cls: type[Guarded]
    connection: Connection


def guard(state: ORMExecuteState) -> AnyResult | None:
    """Check that this transaction has a token for each row that a statement writes. Return the result if it is executed here."""
    mapper = state.bind_mapper
    if mapper is None or not (state.is_insert or state.is_update or state.is_delete):
        return None
    if not issubclass(mapper.class_, Guarded):
        return None
    connection = state.session.connection(bind_arguments=dict(state.bind_arguments))
    work = Work(state, mapper, mapper.class_, connection)
    _reject_assigned(work)
    if has_single_resource(work.cls):
        choose_token(work.cls, resource_of(work.cls, None), connection)
    if state.is_insert:
        _guard_insert(work)
        return None
    if has_single_resource(work.cls) and work.cls.__fence__ == "gate":
        return None
    if not isinstance(state.parameters, list):
        _bind_to_rows(work)
        return None
    if state.is_delete or state.execution_options.get("dml_strategy") == "core_only":
        raise undetermined_error(
            work.cls,
            "the rows of a statement that runs once for each set of parameters cannot be determined before it runs",
            f"{FLUSH}, or execute the statement separately for each set of parameters",
        )
    return _guard_batch(work)


def _guard_insert(work: Work) -> None:
    """Reject the inserts that the default of the column, which is called for each row, cannot check."""
    statement, cls = work.state.statement, work.cls
    if not isinstance(statement, Insert):
        raise undetermined_error(
            cls, "an INSERT inside another statement cannot be given a token", "execute the insert() separately"
        )
    if statement.select is not None and not has_single_resource(cls):
        raise undetermined_error(
            cls, "the rows of an INSERT from SELECT cannot be determined before it runs", NO_SELECT
        )
    if statement.select is not None and not statement.include_insert_from_select_defaults:
        raise undetermined_error(
            cls,
            "an INSERT from SELECT without defaults writes no token",
            "call from_select() without include_defaults=False",
        )
    upsert = upsert_of(statement)
    if upsert is None:
        return
    if not has_single_resource(cls) or cls.__fence__ == "row":
        raise undetermined_error(
            cls, "the rows that an upsert conflicts with cannot be determined before it runs", NO_UPSERT
        )
    assert isinstance(statement, postgresql.Insert)
    token = column_of(work.mapper)
    work.state.statement = set_on_conflict(
        statement, upsert, {ATTRIBUTE, token.key}, token.key, statement.excluded[token.key]
    )


def _reject_assigned(work: Work) -> None:
    names = {ATTRIBUTE, column_of(work.mapper).key}
    parameters = work.state.parameters
    sets = [parameters] if isinstance(parameters, Mapping) else parameters or ()
    statement = work.state.statement
    values: list[Mapping[str, object]] = [*sets, dict(values_of(statement))]
    values += [row for many in getattr(statement, "_multi_values", ()) for row in many if isinstance(row, dict)]
    values.append(dict.fromkeys(getattr(statement, "_select_names", None) or ()))
    if any(name in names for row in values for name in map(find_value_name, row)):
        raise ValueError(f"{work.cls.__name__}.{ATTRIBUTE} is set by pgfence and must not be assigned: omit it")


def values_of(statement: object) -> Iterator[tuple[str, object]]:
    """Yield the name and the value of each argument of `values()`."""
    for given in (getattr(statement, "_values", None), getattr(statement, "_ordered_values", None)):
        for key, value in dict(given or ()).items():
            yield find_value_name(key), value


# ------------------------------------------------------------ by criteria


def _bind_to_rows(work: Work) -> None:
    """Read, lock and check the rows, and restrict the statement to them."""
    statement, parameters, token = work.state.statement, work.state.parameters or {}, column_of(work.mapper)
    assert isinstance(parameters, Mapping)
    if not isinstance(statement, (Update, Delete)):
        raise undetermined_error(
            work.cls,
            "the rows of a statement inside another statement cannot be determined before it runs",
            "execute the update() or delete() separately",
        )
    inside = token.table is work.mapper.local_table
    if work.cls.__fence__ == "row" and not inside:
        raise undetermined_error(work.cls, "its fencing column is in a table that this statement does not write", FLUSH)
    query = _build_query(work, _collect_changes(work)).where(*statement._where_criteria)
    rows = _read(work, query, parameters)
    tokens = [_choose_token(work, row) for row in rows]
    keys = get_key_columns(work.mapper, work.mapper.local_table)
    # The statement is also restricted by key, because a row that matches the criteria only after the read was not checked.
    listed = _build_key_table(keys, [_key_of(work, row) for row in rows], tokens)
    bound = statement.where(*_match_keys(keys, listed))
    work.state.statement = bound.values({ATTRIBUTE: listed.c[_NEW]}) if isinstance(bound, Update) and inside else bound
    # "evaluate" cannot evaluate the join with the key table in Python.
    if work.state.execution_options.get("synchronize_session") == "evaluate":
        work.state.update_execution_options(synchronize_session="fetch")


def _read(work: Work, query: AnySelect, parameters: Mapping[str, object]) -> Sequence[AnyRow]:
    """Run a query on the connection and in the schema of the statement, and return its rows."""
    options, where = read_schema_options(work.state.execution_options), {"bind": work.connection}
    return work.state.session.execute(query, parameters, execution_options=options, bind_arguments=where).all()


def _build_query(work: Work, changes: dict[str, object]) -> AnySelect:
    """Return a SELECT, ordered by key, that locks the rows and reads what their check needs, with the values of `changes`."""
    columns = {prop.key: prop.class_attribute for prop in work.mapper.column_attrs if _is_needed(work, prop)}
    asked = [attribute.label(key) for key, attribute in columns.items()]
    asked += [
        value.label(_NEW + key)
        for key, value in changes.items()
        if isinstance(value, ColumnElement) and not isinstance(value, BindParameter)
    ]
    keys = [columns[work.mapper.get_property_by_column(key).key] for key in work.mapper.primary_key]
    return select(*asked).order_by(*keys).with_for_update(of=work.cls)


def _is_needed(work: Work, prop: ColumnProperty[object]) -> bool:
    if not has_single_resource(work.cls):
        return not prop.deferred
    return prop.key == ATTRIBUTE or any(column in work.mapper.primary_key for column in prop.columns)


def _collect_changes(work: Work) -> dict[str, object]:
    """Return the new values that an UPDATE gives to columns."""
    if has_single_resource(work.cls) or not work.state.is_update:
        return {}
    names = {column.key: prop.key for prop in work.mapper.column_attrs for column in prop.columns}
    given = dict(values_of(work.state.statement))
    return {names.get(name, name): value for name, value in given.items()}


def _choose_token(work: Work, row: AnyRow, given: Mapping[str, object] | None = None) -> int:
    """Return the token for one row, checked for its resource before and after the change."""
    cls, old = work.cls, dict(row._mapping)
    resource = resource_of(cls, view_of(cls, old, _NOT_DEFERRED))
    token = choose_token(cls, resource, work.connection)
    if cls.__fence__ == "row" and old[ATTRIBUTE] > token:
        reject_stale(work.connection, resource, token, old[ATTRIBUTE])
    if has_single_resource(cls) or work.state.is_delete:
        return token
    new = old | {key.removeprefix(_NEW): value for key, value in old.items() if key.startswith(_NEW)}
    new |= _collect_given(work) if given is None else given
    return choose_token(cls, resource_of(cls, view_of(cls, new, _NOT_DEFERRED)), work.connection)


def _collect_given(work: Work) -> dict[str, object]:
    """Return the new values that the statement contains as parameters."""
    parameters = work.state.parameters or {}
    assert isinstance(parameters, Mapping)
    found: dict[str, object] = {key: value for key, value in parameters.items() if key in work.mapper.column_attrs}
    for key, value in _collect_changes(work).items():
        if isinstance(value, BindParameter):
            found[key] = parameters.get(value.key, value.effective_value)
    return found


def _key_of(work: Work, row: AnyRow) -> Key:
    keys = [work.mapper.get_property_by_column(column).key for column in work.mapper.primary_key]
    return tuple(row._mapping[key] for key in keys)


def _build_key_table(
    keys: Sequence[ColumnElement[object]], rows: Sequence[Key], tokens: Sequence[int]
) -> TableValuedAlias:
    """Return a table of primary keys, each with its token. It has one array for each column, however many rows there are."""
    arrays = [_build_array([row[i] for row in rows], key.type) for i, key in enumerate(keys)]
    columns = [column(f"key_{i}", key.type) for i, key in enumerate(keys)]
    rows_of = func.unnest(*arrays, _build_array(tokens, BigInteger())).table_valued(*columns, column(_NEW, BigInteger))
    return rows_of.alias("pgfence_rows").render_derived()


def _build_array(values: Sequence[object], kind: TypeEngine[_T]) -> ColumnElement[object]:
    return cast(bindparam(None, list(values), type_=ARRAY(kind)), ARRAY(kind))


def _match_keys(keys: Sequence[ColumnElement[object]], listed: TableValuedAlias) -> list[ColumnElement[bool]]:
    return [key == listed.c[f"key_{i}"] for i, key in enumerate(keys)]


# ------------------------------------------------------------ by primary key, one set of parameters for each row


def _guard_batch(work: Work) -> AnyResult:
    """Read, lock and check the rows of an UPDATE by primary key, and add the token to the parameters of each row."""
    parameters = work.state.parameters
    assert isinstance(parameters, list)
    names = [work.mapper.get_property_by_column(column).key for column in work.mapper.primary_key]
    wanted = [tuple(row[name] for name in names) for row in parameters]
    keys = list(work.mapper.primary_key)
    listed = _build_key_table(keys, wanted, [0] * len(wanted))
    found = {
        _key_of(work, row): row for row in _read(work, _build_query(work, {}).where(*_match_keys(keys, listed)), {})
    }
    # A row that appears between this read and the UPDATE would be written without a check.
    if missing := [key for key in wanted if key not in found]:
        raise StaleDataError(
            f"cannot write rows of {work.cls.__name__}, because they do not exist, or are hidden from this role: {missing[:5]}"
        )
    tokens = [_choose_token(work, found[key], given) for key, given in zip(wanted, parameters, strict=True)]
    return work.state.invoke_statement(params=[{ATTRIBUTE: token} for token in tokens])
