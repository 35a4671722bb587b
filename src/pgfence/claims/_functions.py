"""`claim`, `extend_claim`, `finish_claim`: the arguments, their checks, and the guarantees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from sqlalchemy.orm import Session
from sqlalchemy.sql import ClauseElement, Executable

from pgfence._api.inputs import is_async_session, is_session, unwrap_session
from pgfence.claims._mixin import Claimable
from pgfence.claims._statements import build_query, claim_rows, prepare_query
from pgfence.claims._tokens import check_form, claim_until, extend, finish

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from sqlalchemy import ColumnElement, Select
    from sqlalchemy.orm import Mapper

    from pgfence._api.inputs import AnyAsyncSession, SyncSession
    from pgfence._process.clock import Seconds
    from pgfence._process.coroutines import Coro

__all__ = ["claim", "extend_claim", "finish_claim"]

T = TypeVar("T")
R = TypeVar("R", bound=Claimable)


@overload
def claim(
    session: AnyAsyncSession,
    entity: type[R],
    *criteria: ColumnElement[bool],
    ttl: Seconds,
    order_by: Any = None,
    limit: int = 1,
) -> Coroutine[Any, Any, Sequence[R]]: ...
@overload
def claim(
    session: SyncSession,
    entity: type[R],
    *criteria: ColumnElement[bool],
    ttl: Seconds,
    order_by: Any = None,
    limit: int = 1,
) -> Sequence[R]: ...
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
def claim(
    session: Any, entity: Any, *criteria: Any, ttl: Seconds | None = None, order_by: Any = None, limit: int = 1
) -> object:
    """Claim rows that no other worker has claimed, and return them as ORM objects.

    ::

        with SessionLocal.begin() as session:
            for job in claim(session, Job, Job.state == "new", order_by=Job.id, limit=10):
                job.state = "done"

    Guarantees: each row is returned to one transaction at a time, and a call returns at most `limit` rows. Rows that another
    transaction has locked are skipped, so the statement does not wait. The rows are locked until the transaction ends (FOR NO
    KEY UPDATE). They become free again if the transaction is rolled back or its process dies. Rows of other tables in the
    statement are not locked, and an INSERT of a row that refers to a claimed one does not wait. Attributes are read again even
    if the session already has the row. If the session has autoflush, its pending changes are flushed first, as before any
    query.

    With `ttl`, which requires the mixin `Claimable`, a row that has no claim, or whose claim has expired by the server's clock,
    gets a new claim, with the next token. Commit, then work without a transaction; see `Claimable`. If the transaction is rolled
    back, the row is not claimed.

    Limitations: if the result has fewer rows than `limit`, there may be other matching rows that were locked and therefore
    skipped. If a join returns a row several times, the row counts several times towards `limit`, so use
    `where(Job.tags.any(...))` in place of the join. The rows are in the order of `order_by` as of the start of the statement. The
    order in which different workers finish is not guaranteed. In REPEATABLE READ and SERIALIZABLE, a row that was changed after
    the snapshot causes an error with SQLSTATE 40001. A plain SELECT reads a claimed row without waiting, and a transaction that
    writes it waits.

    Args:
        session: a Session or scoped_session, or the async counterpart of either, in which case the result must be awaited.
        entity: a mapped class.
        statement: a select() of one mapped class, with joins, criteria, order and loader options, in place of `entity`,
            `criteria` and `order_by`.
        criteria: SQL expressions that a row must satisfy.
        ttl: seconds after which the claim expires, from 0.3 s to a day (as a timedelta, up to a year), for a class with
            `Claimable`. Call `extend_claim` if the work takes longer.
        order_by: an expression, or several of them as a list, that determines which rows come first.
        limit: the largest number of rows to claim, from 1 to 10,000.

    Raises:
        TransactionStateError: the connection is in autocommit; or autoflush is off, and there are unflushed changes, which
            could be lost when the rows are read.
        StandbyError: the server is a standby, or the transaction is read-only. PostgreSQL has aborted the transaction.
        UnreachableError: the session had no connection yet, and the server cannot be reached.
        UnsupportedServerError: the engine is not for PostgreSQL, or its driver is not supported.
        ValueError: `limit` or `ttl` is out of range; the statement has LIMIT, FETCH, OFFSET, FOR UPDATE, GROUP BY, HAVING or
            DISTINCT; or the table has no primary key.
        TypeError: `session` is not a session; `entity` is not a mapped class, or its rows are not in a table; a criterion is a
            bool or a str; `statement` returns anything other than the instances of one mapped class, or was passed with an
            argument other than `limit`; `ttl` was passed for a class without `Claimable`, or omitted for a class with it; or the
            class is also `Versioned`, in a mode other than "client".
    """
    query, mapper = _read_query(entity, criteria, order_by, ttl)
    life = check_form(mapper, ttl)
    if life is not None:
        return _run(session, lambda work: claim_until(work, query, mapper, limit, life), "claim")
    return _run(session, lambda work: claim_rows(work, query, mapper, limit), "claim")


@overload
def extend_claim(
    session: AnyAsyncSession, row: Claimable, *, ttl: Seconds | None = None
) -> Coroutine[Any, Any, None]: ...
@overload
def extend_claim(session: SyncSession, row: Claimable, *, ttl: Seconds | None = None) -> None: ...
def extend_claim(session: Any, row: Claimable, *, ttl: Seconds | None = None) -> object:
    """Extend a claim, so that it expires `ttl` seconds from now by the server's clock. The commit makes this effective.

    Guarantees: a claim that another worker has replaced is not extended. The extension and everything else that the transaction
    writes are committed together, or not at all. A claim that has expired and was not replaced is extended.

    Args:
        session: a Session or scoped_session, or the async counterpart of either, in which case the result must be awaited. It may
            be a different session from the one that claimed the row.
        row: an instance that `claim` returned.
        ttl: seconds, as in `claim`; None means the `ttl` that was last passed for this claim.

    Raises:
        AttemptLostError: the claim was replaced or finished, the row was deleted, or the transaction of the claim was rolled
            back. PostgreSQL has aborted this transaction, so nothing of it can be committed; with a savepoint around
            the call, only the savepoint is aborted.
        LockNotHeldError: `claim` did not return this instance.
        TransactionStateError, StandbyError, UnreachableError, UnsupportedServerError: the same as for `claim`, except that
            unflushed changes are allowed.
        TypeError: `row` is not an instance of a class with `Claimable`, `session` is not a session, or `ttl` is not a duration.
        ValueError: `ttl` is out of range.
    """
    return _run(session, lambda work: extend(work, row, ttl), "extend_claim")


@overload
def finish_claim(session: AnyAsyncSession, row: Claimable) -> Coroutine[Any, Any, None]: ...
@overload
def finish_claim(session: SyncSession, row: Claimable) -> None: ...
def finish_claim(session: Any, row: Claimable) -> object:
    """End a claim, in the transaction that writes the result of the work. The commit makes this effective.

    The call sets `claimed_until` and `claimed_by` to None and keeps `claim_token`. Change the row in the same transaction so that
    the criteria of `claim` no longer match it: a row without a claim is available to the next call of `claim`.

    Guarantees: if another worker has replaced the claim, nothing that this transaction writes is committed. A claim that has
    expired and was not replaced can still be finished, because the work is done.

    Args:
        session: a Session or scoped_session, or the async counterpart of either, in which case the result must be awaited. It may
            be a different session from the one that claimed the row.
        row: an instance that `claim` returned.

    Raises:
        AttemptLostError: the claim was replaced or finished, the row was deleted, or the transaction of the claim was rolled
            back. PostgreSQL has aborted this transaction, as in `extend_claim`.
        LockNotHeldError: `claim` did not return this instance.
        TransactionStateError, StandbyError, UnreachableError, UnsupportedServerError: the same as for `extend_claim`.
        TypeError: `row` is not an instance of a class with `Claimable`, or `session` is not a session.
    """
    return _run(session, lambda work: finish(work, row), "finish_claim")


def _read_query(entity: Any, criteria: Sequence[Any], order_by: Any, ttl: object) -> tuple[Any, Mapper[Any]]:
    """Return the SELECT with its row locks, and the mapper. The SELECT is built if the caller passed a class."""
    if not isinstance(cast("object", entity), (ClauseElement, Executable)):
        return build_query(entity, criteria, order_by)
    if criteria or order_by is not None:
        raise TypeError(
            "claim() takes no criteria and no order_by= besides a select(): call where() and order_by() on the select()"
        )
    query, mapper = prepare_query(entity)
    if ttl is not None:
        raise TypeError("claim() with ttl= takes a class, not a select(): pass the criteria and order_by= to claim()")
    return query, mapper


def _run(session: Any, work: Callable[[Session], Any], name: str) -> Coro[Any] | Any:
    """Call a function with a Session, or with the sync Session of an AsyncSession."""
    if isinstance(session, Session):  # before the checks that look classes up, which take longer
        return work(session)
    if is_async_session(session):
        return unwrap_session(session).run_sync(work)
    if not is_session(session):
        raise TypeError(f"{name}() takes a Session or an AsyncSession, not {type(session).__name__}")
    return work(unwrap_session(session))
