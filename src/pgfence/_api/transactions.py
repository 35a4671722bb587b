"""Transactions that pgfence opens for its caller, and what their errors of connecting and of COMMIT mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine

from pgfence._api.contexts import AsyncSafeContext, SafeContext
from pgfence._api.inputs import is_session
from pgfence._sql.errors import find_connect_error, is_commit_unanswered
from pgfence.errors import CommitOutcomeUnknownError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

NOT_COMMITTED = "Nothing was committed"


def commit_doubt(why: str, what: str) -> CommitOutcomeUnknownError:
    """Return what to raise where a transaction may be committed in spite of an error."""
    return CommitOutcomeUnknownError(
        f"{why}: {what} may have had its effect, or not, and is not tried again. Look for its effect before you do it"
        " again; an idempotency key makes the repetition harmless"
    )


def connected(session: Any, bind_arguments: dict[str, Any]) -> Connection:
    """Return the connection of a Session, which opens one if it has none yet.

    Raises:
        UnreachableError: the server cannot be reached, whatever the driver says for that.
    """
    try:
        connection: Connection = session.connection(bind_arguments=bind_arguments)
    except Exception as error:
        raise_connecting(session.get_bind(**bind_arguments).engine, error)
        raise
    return connection


def raise_connecting(engine: Engine, error: Exception) -> None:
    """Raise what an error means if it comes from connecting; else return."""
    if told := find_connect_error(engine, error, NOT_COMMITTED):
        raise told from error


class Begun(SafeContext[Any]):
    """A separate transaction that begins with a lock or gate; a COMMIT without a response raises CommitOutcomeUnknownError."""

    def __init__(self, factory: Any, enter: Callable[[Any], object], what: str) -> None:
        super().__init__(factory.begin())
        self._factory = factory
        self._enter = enter
        self._what = what
        self._work: Any = None

    def __enter__(self) -> Any:
        try:
            self._work = super().__enter__()
        except Exception as error:
            if isinstance(self._factory, Engine):
                raise_connecting(self._factory, error)
            raise
        try:
            self._enter(self._work)
        except BaseException as error:
            super().__exit__(type(error), error, error.__traceback__)
            raise
        return self._work

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is None:
            # Flushed first, so that what fails after this is the COMMIT itself.
            try:
                _flush(self._work)
            except BaseException as failure:
                super().__exit__(type(failure), failure, failure.__traceback__)
                raise
        try:
            super().__exit__(kind, error, tb)
        except Exception as failure:
            if error is None and is_commit_unanswered(failure):
                raise commit_doubt("the connection was lost during COMMIT", self._what) from failure
            raise


class AsyncBegun(AsyncSafeContext[Any]):
    """A separate transaction that begins with a lock or gate; see the sync twin."""

    def __init__(self, factory: Any, enter: Callable[[Any], Awaitable[object]], what: str) -> None:
        super().__init__(factory.begin())
        self._factory = factory
        self._enter = enter
        self._what = what
        self._work: Any = None

    async def __aenter__(self) -> Any:
        try:
            self._work = await super().__aenter__()
        except Exception as error:
            if hasattr(self._factory, "sync_engine"):
                raise_connecting(self._factory.sync_engine, error)
            raise
        try:
            await self._enter(self._work)
        except BaseException as error:
            await super().__aexit__(type(error), error, error.__traceback__)
            raise
        return self._work

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if error is None:
            try:
                await self._work.run_sync(_flush)
            except BaseException as failure:
                await super().__aexit__(type(failure), failure, failure.__traceback__)
                raise
        try:
            await super().__aexit__(kind, error, tb)
        except Exception as failure:
            if error is None and is_commit_unanswered(failure):
                raise commit_doubt("the connection was lost during COMMIT", self._what) from failure
            raise


def _flush(work: Any) -> None:
    if is_session(work) and work.is_active:
        work.flush()
