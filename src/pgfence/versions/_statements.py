"""What insert(), update() and delete() of a versioned class do to the versions of rows, and to instances in the session.

A flush knows which version each row was read at. A statement writes rows that nobody has read, so it raises the version of
each, and those who have read them notice. A statement that cannot be made to is refused. Where a trigger raises the version
nothing is added; there only the instances in the session are looked after.
"""

from __future__ import annotations

from collections import Counter
from copy import copy
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

from pgfence.errors import VersionConflict, VersionRequiredError
from pgfence.versions._conflicts import conflict, not_written, own_statement
from pgfence.versions._mapping import ATTRIBUTE, VersionedBase, is_local, is_versioned, mode_of, version_column
from pgfence.versions._own_writes import deleted_here, expire, expire_written, follow, instances
from pgfence.versions._rows import Key, lock, written_here

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Result
    from sqlalchemy.orm import Mapper, ORMExecuteState

_TABLES: WeakKeyDictionary[Table, ref[Mapper[Any]]] = WeakKeyDictionary()
"""The class of each table, for statements that name a Table."""


def guard(state: ORMExecuteState) -> Result[Any] | None:
    """Let a statement go out if every row that it changes gets another version.

    Raises:
        VersionRequiredError: it would leave versions as they are.
        ValueError: it assigns the version, or has two sets of parameters for one row.
    """
    statement: Any = state.statement
    if isinstance(statement, StatementLambdaElement):
        resolved: Any = statement._resolved
        if resolved.is_dml:
            state.statement = statement = resolved
    policy = getattr(state.session, "bulk", "bump")
    inside: set[Mapper[Any]] = set()
    if policy == "refuse" or _may_hold_another(statement):
        inside = _written_inside(statement, refuse=policy != "ignore")
    mapper = None
    if statement.is_dml and not statement.is_delete and not isinstance(statement, FromStatement):
        mapper = _mapper_of(statement)
    if mapper is None:
        return _execute(state, inside) if inside else None
    if statement.is_insert or not state.is_orm_statement:
        if policy != "ignore":
            _raise_versions(state, mapper, refuse=policy == "refuse")
        if _changes_rows(statement):
            inside.add(mapper)
        return _execute(state, inside) if inside else None
    if isinstance(state.parameters, list) and state.execution_options.get("dml_strategy", "auto") in ("auto", "bulk"):
        return _followed(state, mapper)[0] if policy == "ignore" else _by_key(state, mapper)
    if policy != "ignore":
        _raise_versions(state, mapper, refuse=policy == "refuse")
    elif mode_of(mapper) == "client":
        return _followed(state, mapper)[0]
    if statement._propagate_attrs["plugin_subject"].is_aliased_class:
        inside.add(mapper)  # SQLAlchemy does not synchronize instances with an alias
    return _execute(state, inside, mapper)


def _note_table(mapper: Mapper[Any], _cls: type[Any]) -> None:
    if isinstance(mapper.local_table, Table):
        _TABLES.setdefault(mapper.local_table, ref(mapper))


def _mapper_of(statement: Any) -> Mapper[Any] | None:
    """Return the mapper of what a statement writes, if it is versioned."""
    subject = statement._propagate_attrs.get("plugin_subject")
    if subject is not None:
        return subject.mapper if is_versioned(subject.mapper) else None
    return mapper_of_table(getattr(statement.table, "element", statement.table))


def mapper_of_table(table: Any) -> Mapper[Any] | None:
    """Return the mapper of a versioned class whose rows are in a table."""
    found = _TABLES.get(table)
    return found() if found else None


def _refused(mapper: Mapper[Any], reason: str, way: str = "") -> VersionRequiredError:
    return VersionRequiredError(
        f"a statement that changes {mapper.class_.__name__} would leave versions as they are, and who has read the rows would"
        f" not notice: {reason}. "
        + (
            way
            or 'Load the rows and flush them, or map the class with mode "server", whose trigger sees every statement'
        )
    )


# ------------------------------------------------------------ the versions of the rows


