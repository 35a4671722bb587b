"""Build a SELECT that never locks more rows than its LIMIT.

`UPDATE ... WHERE id IN (SELECT ... LIMIT n FOR UPDATE SKIP LOCKED)` can lock more than n rows. If PostgreSQL executes the
subquery again for each row of a nested loop, each execution skips the rows that the UPDATE has already written and locks the
next ones. The SELECT that this module builds is not a subquery, so PostgreSQL executes it once, whatever plan is chosen.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sqlalchemy import Integer, Select, Table, bindparam, inspect, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstrumentedAttribute, Mapper
from sqlalchemy.sql.selectable import Join

from pgfence._api.inputs import check_int
from pgfence._api.transactions import open_connection
from pgfence._sql.errors import ErrorContext, raise_translated
from pgfence._sql.params import style_of
from pgfence._sql.transaction import read_driver_state
from pgfence.errors import TransactionStateError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Update
    from sqlalchemy.orm import Session

    from pgfence._orm import AnySelect

MOST_ROWS = 10_000

# Clauses of a SELECT that cannot be combined with a claim, each with what to do instead.
_CLAUSES = {
    "_limit_clause": "a LIMIT: pass limit= to claim()",
    "_fetch_clause": "a FETCH FIRST: pass limit= to claim()",
    "_offset_clause": "an OFFSET: the rows that it skips change with every claim of another worker, so remove it",
    "_for_update_arg": "FOR UPDATE: remove with_for_update(), because claim() chooses the lock",
    "_group_by_clauses": "GROUP BY: a group is not a row that can be locked. Use a subquery in where()",
    "_having_criteria": "HAVING: a group is not a row that can be locked. Use a subquery in where()",
    "_distinct": "DISTINCT: PostgreSQL cannot lock the rows of SELECT DISTINCT. Replace the join with where(), as in"
    " where(Job.tags.any(...))",
}
# The limit is a parameter, so that one statement serves every limit and is built once.
_LIMIT = bindparam("pgfence_limit", type_=Integer)
STANDBY = ErrorContext(
    on_primary="Rows can be claimed, and their claims extended or finished, only on the primary, in a read-write transaction"
)


def build_query(entity: Any, criteria: Sequence[Any], order_by: Any) -> tuple[AnySelect, Mapper[Any]]:
    """Return a SELECT that locks rows of a mapped class, and the mapper of the class."""
    found: object = inspect(entity, raiseerr=False)
    if not isinstance(found, Mapper):
        shown = entity if isinstance(entity, type) else type(entity).__name__
        raise TypeError(f"claim() takes a mapped class or a select() of one, not {shown}")
    for one in criteria:
        _reject_value(one)
    # Most callers pass an attribute of the class, which is the same object in each call.
    if order_by is None or isinstance(order_by, InstrumentedAttribute):
        query = _build_base(found, order_by)
    else:
        query = _build_base(found, None).order_by(*(order_by if isinstance(order_by, (tuple, list)) else (order_by,)))
    return query.where(*criteria) if criteria else query, found


@lru_cache(maxsize=1000)
def _build_base(mapper: Mapper[Any], order_by: InstrumentedAttribute[Any] | None) -> AnySelect:
    """Return the SELECT of all rows of a class. It is cached, because building it takes most of a claim's time in Python."""
    query = select(mapper.class_)
    return _lock_rows(query if order_by is None else query.order_by(order_by), mapper)


_PREPARED: WeakKeyDictionary[AnySelect, tuple[AnySelect, Mapper[Any]]] = WeakKeyDictionary()


def prepare_query(query: object) -> tuple[AnySelect, Mapper[Any]]:
    """Return the SELECT of a caller with the locks and the LIMIT of a claim, and the mapper of its rows."""
    # The prepared SELECT is kept, so that SQLAlchemy computes the key for its cache of compiled statements only once for a
    # select() that the program reuses.
    found = _PREPARED.get(query) if isinstance(query, Select) else None
    if found is None:
        query, mapper = _find_mapper(query)
        found = _PREPARED[query] = _lock_rows(query, mapper), mapper
    return found


