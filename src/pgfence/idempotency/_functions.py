"""`idempotent` and `insert_once`: the arguments, their checks, and the guarantees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from pgfence._api.inputs import (
    DAY,
    check_error_classes,
    check_keep,
    check_key,
    is_async_session,
    is_session,
    unwrap_session,
)
from pgfence._process.clock import seconds
from pgfence._values.codec import Codec
from pgfence._values.fingerprint import fingerprint
from pgfence.idempotency._claim import KeyCall
from pgfence.idempotency._handles import AsyncIdem, Idem

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from sqlalchemy.orm import QueryableAttribute

    from pgfence._api.inputs import AnyAsyncSession, SyncSession
    from pgfence._process.clock import Seconds
    from pgfence._process.coroutines import Coro

T = TypeVar("T")


@overload
def idempotent(
    session: AnyAsyncSession,
    key: str,
    *,
    scope: str,
    payload: object = None,
    result: type[T],
    timeout: Seconds | None = None,
    keep: Seconds = DAY,
    record: Sequence[type[Exception]] = (),
) -> AsyncIdem[T]: ...
@overload
def idempotent(
    session: AnyAsyncSession,
    key: str,
    *,
    scope: str,
    payload: object = None,
    result: None = None,
    timeout: Seconds | None = None,
    keep: Seconds = DAY,
    record: Sequence[type[Exception]] = (),
) -> AsyncIdem[Any]: ...
@overload
def idempotent(
    session: SyncSession,
    key: str,
    *,
    scope: str,
    payload: object = None,
    result: type[T],
    timeout: Seconds | None = None,
    keep: Seconds = DAY,
    record: Sequence[type[Exception]] = (),
) -> Idem[T]: ...
@overload
def idempotent(
    session: SyncSession,
    key: str,
    *,
    scope: str,
    payload: object = None,
    result: None = None,
    timeout: Seconds | None = None,
    keep: Seconds = DAY,
    record: Sequence[type[Exception]] = (),
) -> Idem[Any]: ...
def idempotent(
    session: SyncSession | AnyAsyncSession,
    key: str,
    *,
    scope: str,
    payload: object = None,
    result: type[T] | None = None,
    timeout: Seconds | None = None,
    keep: Seconds = DAY,
    record: Sequence[type[Exception]] = (),
) -> Idem[T] | AsyncIdem[T]:
    """Do the work of a request once, and return the same result to each retry.

    ::

        call = idempotent(
            session, key, scope=f"user:{user.id}", payload=body, result=Receipt
        )
        receipt = call.run(charge)

    or, if a function is not suitable::

        with idempotent(session, key, scope="import", result=int) as op:
            if op.replayed:
                return op.result
            op.complete(do_the_work())

    Guarantees: among all transactions that request the same key and scope, one does the work and commits it together with its
    result. The others wait for it, up to `timeout`, and then get an equal result of the same type. If that transaction rolls
    back, or its process dies, one of the others does the work. No outcome aborts the caller's transaction or raises an
    IntegrityError. A transaction in which the work was begun and not finished cannot commit. If the work raises an error that is
    not listed in `record`, roll back the whole transaction, or to a savepoint around the call.

    With psycopg, the result is sent together with the COMMIT, unless `echo` is on or a listener for statements or for `begin` is
    registered. The result is sent before the COMMIT if a savepoint, a setting or another key follows. Commit through SQLAlchemy,
    because the driver's own `commit()` does not send the result, and PostgreSQL rejects that COMMIT.

    If you neither call `run` on the returned object nor enter it as a block, it causes a RuntimeWarning when it is
    garbage-collected.

    Limitations: nothing is guaranteed about effects outside the database, or after `keep` has passed. If a Session has several
    engines, only writes through the engine of the key are committed with it. In REPEATABLE READ and SERIALIZABLE, a result that
    was committed after the snapshot cannot be read, so IdempotencyInProgressError is raised with SQLSTATE 40001.

    Args:
        session: a Session or scoped_session, or the async counterpart of either. You commit its transaction.
        key: the text that the client sends again with each retry, from 1 to 255 characters long and without control characters.
        scope: text that names the operation and the owner of the key, for example operation, tenant and user. It has the same
            limits as the key. The same key in another scope is a different key. Two clients that must not see each other's
            results need different scopes.
        payload: the value that must be equal in all requests with the same key. Its values are compared, so 1 and 1.0 are equal,
            and two models with equal fields are equal, however the client wrote them. None means that nothing is compared.
        result: the type of the result. Dataclasses, pydantic models, named tuples and enumerations can be stored if this type
            contains them, and a result of another type is rejected. With None, only JSON and the standard library's types of
            numbers, texts, times and collections can be stored.
        timeout: seconds to wait for another transaction that has claimed the key. None means the configured default, `math.inf`
            waits indefinitely, and 0 does not wait.
        keep: seconds for which the result is kept after the work has ended. After that, the key counts as new.
        record: exception classes whose errors count as results. An error of these classes, or of their subclasses, rolls back
            what was done since the claim (through a savepoint, which costs two more round trips), is stored, and is raised
            again for each retry. You must still commit the transaction, or nothing is stored. An error of the flush at the end
            counts as an error of the work.

    Returns:
        An `Idem`, or an `AsyncIdem` for an async session. The key is claimed when you call `run` or enter the block.

    Raises:
        IdempotencyKeyReusedError: on entering, if the key belongs to a finished or running request with another payload. Respond
            with 422.
        IdempotencyInProgressError: on entering, if the holder of the key did not end within the timeout, if an
            `IdempotentEffect` has the key, or in the case described in Limitations. Respond with 409.
        IdempotencyMisuseError: on leaving, if the block has not read `op.replayed` or not called `op.complete()`, or if the
            result is not of the type `result` or cannot be stored. On entering, if this transaction has already claimed the key,
            or the stored result cannot be read. From COMMIT, if the work was begun and not finished (SQLSTATE PF004), or the
            claim was rolled back inside the block. In these cases, nothing is committed.
        TransactionStateError: the connection is in autocommit or in psycopg's pipeline mode.
        DeadlockError: this transaction waits for a key of another transaction, which waits for a key of this one.
        SchemaError: pgfence's tables are missing or older than version 2, or this role may not use them.
        StandbyError: the server is a standby, or the transaction is read-only. PostgreSQL has aborted the transaction.
        CapacityError: the server's lock table is full; PostgreSQL has aborted the transaction.
        UnreachableError: no connection could be opened.
        UnsupportedServerError: the database is not PostgreSQL, or the driver is not supported.
        TypeError, ValueError: an argument is unusable, and nothing was sent; or the encoding of the database cannot represent a
            text (ValueError).
    """
    call = KeyCall(
        scope=check_key(scope, "the scope"),
        key=check_key(key, "the key"),
        fingerprint=fingerprint(payload),
        codec=Codec.of(result),
        timeout=None if timeout is None else seconds(timeout),
        keep=check_keep(keep),
        record=check_error_classes(record),
    )
    if is_async_session(session):
        return AsyncIdem(session, call)
    if is_session(session):
        return Idem(session, call)
    raise TypeError(f"an idempotency key needs a Session or an AsyncSession, not {type(session).__name__}")


@overload
def insert_once(
    session: AnyAsyncSession, instance: T, key: Sequence[str | QueryableAttribute[Any]]
) -> Coroutine[Any, Any, T]: ...
@overload
def insert_once(session: SyncSession, instance: T, key: Sequence[str | QueryableAttribute[Any]]) -> T: ...
def insert_once(
    session: SyncSession | AnyAsyncSession, instance: T, key: Sequence[str | QueryableAttribute[Any]]
) -> T | Coro[T]:
    """Insert a row once by its unique key. Later callers get the row that was inserted first.

    ::

        payment = insert_once(
            session, Payment(order_id=7, amount=100), key=[Payment.order_id]
        )

    Guarantees: if the row was inserted, the instance itself is flushed and returned. Otherwise, the existing row's instance is
    returned, and the instance that was passed is not in the session. There is no IntegrityError for this key, and the transaction
    remains usable. The server waits for an unfinished insert of another transaction, up to the session's `lock_timeout`.

    Limitations: the existing row may have other values. In REPEATABLE READ and SERIALIZABLE, a row that was committed after the
    snapshot cannot be read, so the call raises IdempotencyInProgressError with SQLSTATE 40001. In autocommit, PostgreSQL rejects
    the savepoint that the call sets.

    Args:
        session: a Session or scoped_session, or the async counterpart of either, in which case the result must be awaited.
            Pending changes are flushed.
        instance: a new instance of a mapped class, with the columns of the key set.
        key: attributes, or their names, that form a primary key, a unique constraint or a unique index of the table. The
            constraint must not be deferred, and the index must not be partial or over an expression.

    Returns:
        The instance that was passed, or the instance of the existing row.

    Raises:
        ValueError: no such unique key is declared, an attribute of the key belongs to another class or is None, or the instance
            is already in the database.
        TypeError: `instance` is not of a mapped class, `session` is not a session, or `key` is not a list.
        IntegrityError: another constraint is violated; or the constraint of `key` is violated, but a query of the class does not
            find the row that has the key, because the row belongs to another class of the same table, a filter or a policy hides
            it, or the server rounds the value. Under row-level security, the server does not say which constraint was violated.
        IdempotencyInProgressError: see Limitations.
        UnreachableError: the session had no connection yet, and the server cannot be reached.
    """
    from pgfence.idempotency._insert import insert

    if is_async_session(session):
        return unwrap_session(session).run_sync(insert, instance, key)
    if not is_session(session):
        raise TypeError(f"insert_once() takes a Session or an AsyncSession, not {type(session).__name__}")
    return insert(unwrap_session(session), instance, key)