def _raise_versions(state: ORMExecuteState, mapper: Mapper[Any], *, refuse: bool) -> None:
    """Make a statement raise the version of each row that it changes."""
    statement: Any = state.statement
    if not _changes_rows(statement):
        return
    if not is_local(mapper):
        raise _refused(mapper, f"they are in the table {version_column(mapper).table.name!r}, which it does not change")
    if mode_of(mapper) != "client":
        return
    given = list(_given(statement, state.parameters, mapper)) if statement.is_update else []
    if any(isinstance(value, (BindParameter, ColumnClause)) or not isinstance(value, ClauseElement) for value in given):
        raise ValueError(f"{mapper.class_.__name__}.{ATTRIBUTE} is raised by itself: leave it out of values()")
    if given:
        return
    if refuse:
        raise _refused(mapper, 'the session has bulk="refuse"')
    if statement.is_insert:
        state.statement = _upsert(statement, mapper)
        return
    if getattr(statement, "_maintain_values_ordering", False) or getattr(statement, "_ordered_values", None):
        raise _refused(mapper, "ordered_values() has no place for them", "Use values()")
    subject = statement._propagate_attrs.get("plugin_subject")
    if subject is None:
        name = version_column(mapper).key
        state.statement = statement.values({name: _next(statement.table.c[name])})
    else:
        state.statement = statement.values({ATTRIBUTE: _next(getattr(subject.entity, ATTRIBUTE))})


def _changes_rows(statement: Any) -> bool:
    return isinstance(statement, Update) or hasattr(
        getattr(statement, "_post_values_clause", None), "update_values_to_set"
    )


def _next(version: Any) -> Any:
    return func.pg_catalog.gen_random_uuid() if isinstance(version.type, Uuid) else version + 1


def _upsert(statement: Any, mapper: Mapper[Any]) -> Any:
    """Return an upsert that raises the version of the row it meets, whatever it was told to set it to."""
    version = version_column(mapper)
    changed, clause = statement._generate(), copy(statement._post_values_clause)
    given = dict(clause.update_values_to_set)
    kept = {key: value for key, value in given.items() if _named(key) not in {ATTRIBUTE, version.key}}
    kept[version.key] = _next(version)
    # A list of pairs in SQLAlchemy 2.0, a dict later.
    clause.update_values_to_set = kept if isinstance(clause.update_values_to_set, dict) else list(kept.items())
    changed._post_values_clause = clause
    return changed


def _given(statement: Any, parameters: Any, mapper: Mapper[Any]) -> Iterator[Any]:
    """Yield what a statement sets the version to."""
    sets = parameters if isinstance(parameters, list) else [parameters]
    for given in (getattr(statement, "_values", None), getattr(statement, "_ordered_values", None), *sets):
        for key, value in dict(given or ()).items():
            if _named(key) in {ATTRIBUTE, version_column(mapper).key}:
                yield value


def _named(key: Any) -> str:
    """Return the name of the attribute, or of the column, that a key of `values()` stands for."""
    if isinstance(key, str):
        return key
    found: str = getattr(key, "_annotations", {}).get("proxy_key") or key.key
    return found


def _may_hold_another(statement: Any) -> bool:
    """Whether a statement names another one that writes. One look at what it reads: a look all through it is dear."""
    if isinstance(statement, FromStatement) or getattr(statement, "_independent_ctes", None):
        return True
    if not isinstance(statement, Select):
        return False
    joined = [each[0] for each in statement._setup_joins]
    read = [getattr(each, "table", each) for each in (*statement._raw_columns, *statement._from_obj, *joined)]
    return any(isinstance(each, CTE) for each in read)


def _written_inside(statement: Any, *, refuse: bool) -> set[Mapper[Any]]:
    """Return the classes whose rows are changed by statements inside of another one."""
    found: set[Mapper[Any]] = set()
    for part in visitors.iterate(statement) if isinstance(statement, ClauseElement) else ():
        if part is not statement and isinstance(part, (Insert, Update)) and _changes_rows(part):
            mapper = _mapper_of(part)
            if mapper is None:
                continue
            if refuse and mode_of(mapper) == "client" and not _raises_itself(part, mapper):
                raise _refused(
                    mapper,
                    "it is inside of another statement",
                    f"Execute it by itself, or give it a {ATTRIBUTE} in values()",
                )
            found.add(mapper)
    return found