def _lock_rows(query: AnySelect, mapper: Mapper[Any]) -> AnySelect:
    """Return the SELECT with the locks on the rows of a class and the LIMIT, after checking that the rows can be locked."""
    if not isinstance(mapper.selectable, (Table, Join)):
        raise TypeError(
            f"the rows of {mapper.class_.__name__} are not in one table ({type(mapper.selectable).__name__}), and PostgreSQL"
            " cannot lock them: claim rows of a class that is mapped to a table, such as a subclass"
        )
    table = mapper.base_mapper.local_table
    if not isinstance(table, Table) or not table.primary_key.columns:
        raise ValueError(
            f"the table {table.description!r} has no primary key, so two of its rows could become one object: add a primary"
            " key to the table"
        )
    # These are the tables of a joined subclass and of its bases. Other tables of the statement are not locked.
    tables = list(dict.fromkeys(each.local_table for each in mapper.iterate_to_root()))
    # The lock is FOR NO KEY UPDATE, so that an INSERT of a row that refers to a claimed row does not wait.
    return query.limit(_LIMIT).with_for_update(key_share=True, skip_locked=True, of=tables)


def _reject_value(one: object) -> None:
    if isinstance(one, bool):
        raise TypeError(
            f"a criterion is {one}, not a SQL expression: `is None` and `not` are evaluated by Python. Use"
            " Job.column.is_(None), not_(...) or true()"
        )
    if isinstance(one, str):
        raise TypeError(f"a criterion is the str {one!r}, not a SQL expression: use Job.column == value, or text()")


def _find_mapper(query: object) -> tuple[AnySelect, Mapper[Any]]:
    """Return the SELECT and the mapper of its rows, after checking that the rows can be claimed."""
    if not isinstance(query, Select):
        raise TypeError(
            f"claim() takes a select() of a mapped class, not {type(query).__name__}: PostgreSQL cannot lock the"
            " rows of a UNION, and claim() cannot add its lock and LIMIT to text()"
        )
    found = query.column_descriptions
    mapper: object = inspect(found[0].get("entity"), raiseerr=False) if len(found) == 1 else None
    if not isinstance(mapper, Mapper) or found[0]["expr"] is not mapper.class_:
        raise TypeError(
            "claim() returns the instances of one mapped class: use select(Job), without columns or further classes, and"
            " alias the other table if a class is joined to itself"
        )
    for name, advice in _CLAUSES.items():
        clause: object = getattr(query, name)
        if clause is not None and clause is not False and clause != ():
            raise ValueError(f"the statement has {advice}")
    return query, mapper


def claim_rows(session: Session, query: AnySelect, mapper: Mapper[Any], limit: int) -> Sequence[Any]:
    """Lock up to `limit` rows that no other transaction has locked, in the transaction of a Session, and return them."""
    check_int(limit, "limit", MOST_ROWS)
    connection = find_connection(session, mapper)
    # A row that the Session has loaded before may have been changed by another transaction since. Without such a row, the option
    # only costs time.
    options = {"populate_existing": True} if session.identity_map or session.new else {}
    if not session.autoflush:
        _reject_unflushed(session, mapper)
    try:
        result = session.execute(
            query, {_LIMIT.key: limit}, bind_arguments={"bind": connection}, execution_options=options
        )
        return result.scalars().unique().all()
    except DBAPIError as error:
        raise_translated(error, None, STANDBY)
        raise


def find_connection(session: Session, mapper: Mapper[Any]) -> Connection:
    """Return the connection on which a Session writes the rows of a class, in a transaction."""
    # A Session that sends reads to replicas must lock rows on the primary.
    where: dict[str, Any] = {"bind": session.get_bind(mapper, clause=_build_write(mapper))}
    connection = open_connection(session, where)
    style_of(connection.dialect)
    if read_driver_state(connection).autocommit:
        raise TransactionStateError(
            f"the connection is in autocommit, but rows of {mapper.class_.__name__} can be claimed, and their claims extended or"
            " finished, only in a transaction: use a connection without AUTOCOMMIT"
        )
    return connection


@lru_cache(maxsize=1000)
def _build_write(mapper: Mapper[Any]) -> Update:
    """Return a statement that writes the class; it only selects the engine of a routing Session and is never sent."""
    return update(mapper.base_mapper.class_)


def _reject_unflushed(session: Session, mapper: Mapper[Any]) -> None:
    changed = [one for one in session.dirty if session.is_modified(one)] + list(session.deleted)
    if changed:
        classes = ", ".join(sorted({type(one).__name__ for one in changed}))
        raise TransactionStateError(
            f"the Session has unflushed changes ({classes}) and autoflush is off: reading {mapper.class_.__name__} rows could"
            " lose them. Call flush() before claim()"
        )
