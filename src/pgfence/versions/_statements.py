"""Make insert() and update() of a versioned class increment the version of each row that they change.

Sessions that have read the rows then detect the change. A statement that cannot be changed accordingly is rejected. In mode
"server", the trigger increments the versions, and only the instances in the session are updated here.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from sqlalchemy import (
    CTE,
    BindParameter,
    ClauseElement,
    ColumnClause,
    Connection,
    Insert,
    Select,
    Table,
    Update,
    Uuid,
    event,
    func,
)
from sqlalchemy.orm import Session
from sqlalchemy.orm.context import FromStatement
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.sql import visitors
from sqlalchemy.sql.lambdas import StatementLambdaElement

from pgfence._orm import find_value_name, set_on_conflict, upsert_of
from pgfence.errors import VersionConflict, VersionRequiredError
from pgfence.versions._conflicts import conflict_error, not_locked_error, not_written_error, own_statement_error
from pgfence.versions._mapping import (
    ATTRIBUTE,
    VersionedBase,
    get_version_column,
    is_local,
    is_versioned,
    mode_of,
    name_row,
)
from pgfence.versions._own_writes import collect_instances, expire, expire_written, find_deleted_here, follow
from pgfence.versions._rows import find_written_here, lock_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import ColumnElement, FromClause
    from sqlalchemy.orm import Mapper, ORMExecuteState

    from pgfence._orm import AnyResult, Key, State

_TABLES: WeakKeyDictionary[Table, ref[Mapper[object]]] = WeakKeyDictionary()
"""The class of each table, for statements on a Table."""


def guard(state: ORMExecuteState) -> AnyResult | None:
    """Make a statement give every row that it changes a new version. Return its result if it was executed here."""
    statement = state.statement
    if isinstance(statement, StatementLambdaElement):
        resolved: Any = statement._resolved
        if resolved.is_dml:
            state.statement = statement = resolved
    policy = getattr(state.session, "bulk", "bump")
    inside: set[Mapper[object]] = set()
    if policy == "refuse" or _may_hold_another(statement):
        inside = _find_written_inside(statement, refuse=policy != "ignore")
    if not isinstance(statement, (Insert, Update)) or (mapper := _mapper_of(statement)) is None:
        return _execute(state, inside) if inside else None
    if isinstance(statement, Insert) or not state.is_orm_statement:
        if policy != "ignore":
            _raise_versions(state, statement, mapper, refuse=policy == "refuse")
        if _changes_rows(statement):
            inside.add(mapper)
        return _execute(state, inside) if inside else None
    if isinstance(state.parameters, list) and state.execution_options.get("dml_strategy", "auto") in ("auto", "bulk"):
        return _execute_followed(state, mapper)[0] if policy == "ignore" else _update_by_key(state, statement, mapper)
    if policy != "ignore":
        _raise_versions(state, statement, mapper, refuse=policy == "refuse")
    elif mode_of(mapper) == "client":
        return _execute_followed(state, mapper)[0]
    if statement._propagate_attrs["plugin_subject"].is_aliased_class:
        inside.add(mapper)  # SQLAlchemy does not synchronize instances with an alias.
    return _execute(state, inside, mapper)


def _note_table(mapper: Mapper[object], _cls: type[object]) -> None:
    if isinstance(mapper.local_table, Table):
        _TABLES.setdefault(mapper.local_table, ref(mapper))


def _mapper_of(statement: Insert | Update) -> Mapper[object] | None:
    """Return the mapper of the rows that a statement writes, if it is versioned."""
    subject = statement._propagate_attrs.get("plugin_subject")
    if subject is not None:
        return subject.mapper if is_versioned(subject.mapper) else None
    return find_mapper_of_table(getattr(statement.table, "element", statement.table))


def find_mapper_of_table(table: FromClause) -> Mapper[object] | None:
    """Return the mapper of a versioned class whose rows are in a table."""
    found = _TABLES.get(table) if isinstance(table, Table) else None
    return found() if found else None


_FLUSH = "Load the rows, change the instances and flush"


def _unversioned_error(mapper: Mapper[object], reason: str, way: str) -> VersionRequiredError:
    return VersionRequiredError(
        f"a statement that changes {mapper.class_.__name__} must check or increment the version of each row, and this one does not:"
        f" {reason}. {way}"
    )


# ------------------------------------------------------------ the versions of the rows


def _raise_versions(
    state: ORMExecuteState, statement: Insert | Update, mapper: Mapper[object], *, refuse: bool
) -> None:
    """Make a statement increment the version of each row that it changes."""
    if not _changes_rows(statement):
        return
    if not is_local(mapper):
        raise _unversioned_error(
            mapper,
            f"the versions are in the table {get_version_column(mapper).table.name!r}, which the statement does not change",
            _FLUSH,
        )
    if mode_of(mapper) != "client":
        return
    given = list(_find_assigned(statement, state.parameters, mapper)) if isinstance(statement, Update) else []
    if any(isinstance(value, (BindParameter, ColumnClause)) or not isinstance(value, ClauseElement) for value in given):
        raise ValueError(f"{mapper.class_.__name__}.{ATTRIBUTE} is incremented automatically: leave it out of values()")
    if given:
        return
    if refuse:
        raise _unversioned_error(
            mapper,
            'the session has bulk="refuse"',
            f'{_FLUSH}; or map the class with the mode "server", whose trigger sees every statement',
        )
    if isinstance(statement, Insert):
        version, upsert = get_version_column(mapper), upsert_of(statement)
        assert upsert is not None
        names = {ATTRIBUTE, version.key}
        state.statement = set_on_conflict(statement, upsert, names, version.key, _increment(version))
        return
    if getattr(statement, "_maintain_values_ordering", False) or getattr(statement, "_ordered_values", None):
        raise _unversioned_error(mapper, "ordered_values() cannot include the version", "Use values()")
    subject = statement._propagate_attrs.get("plugin_subject")
    if subject is None:
        name = get_version_column(mapper).key
        state.statement = statement.values({name: _increment(statement.table.c[name])})
    else:
        state.statement = statement.values({ATTRIBUTE: _increment(getattr(subject.entity, ATTRIBUTE))})


def _changes_rows(statement: object) -> bool:
    return isinstance(statement, Update) or upsert_of(statement) is not None


def _increment(version: ColumnElement[Any]) -> ColumnElement[Any]:
    return func.pg_catalog.gen_random_uuid() if isinstance(version.type, Uuid) else version + 1


def _find_assigned(statement: object, parameters: object, mapper: Mapper[object]) -> Iterator[object]:
    """Yield the values that a statement assigns to the version."""
    sets: list[Any] = parameters if isinstance(parameters, list) else [parameters]
    for given in (getattr(statement, "_values", None), getattr(statement, "_ordered_values", None), *sets):
        for key, value in dict(given or ()).items():
            if find_value_name(key) in {ATTRIBUTE, get_version_column(mapper).key}:
                yield value


def _may_hold_another(statement: object) -> bool:
    """Return whether a statement may contain another statement that writes."""
    if isinstance(statement, FromStatement) or getattr(statement, "_independent_ctes", None):
        return True
    if not isinstance(statement, Select):
        return False
    # Only one level is searched, because traversing the whole of each SELECT is expensive.
    joined = [each[0] for each in statement._setup_joins]
    read = [getattr(each, "table", each) for each in (*statement._raw_columns, *statement._from_obj, *joined)]
    return any(isinstance(each, CTE) for each in read)


def _find_written_inside(statement: object, *, refuse: bool) -> set[Mapper[object]]:
    """Return the classes whose rows are changed by statements inside another statement."""
    found: set[Mapper[object]] = set()
    for part in visitors.iterate(statement) if isinstance(statement, ClauseElement) else ():
        if part is not statement and isinstance(part, (Insert, Update)) and _changes_rows(part):
            mapper = _mapper_of(part)
            if mapper is None:
                continue
            if refuse and mode_of(mapper) == "client" and not _raises_itself(part, mapper):
                value = _describe_value(mapper)
                others = f", or set {ATTRIBUTE!r} to {value} in its values()" if isinstance(part, Update) else ""
                raise _unversioned_error(mapper, "it is inside another statement", f"Execute it separately{others}")
            found.add(mapper)
    return found


def _describe_value(mapper: Mapper[object]) -> str:
    is_uuid = isinstance(get_version_column(mapper).type, Uuid)
    return "func.gen_random_uuid()" if is_uuid else f"{mapper.class_.__name__}.{ATTRIBUTE} + 1"


def _raises_itself(statement: object, mapper: Mapper[object]) -> bool:
    given = list(_find_assigned(statement, None, mapper)) if isinstance(statement, Update) else []
    return any(not isinstance(value, BindParameter) and isinstance(value, ClauseElement) for value in given)


# ------------------------------------------------------------ by primary key, one set of parameters for each row


def _update_by_key(state: ORMExecuteState, statement: Update, mapper: Mapper[object]) -> AnyResult:
    """Execute an UPDATE of rows by key, after comparing each row with the version in its parameters."""
    rows = state.parameters
    assert isinstance(rows, list)
    if mode_of(mapper) == "xmin":
        raise _unversioned_error(
            mapper,
            'in the mode "xmin", the version cannot be among the parameters of a row',
            f'{_FLUSH}; or map the class with the mode "client" or "server"',
        )
    if statement._where_criteria:
        raise _unversioned_error(
            mapper,
            "the statement has its own WHERE, so that a row at another version would be skipped silently",
            "Remove the WHERE",
        )
    # For a version of None, SQLAlchemy would send the UPDATE without comparing anything.
    if lacking := [row for row in rows if row.get(ATTRIBUTE) is None]:
        raise _unversioned_error(
            mapper,
            f"{len(lacking)} of the {len(rows)} rows {'has' if len(lacking) == 1 else 'have'} no version",
            f"Give each row the {ATTRIBUTE!r} at which it was read",
        )
    names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    keys: list[Key] = [tuple(row.get(name) for name in names) for row in rows]
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise ValueError(f"rows of {mapper.class_.__name__} are given more than once: {twice[:5]}. Give each row once")
    _compare(state, mapper, keys, [row[ATTRIBUTE] for row in rows])
    try:
        result, loaded = _execute_followed(state, mapper)
    except StaleDataError as error:
        raise not_written_error(str(error)) from error
    # SQLAlchemy sets the version from the parameters, which contain the old one.
    written = {mapper.identity_key_from_primary_key(key) for key in keys}
    expire(state.session, [each for each in loaded if each.key in written])
    return result


def _compare(state: ORMExecuteState, mapper: Mapper[object], keys: list[Key], expected: list[object]) -> None:
    """Lock and compare the rows, so that a conflict lists them and is raised before the first is written."""
    session = state.session
    session._autoflush()
    connection = session.connection(bind_arguments=dict(state.bind_arguments))
    found, barred = lock_rows(connection, mapper, keys)
    rows = zip(keys, expected, found, strict=True)
    if differing := [VersionConflict(mapper.class_, *row) for row in rows if row[1] != row[2]]:
        shared = isinstance(session.bind or session.get_bind(**state.bind_arguments), Connection)
        known = [item.pk for item in differing if item.found is not None and not shared]
        ours = dict(zip(known, find_written_here(connection, mapper, known), strict=True)) if known else {}
        gone = find_deleted_here(session)
        others = [
            item
            for item in differing
            if not ours.get(item.pk) and mapper.identity_key_from_primary_key(item.pk) not in gone
        ]
        raise conflict_error(session, others) if others else own_statement_error(differing)
    if barred:
        raise not_locked_error([name_row(mapper.class_, key) for key in barred])


# ------------------------------------------------------------ instances in the session


def _execute(
    state: ORMExecuteState, mappers: set[Mapper[object]], synchronized: Mapper[object] | None = None
) -> AnyResult | None:
    """Execute a statement and update the session's instances of the written classes, or return None if it has none.

    SQLAlchemy does not synchronize the instances of `mappers`, and applies `synchronize_session` to those of `synchronized`. Of
    the latter, instances with another version are read again, because columns that another session has changed since could be
    overwritten if they had the new version.
    """
    found = [(mapper, loaded) for mapper in mappers if (loaded := collect_instances(state, mapper))]
    kept = collect_instances(state, synchronized) if synchronized is not None else {}
    if not found and not kept:
        return None
    moves = [follow(state, mapper, loaded) for mapper, loaded in found]
    if synchronized is not None and kept:
        moves.append(follow(state, synchronized, kept))
    result = state.invoke_statement()
    for move in moves:
        move()
    if synchronized is not None and kept:
        asked = state.execution_options.get("synchronize_session", "auto")
        written = [each for each, version in kept.items() if not asked or each.dict.get(ATTRIBUTE) != version]
        expire(state.session, [each for each in written if each.mapper.isa(synchronized)])
    for mapper, loaded in found:
        expire_written(state, mapper, loaded)
    return result


def _execute_followed(state: ORMExecuteState, mapper: Mapper[object]) -> tuple[AnyResult, dict[State, object]]:
    """Execute a statement, and return its result and the instances without pending changes."""
    loaded = collect_instances(state, mapper)
    move = follow(state, mapper, loaded)
    result = state.invoke_statement()
    move()
    return result, loaded


event.listen(VersionedBase, "after_mapper_constructed", _note_table, propagate=True)
event.listen(Session, "do_orm_execute", guard)