def _raises_itself(statement: Any, mapper: Mapper[Any]) -> bool:
    given = list(_given(statement, None, mapper)) if statement.is_update else []
    return any(not isinstance(value, BindParameter) and isinstance(value, ClauseElement) for value in given)


# ------------------------------------------------------------ by primary key, one set of parameters for each row


def _by_key(state: ORMExecuteState, mapper: Mapper[Any]) -> Result[Any]:
    """Send an UPDATE for each row, that compares the version which came with it."""
    rows: Any = state.parameters
    statement: Any = state.statement
    if mode_of(mapper) == "xmin":
        raise _refused(mapper, "xmin cannot be among the values of a row")
    if statement._where_criteria:
        raise _refused(
            mapper,
            "with a WHERE of its own, a row at another version is left out and nobody is told",
            "Leave the WHERE out",
        )
    # SQLAlchemy takes None for no version, and compares nothing.
    if lacking := [row for row in rows if row.get(ATTRIBUTE) is None]:
        raise _refused(
            mapper,
            f"{len(lacking)} of the {len(rows)} rows come without one",
            f"Give each the {ATTRIBUTE!r} that it was read at",
        )
    names = [mapper.get_property_by_column(column).key for column in mapper.primary_key]
    keys = [tuple(row.get(name) for name in names) for row in rows]
    if twice := [key for key, count in Counter(keys).items() if count > 1]:
        raise ValueError(f"rows of {mapper.class_.__name__} are given more than once: {twice[:5]}")
    _compare(state, mapper, keys, [row[ATTRIBUTE] for row in rows])
    try:
        result, loaded = _followed(state, mapper)
    except StaleDataError as error:
        raise not_written(str(error)) from error
    # SQLAlchemy puts the version of the parameters there, the one before.
    written = {mapper.identity_key_from_primary_key(key) for key in keys}
    expire(state.session, [each for each in loaded if each.key in written])
    return result


def _compare(state: ORMExecuteState, mapper: Mapper[Any], keys: list[Key], expected: list[Any]) -> None:
    """Lock the rows, so that a conflict is known by its rows and before the first is written."""
    session = state.session
    session._autoflush()
    connection = session.connection(bind_arguments=dict(state.bind_arguments))
    found, barred = lock(connection, mapper, keys)
    rows = zip(keys, expected, found, strict=True)
    if differing := [VersionConflict(mapper.class_, *row) for row in rows if row[1] != row[2]]:
        shared = isinstance(session.bind or session.get_bind(**state.bind_arguments), Connection)
        known = [item.pk for item in differing if item.found is not None and not shared]
        ours = dict(zip(known, written_here(connection, mapper, known), strict=True)) if known else {}
        gone = deleted_here(session)
        others = [
            item
            for item in differing
            if not ours.get(item.pk) and mapper.identity_key_from_primary_key(item.pk) not in gone
        ]
        raise conflict(others) if others else own_statement(differing)
    if barred:
        raise not_written(f"Rows of {mapper.class_.__name__} could not be locked: {barred}.")


# ------------------------------------------------------------ instances in the session


def _execute(
    state: ORMExecuteState, mappers: set[Mapper[Any]], synchronized: Mapper[Any] | None = None
) -> Result[Any] | None:
    """Execute a statement if the session has instances of the classes whose rows it writes.

    Args:
        state: the execution.
        mappers: classes for whose instances SQLAlchemy does nothing.
        synchronized: the class for which it does what `synchronize_session` says. What has another version is read again: a
            new version beside columns that somebody else has changed since would let them be overwritten.
    """
    found = [(mapper, loaded) for mapper in mappers if (loaded := instances(state, mapper))]
    kept = instances(state, synchronized) if synchronized is not None else {}
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


def _followed(state: ORMExecuteState, mapper: Mapper[Any]) -> tuple[Result[Any], dict[Any, Any]]:
    """Execute a statement. Return the instances without pending changes, too."""
    loaded = instances(state, mapper)
    move = follow(state, mapper, loaded)
    result = state.invoke_statement()
    move()
    return result, loaded


event.listen(VersionedBase, "after_mapper_constructed", _note_table, propagate=True)
event.listen(Session, "do_orm_execute", guard)
