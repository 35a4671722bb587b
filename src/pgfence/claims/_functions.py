"""`claim`: the arguments, their checks, and the guarantees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from sqlalchemy.sql import ClauseElement, Executable

from pgfence._api.inputs import is_async_session, is_session, unwrap_session
from pgfence.claims._statements import build_query, claim_rows, find_mapper

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.orm import Session

    from pgfence._api.inputs import AnyAsyncSession, SyncSession
    from pgfence._process.coroutines import Coro

__all__ = ["claim"]

T = TypeVar("T")


@overload
def claim(
    session: AnyAsyncSession, entity: type[T], *criteria: ColumnElement[bool], order_by: Any = None, limit: int = 1
) -> Coroutine[Any, Any, Sequence[T]]: ...
@overload
def claim(
    session: AnyAsyncSession, statement: Select[Any], /, *, limit: int = 1
) -> Coroutine[Any, Any, Sequence[Any]]: ...
@overload
def claim(
    session: SyncSession, entity: type[T], *criteria: ColumnElement[bool], order_by: Any = None, limit: int = 1
) -> Sequence[T]: ...
@overload
def claim(session: SyncSession, statement: Select[Any], /, *, limit: int = 1) -> Sequence[Any]: ...
def claim(session: Any, entity: Any, *criteria: Any, order_by: Any = None, limit: int = 1) -> object:
    """Claim rows that no other worker has claimed, in the caller's transaction, and return them as ORM objects.

    ::

        with SessionLocal.begin() as session:
            for job in claim(session, Job, Job.state == "new", order_by=Job.id, limit=10):
                job.state = "done"

    Guarantees: each row is returned to one transaction at a time, and never more than `limit` of them. Rows that another
    transaction has locked are skipped, so nothing waits. The rows are locked until the transaction ends (FOR NO KEY UPDATE),
    and returned to the table if it is rolled back or its process dies. Rows of other tables in the statement are not locked,
    and an INSERT of a row that refers to a claimed one does not wait. Attributes are read again even if the session already
    has the row. If the session has autoflush, its pending changes are flushed first, as before any query.

    Limitations: fewer rows than `limit`, or none, does not mean that no others match: they may be locked. A join that returns
    a row several times counts it several times; use `where(Job.tags.any(...))` instead. The rows are in the order of `order_by`
    as of the start of the statement; the order in which different workers finish is not guaranteed. In REPEATABLE READ and
    SERIALIZABLE a row that was changed since the snapshot raises SQLSTATE 40001. Transactions that do not lock the row, such
    as a plain SELECT, see it as unclaimed, and a transaction that writes it waits.

    Args:
        session: a Session or scoped_session; or an async one, in which case the result must be awaited.
        entity: a mapped class.
        statement: a select() of one mapped class, with joins, criteria, order and loader options, in place of `entity` and what
            follows it.
        criteria: SQL expressions that a row must satisfy.
        order_by: an expression, or several of them as a list, that determines which rows come first.
        limit: the largest number of rows to claim, from 1 to 10,000.

    Raises:
        TransactionStateError: the connection is in autocommit; or autoflush is off, and there are unflushed changes, which
            reading the rows could lose.
        StandbyError: the server is a standby, or the transaction is read-only. PostgreSQL has aborted it.
        ValueError: `limit` is out of range; the statement has LIMIT, OFFSET, FOR UPDATE, GROUP BY, HAVING or DISTINCT; or the
            table has no primary key.
        TypeError: `session` is not a session, `entity` is not a mapped class, or `statement` returns something else than its
            instances.
    """
    query = _read_query(entity, criteria, order_by)
    mapper = find_mapper(query)
    return _run(session, lambda work: claim_rows(work, query, mapper, limit), "claim")


def _read_query(entity: Any, criteria: Sequence[Any], order_by: Any) -> Any:
    """Return the statement that was passed, or one for the class."""
    if not isinstance(entity, (ClauseElement, Executable)):
        return build_query(entity, criteria, order_by)
    if criteria or order_by is not None:
        raise TypeError("claim() of a select() takes only limit: add where() and order_by() to the select()")
    return entity


def _run(session: Any, work: Callable[[Session], Any], name: str) -> Coro[Any] | Any:
    """Call a function with a Session, or with the one of an AsyncSession."""
    if is_async_session(session):
        return unwrap_session(session).run_sync(work)
    if not is_session(session):
        raise TypeError(f"{name}() takes a Session, not {type(session).__name__}")
    return work(unwrap_session(session))
