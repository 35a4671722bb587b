"""`fence` and `fenced`, for transactions that the caller began."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, overload

from pgfence._api.contexts import AsyncHold, EnterOnly
from pgfence._api.inputs import unwrap_session
from pgfence.fence._entering import check_still_open, enter_for_block, enter_named, is_async, tokens_of

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from pgfence._api.inputs import AsyncWork, SyncWork
    from pgfence._process.coroutines import Coro


@overload
def fence(session: AsyncWork, resource: str, token: int, *, after_reads: bool = False) -> Coroutine[Any, Any, None]: ...
@overload
def fence(session: SyncWork, resource: str, token: int, *, after_reads: bool = False) -> None: ...
@overload
def fence(
    session: AsyncWork, tokens: Mapping[str, int], /, *, after_reads: bool = False
) -> Coroutine[Any, Any, None]: ...
@overload
def fence(session: SyncWork, tokens: Mapping[str, int], /, *, after_reads: bool = False) -> None: ...
def fence(
    session: SyncWork | AsyncWork, resource: object, token: object = None, *, after_reads: bool = False
) -> Coro[None] | None:
    """Enter the gate of a resource in a transaction that you began. The transaction stays inside until it ends.

    ::

        with SessionLocal.begin() as session:
            fence(session, "close:2026-04", token)
            session.get_one(Period, "2026-04").closed = True

    Guarantees: a transaction that enters the gate after a newer token was granted is rejected. A transaction that is already
    inside may still commit. The first transaction of the newer holder waits at the gate until the older transactions inside have
    ended, and can read what they wrote. Transactions with the same token run concurrently, except that all others wait until the
    first one, which raises the gate's token, has ended. A rejected transaction cannot commit even if the error is swallowed, so
    roll back.

    Limitations: nothing is guaranteed about writers that enter no gate, unless `pgfence.schema.add_fence` guards the tables, or
    about effects outside this transaction. In REPEATABLE READ and SERIALIZABLE, the snapshot is older than the wait, so use READ
    COMMITTED for the first transaction with a new token.

    Args:
        session: a Session, scoped_session or Connection, or the async counterpart of one, in which case the result must be
            awaited.
        resource: the name of the resource, in the configured namespace. The name of a lease is the resource of that lease, unless
            the lease has its own `namespace`. For such a lease, use its `begin` or `fence`.
        token: the token of the lease, or of an advisory lock with `token=True`.
        tokens: several resources at once, in place of `resource` and `token`. Their gates are entered in one global order.
        after_reads: whether statements of this transaction may precede the entry. What these statements read may be older than
            the last holder's commit, and a write based on outdated data would undo that commit.

    Raises:
        StaleFencingTokenError: the token is not the newest, was never issued for this resource, or the lease was reset. In
            REPEATABLE READ and SERIALIZABLE, PostgreSQL may raise a serialization failure (SQLSTATE 40001) instead.
        LockTimeoutError: a transaction of an older holder, or the first one with this token, was still inside the gate after the
            session's own `lock_timeout` or, if none is set, the configured `default_timeout`. PostgreSQL has aborted this
            transaction, so roll back.
        TransactionStateError: another statement was already sent in this transaction, or the connection is in autocommit or a
            pipeline.
        CapacityError: the server's lock table is full. PostgreSQL has aborted this transaction.
        SchemaError: pgfence's tables are missing, or this role may not use them. PostgreSQL has aborted this transaction.
        StandbyError: the server is a standby, or the transaction is read-only. PostgreSQL has aborted the transaction.
        UnreachableError: the session had no connection yet, and the server cannot be reached.
        UnsupportedServerError: the engine is not for PostgreSQL, or its driver is not supported.
        TypeError: `session` is neither a session nor a connection, a name is not a str, or a token is not an int.
        ValueError: no resource was given, a name is not usable, or a token is not a bigint of 1 or more.
    """
    if is_async(session):
        return unwrap_session(session).run_sync(enter_named, tokens_of(resource, token), after_reads=after_reads)
    enter_named(session, tokens_of(resource, token), after_reads=after_reads)
    return None


@overload
def fenced(
    session: AsyncWork, resource: str, token: int, *, after_reads: bool = False
) -> AbstractAsyncContextManager[None, None]: ...
@overload
def fenced(
    session: SyncWork, resource: str, token: int, *, after_reads: bool = False
) -> AbstractContextManager[None, None]: ...
@overload
def fenced(
    session: AsyncWork, tokens: Mapping[str, int], /, *, after_reads: bool = False
) -> AbstractAsyncContextManager[None, None]: ...
@overload
def fenced(
    session: SyncWork, tokens: Mapping[str, int], /, *, after_reads: bool = False
) -> AbstractContextManager[None, None]: ...
def fenced(
    session: SyncWork | AsyncWork, resource: object, token: object = None, *, after_reads: bool = False
) -> object:
    """Return a context manager that enters the gate of a resource for the rest of the transaction.

    Entering the block enters the gate as `fence` does, with the same guarantees. Leaving the block does not leave the gate: the
    block only shows which statements are fenced.

    Args:
        session: a Session, scoped_session or Connection, or the async counterpart of one, in which case the block is `async
            with`.
        resource: the name of the resource, in the configured namespace.
        token: the token of the lease, or of an advisory lock with `token=True`.
        tokens: several resources at once, in place of `resource` and `token`.
        after_reads: whether statements of this transaction may precede the entry; see `fence`.

    Raises:
        PgfenceError: on entering, the same errors as `fence`.
        TransactionStateError: on leaving, if the transaction has ended inside the block, unless the block itself raised an
            exception.
        TypeError, ValueError: the same errors as `fence`.
    """
    if is_async(session):
        return AsyncHold(partial(_enter_async, session, tokens_of(resource, token), after_reads=after_reads))
    return EnterOnly(partial(_enter, session, tokens_of(resource, token), after_reads=after_reads))


def _enter(session: SyncWork, tokens: Mapping[str, int], *, after_reads: bool) -> Callable[[], None]:
    stay = enter_for_block(unwrap_session(session), tokens, after_reads=after_reads)
    return partial(check_still_open, stay, tokens)


async def _enter_async(session: AsyncWork, tokens: Mapping[str, int], *, after_reads: bool) -> Callable[[], Coro[None]]:
    stay = await unwrap_session(session).run_sync(enter_for_block, tokens, after_reads=after_reads)

    async def check() -> None:
        check_still_open(stay, tokens)

    return check
