"""`run_transaction` and `in_transaction`: their arguments and guarantees."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Concatenate, Never, ParamSpec, Protocol, TypeVar, overload

from sqlalchemy import Connection
from typing_extensions import deprecated

from pgfence._api.inputs import (
    check_int,
    describe_function,
    find_loaded_classes,
    is_async_sessionmaker,
    is_sessionmaker,
    reject_coroutine,
    reject_generator,
)
from pgfence._process.clock import seconds
from pgfence.errors import TransactionStateError
from pgfence.retrying._attempt import NUMBER
from pgfence.retrying._loops import Plan, run, run_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session
    from sqlalchemy.orm import sessionmaker as sync_sessionmaker

    from pgfence._process.clock import Seconds
    from pgfence._process.coroutines import Coro

    S = TypeVar("S", bound=Session)
    AS = TypeVar("AS", bound=AsyncSession)

P = ParamSpec("P")
R = TypeVar("R")
S_co = TypeVar("S_co", bound="Session", covariant=True)
AS_co = TypeVar("AS_co", bound="AsyncSession", covariant=True)

_ASYNCIO = "sqlalchemy.ext.asyncio"
_ORM = "sqlalchemy.orm"


class InTransaction(Protocol[S_co]):
    """The type of the decorator that `in_transaction` returns, which removes the session from the signature."""

    def __call__(self, fn: Callable[Concatenate[S_co, P], R], /) -> Callable[P, R]: ...


class AsyncInTransaction(Protocol[AS_co]):
    """`InTransaction` for coroutine functions."""

    def __call__(self, fn: Callable[Concatenate[AS_co, P], Coro[R]], /) -> Callable[P, Coro[R]]: ...


@overload
def run_transaction(
    sessionmaker: async_sessionmaker[AS],
    fn: Callable[[AS], Awaitable[R]],
    *,
    attempts: int = 5,
    timeout: Seconds | None = None,
) -> Coroutine[Any, Any, R]: ...
@overload
@deprecated("a sync session cannot be awaited: pass an async_sessionmaker")
def run_transaction(
    sessionmaker: sync_sessionmaker[S],
    fn: Callable[[S], Coroutine[Any, Any, R]],
    *,
    attempts: int = 5,
    timeout: Seconds | None = None,
) -> Never: ...
@overload
def run_transaction(
    sessionmaker: sync_sessionmaker[S], fn: Callable[[S], R], *, attempts: int = 5, timeout: Seconds | None = None
) -> R: ...
def run_transaction(sessionmaker: Any, fn: Any, *, attempts: int = 5, timeout: Seconds | None = None) -> object:
    """Call `fn(session)` in a separate transaction, commit, and retry all of it after a conflict.

    ::

        def pay_interest(session: Session) -> int:
            account = session.get_one(Account, 1)
            account.balance += 1
            return account.balance


        balance = run_transaction(SessionLocal, pay_interest)

    Guarantees: the returned result is that of an attempt that was committed, and only one attempt is committed. Each attempt has
    a fresh session and reads everything again. The call retries version conflicts of a flush (`VersionConflictError`,
    StaleDataError), serialization failures (SQLSTATE 40001, also an `IdempotencyInProgressError` with this state) and deadlocks
    (40P01, `DeadlockError`), also at COMMIT, after a random backoff whose upper limit is 5 ms at first and doubles each time, up
    to 500 ms.

    Limitations: nothing is guaranteed about effects outside the transaction. `fn` may be called up to `attempts` times. The
    number of the attempt is in `session.info["pgfence_attempt"]`. Use `attempts=1` for work that must not be done twice. A
    running attempt is not interrupted. A lost connection is never retried, nor is a conflict with the version that a client sent.
    After a cancellation during COMMIT, the outcome is unknown.

    Instances that `fn` returns belong to a closed session, so return plain values instead.

    Args:
        sessionmaker: creates the session of each attempt. With an async_sessionmaker, `fn` is awaited, and the call itself must
            be awaited.
        fn: called with the session. It must neither commit, roll back nor close the session. If it raises, the transaction is
            rolled back.
        attempts: the maximum number of attempts, 1 or more.
        timeout: seconds after which no further attempt begins. None means the configured default, `math.inf` means no limit,
            and 0 means one attempt.

    Returns:
        The result of `fn` in the attempt that was committed.

    Raises:
        CommitOutcomeUnknownError: the connection was lost during COMMIT, so the transaction may have been committed; or, for a
            session with several databases, one of them rejected its COMMIT, and others may have committed.
        TransactionStateError: the call is inside another transaction of `run_transaction` on the same database; or the
            sessionmaker is bound to a Connection whose transaction is open and would be rolled back; or its engine is in
            autocommit; or a session with an open transaction was passed instead of a factory; or `fn` returned after it had
            ended the transaction, in which case its own commit is not undone.
        TypeError: `sessionmaker` is not a session factory; or `fn` is not a function, is a generator function, requires more
            arguments than the session, is async although the factory is sync, or does not return an awaitable although the
            factory is async.
        ValueError: `attempts` is below 1, or `timeout` is negative.
        UnreachableError: no connection could be opened.
        UnsupportedServerError: the database is not PostgreSQL, or the driver is not supported.
        Exception: the last attempt's error, or the first error that another attempt cannot resolve.
    """
    asynchronous = _is_async(sessionmaker)
    _check_function(fn, asynchronous=asynchronous)
    plan = Plan(describe_function(fn), check_int(attempts, "attempts"), None if timeout is None else seconds(timeout))
    _check_session_alone(fn)
    return run_async(sessionmaker, fn, plan) if asynchronous else run(sessionmaker, fn, plan)


@overload
def in_transaction(
    sessionmaker: async_sessionmaker[AS], *, attempts: int = 5, timeout: Seconds | None = None
) -> AsyncInTransaction[AS]: ...
@overload
def in_transaction(
    sessionmaker: sync_sessionmaker[S], *, attempts: int = 5, timeout: Seconds | None = None
) -> InTransaction[S]: ...
def in_transaction(sessionmaker: Any, *, attempts: int = 5, timeout: Seconds | None = None) -> object:
    """Decorate a function so that each call runs in its own transaction, as with `run_transaction`.

    ::

        @in_transaction(SessionLocal)
        def withdraw(session: Session, account_id: int, *, amount: int) -> int:
            account = session.get_one(Account, account_id)
            account.balance -= amount
            return account.balance


        left = withdraw(1, amount=5)

    Guarantees and limitations are the same as for `run_transaction`. The first parameter of the function is the session, which
    callers omit. In a transaction that is already open, call the original function: `withdraw.__wrapped__(session, 1,
    amount=5)`.

    Args:
        sessionmaker: creates the session of each attempt. For a coroutine function, pass an async_sessionmaker.
        attempts: see `run_transaction`.
        timeout: see `run_transaction`.

    Raises:
        TypeError: at decoration, if `sessionmaker` is not a session factory, or the decorated object is not a function, takes no
            positional argument, is a method with `self` or `cls`, is a generator function, or is async although the factory is
            sync. At a call, if a session is passed, or if the function does not return an awaitable although the factory is
            async.
        ValueError: `attempts` is below 1, or `timeout` is negative.
        TransactionStateError: at decoration, if a session with an open transaction is passed instead of a factory; at a call, as
            for `run_transaction`.
        Exception: at a call, the other errors of `run_transaction`.
    """
    asynchronous = _is_async(sessionmaker)
    count, limit = check_int(attempts, "attempts"), None if timeout is None else seconds(timeout)

    def decorate(fn: Callable[..., object]) -> Callable[..., object]:
        _check_function(fn, asynchronous=asynchronous)
        signature = _check_session_argument(fn)
        plan = Plan(describe_function(fn), count, limit)

        def bind(args: tuple[object, ...], kwargs: dict[str, object]) -> Callable[[object], object]:
            for given in args[:1]:
                if isinstance(given, _find_session_classes()):
                    way = f"{plan.name} opens a session for each attempt: omit the {type(given).__name__} in the call"
                    _reject_open(given, way)
                    raise TypeError(way)
            return lambda session: fn(session, *args, **kwargs)

        @functools.wraps(fn)
        async def call_async(*args: object, **kwargs: object) -> object:
            return await run_async(sessionmaker, bind(args, kwargs), plan)

        @functools.wraps(fn)
        def call(*args: object, **kwargs: object) -> object:
            return run(sessionmaker, bind(args, kwargs), plan)

        made: Callable[..., object] = call_async if asynchronous else call
        if signature is not None:
            parameters = list(signature.parameters.values())[1:]
            vars(made)["__signature__"] = signature.replace(parameters=parameters)
        return made

    return decorate


def _is_async(sessionmaker: object) -> bool:
    """Return whether a session factory is an async_sessionmaker."""
    if is_async_sessionmaker(sessionmaker):
        return True
    if is_sessionmaker(sessionmaker):
        return False
    way = "each attempt needs a separate session, so pass a sessionmaker or an async_sessionmaker"
    if isinstance(sessionmaker, _find_scoped_classes()):
        way += " (session_factory of a scoped session)"
    if isinstance(sessionmaker, _find_session_classes()):
        _reject_open(sessionmaker, way)
    raise TypeError(f"{way}, not {type(sessionmaker).__name__}")


def _check_function(fn: object, *, asynchronous: bool) -> None:
    """Raise an error unless a function can run in a transaction."""
    if not callable(fn):
        raise TypeError(f"fn must be a function, not {type(fn).__name__}")
    reject_generator(fn, "the transaction would end before its body runs. Return a list")
    if not asynchronous:
        reject_coroutine(fn, "a sync session cannot be awaited. Pass an async_sessionmaker")


def _find_scoped_classes() -> tuple[type, ...]:
    return find_loaded_classes(_ORM, "scoped_session") + find_loaded_classes(_ASYNCIO, "async_scoped_session")


def _find_session_classes() -> tuple[type, ...]:
    """Return the classes of sessions and connections, in whose transaction nothing can be retried."""
    return (
        Connection,
        *find_loaded_classes(_ORM, "Session"),
        *find_loaded_classes(_ASYNCIO, "AsyncSession", "AsyncConnection"),
        *_find_scoped_classes(),
    )


def _reject_open(given: object, way: str) -> None:
    """Raise an error if the transaction of a session or a connection is open."""
    work: Any = given
    scoped = isinstance(given, _find_scoped_classes())
    if scoped:
        work = work.registry() if work.registry.has() else None
    if work is not None and work.in_transaction():
        raise TransactionStateError(
            f"{way}. The transaction of this {type(given).__name__} is open, and a part of it cannot be retried: a savepoint"
            " keeps the snapshot, so that SQLSTATE 40001 occurs again in each attempt. To do the work in it once, call the"
            " function itself: fn(session, ...); if it is decorated, fn.__wrapped__(session, ...)"
        )


def _check_session_argument(fn: Callable[..., object]) -> inspect.Signature | None:
    """Return the signature of a function whose first argument can be the session, or None if the signature is unknown."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # for example a function that is implemented in C
        return None
    first = next(iter(signature.parameters.values()), None)
    if first is None or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise TypeError(
            f"{describe_function(fn)} has no positional argument for the session: make the session its first argument"
        )
    if first.name in ("self", "cls"):
        raise TypeError(
            f"the first argument of {describe_function(fn)} must be the session, but a method gets its instance or class first:"
            " use a static method, or pass a bound method to run_transaction"
        )
    return signature


def _check_session_alone(fn: Callable[..., object]) -> None:
    """Reject a function that requires more than the session, such as the number of the attempt."""
    signature = _check_session_argument(fn)
    further = [] if signature is None else list(signature.parameters.values())[1:]
    asked = [p.name for p in further if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if asked:
        raise TypeError(
            f"{describe_function(fn)} is called only with the session, but also requires {', '.join(map(repr, asked))}: bind"
            f" arguments with a lambda or functools.partial, or use in_transaction. The number of the attempt is session.info[{NUMBER!r}]"
        )
