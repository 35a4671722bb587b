"""Transactions that pgfence opens for its caller, and the meaning of their errors on connecting and on COMMIT."""

from __future__ import annotations

from inspect import iscoroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine

from pgfence._api.contexts import AsyncSafeContext, SafeContext, _SafeSteps
from pgfence._api.inputs import is_async_session, is_session
from pgfence._sql.errors import find_connect_error, is_commit_unanswered
from pgfence.errors import CommitOutcomeUnknownError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from sqlalchemy.orm import Session

W = TypeVar("W")
W_co = TypeVar("W_co", covariant=True)

NOT_COMMITTED = "Nothing was committed"
ATTEMPT = "_pgfence_attempt"
"""The attribute of a Session, and of its Connections, with the running attempt of `run_transaction`."""


def commit_unknown_error(why: str, what: str) -> CommitOutcomeUnknownError:
    """Return the error for a transaction that may have been committed in spite of an error."""
    return CommitOutcomeUnknownError(
        f"{why}: {what} may or may not have been committed, and is not retried. Check for its effects before you retry;"
        " an idempotency key makes the retry harmless"
    )


def open_connection(session: Session, bind_arguments: dict[str, Any]) -> Connection:
    """Return the connection of a Session, which opens one if it has none yet.

    Raises:
        UnreachableError: the server cannot be reached, whatever exception the driver raised.
    """
    try:
        connection: Connection = session.connection(bind_arguments=bind_arguments)
    except Exception as error:
        raise_connecting(session.get_bind(**bind_arguments).engine, error)
        raise
    return connection


def raise_connecting(engine: Engine, error: Exception) -> None:
    """Raise UnreachableError or a similar error if an error comes from connecting; otherwise return."""
    if unreachable := find_connect_error(engine, error, NOT_COMMITTED):
        raise unreachable from error


class BeginFactory(Protocol[W_co]):
    """An Engine or a sessionmaker, or the async counterpart of either."""

    def begin(self) -> AbstractContextManager[W_co, bool | None] | AbstractAsyncContextManager[W_co, bool | None]: ...


class _BegunSteps(_SafeSteps[W]):
    """A separate transaction that begins with a lock or gate.

    If the connection is lost during COMMIT, the end of the block raises CommitOutcomeUnknownError.
    """

    def __init__(self, factory: BeginFactory[W], enter: Callable[[W], object], what: str) -> None:
        super().__init__(factory.begin())
        self._engine = getattr(factory, "sync_engine", factory)
        self._enter_first = enter
        self._what = what
        self._work: W

    async def _enter(self) -> W:
        try:
            work = self._work = await super()._enter()
        except Exception as error:
            if isinstance(self._engine, Engine):
                raise_connecting(self._engine, error)
            raise
        try:
            entering = self._enter_first(work)
            if iscoroutine(entering):
                await entering
        except BaseException as error:
            # The caller's block was not entered, so nothing else would roll this transaction back.
            await super()._exit(error)
            raise
        return work

    async def _exit(self, error: BaseException | None) -> None:
        if error is None:
            # The Session is flushed first, so that any later failure is a failure of the COMMIT itself.
            try:
                await _flush(self._work)
            except BaseException as failure:
                await super()._exit(failure)
                raise
        try:
            await super()._exit(error)
        except Exception as failure:
            if error is None and is_commit_unanswered(failure):
                raise commit_unknown_error("the connection was lost during COMMIT", self._what) from failure
            raise


class Begun(_BegunSteps[W], SafeContext[W]):
    """A separate transaction that begins with a lock or gate."""


class AsyncBegun(_BegunSteps[W], AsyncSafeContext[W]):
    """A separate transaction of a task that begins with a lock or gate."""


async def _flush(work: object) -> None:
    if is_session(work):
        if work.is_active:
            work.flush()
    elif is_async_session(work) and work.is_active:
        await work.flush()
