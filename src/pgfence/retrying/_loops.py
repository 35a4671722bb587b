"""The sync and async loops over the attempts, which differ in how they call the function and how they sleep."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pgfence._api.contexts import AsyncSafeContext, SafeContext
from pgfence._holds.carriers import THREADS, get_task_contender
from pgfence._process.clock import clock
from pgfence.errors import TransactionStateError
from pgfence.retrying._attempt import AttemptRun, bind_of
from pgfence.retrying._rules import TransactionAttempt, find_sqlstate, is_curable, is_snapshot_error, pick_pause

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker

    from pgfence.retrying._rules import Outcome

    S = TypeVar("S", bound=Session)
    AS = TypeVar("AS", bound=AsyncSession)

log = logging.getLogger("pgfence.retrying")

_RUNNING: ContextVar[tuple[tuple[object, object], ...]] = ContextVar("pgfence_transactions", default=())
"""The thread or task of each running transaction, and its database. A task started in a transaction counts as another owner."""


class Plan(NamedTuple):
    """The options of one call. The timeout is in seconds; None means the configured default."""

    name: str
    attempts: int
    timeout: float | None


class Retries:
    """The attempts of one call so far."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._began = clock()
        self._number = 0

    def start(self, session: Session) -> AttemptRun:
        """Start an attempt on a Session that is not in a transaction yet."""
        self._number += 1
        return AttemptRun(session, self._number)

    def report_commit(self, attempt: AttemptRun) -> None:
        """Emit the event of an attempt that was committed."""
        self._emit_event(attempt, "committed", None, 0.0)

    def handle_failure(self, attempt: AttemptRun, error: Exception) -> float:
        """Return the seconds until the next attempt, or raise if there is none."""
        if attempt.committed:
            error.add_note("the transaction was committed before this error was raised, and is not retried")
            self._emit_event(attempt, "failed", error, 0.0)
            raise error
        if doubt := attempt.find_doubt(error, self._plan.name):
            self._emit_event(attempt, "failed", error, 0.0)
            raise doubt from error
        if unreachable := attempt.find_connect_failure(error):
            self._emit_event(attempt, "failed", error, 0.0)
            raise unreachable from error
        left = self._compute_left(attempt)
        if not self._may_follow(attempt, error, left):
            self._emit_event(attempt, "failed", error, 0.0)
            raise error
        pause = min(pick_pause(self._number), left)
        log.debug("%s: attempt %d ended with %s", self._plan.name, self._number, type(error).__name__)
        self._emit_event(attempt, "retried", error, pause)
        return pause

    def _compute_left(self, attempt: AttemptRun) -> float:
        limit = attempt.config.default_timeout if self._plan.timeout is None else self._plan.timeout
        return self._began + limit - clock()

    def _may_follow(self, attempt: AttemptRun, error: Exception, left: float) -> bool:
        if not is_curable(error):
            return False
        if attempt.joined and is_snapshot_error(error):
            error.add_note(
                "the work was not retried, because it ran in a savepoint of a transaction that was already open and keeps its snapshot"
                " and locks. Roll back the whole transaction and retry all of it"
            )
            return False
        if self._number < self._plan.attempts and left > 0:
            return True
        took = clock() - self._began
        why = ", because the timeout has passed" if left <= 0 else ""
        error.add_note(
            f"the transaction was given up after attempt {self._number} of {self._plan.attempts}, {took:.1f} s after the first"
            f" attempt began{why}"
        )
        return False

    def _emit_event(self, attempt: AttemptRun, outcome: Outcome, error: Exception | None, pause: float) -> None:
        events = attempt.config.events
        if not events.active:
            return
        what = TransactionAttempt(
            event=outcome,
            name=self._plan.name.removesuffix("()"),
            owner=None,
            lease_id=None,
            token=None,
            at=datetime.now(UTC),
            attempt=attempt.number,
            error=None if error is None else type(error).__name__,
            sqlstate=None if error is None else find_sqlstate(error),
            seconds=clock() - attempt.began,
            pause=pause,
        )
        events.emit(what)


def run(factory: sessionmaker[S], work: Callable[[S], object], plan: Plan) -> object:
    """Run the work in separate transactions until one is committed."""
    retries = Retries(plan)
    while True:
        session = factory()
        with _reject_nested(THREADS.get_contender(), session, factory, plan):
            attempt = retries.start(session)
            try:
                with SafeContext(session), SafeContext(session.begin()):
                    result = _call(work, session)
                    attempt.finish(session)
            except Exception as error:
                pause = retries.handle_failure(attempt, error)
            else:
                retries.report_commit(attempt)
                return result
            finally:
                attempt.detach()
        # The sleep is outside the session, when the connection is in the pool again and no lock is held.
        time.sleep(pause)


async def run_async(factory: async_sessionmaker[AS], work: Callable[[AS], object], plan: Plan) -> object:
    """Run the work in separate transactions until one is committed, as `run` does."""
    retries = Retries(plan)
    while True:
        session = factory()
        with _reject_nested(get_task_contender(), session.sync_session, factory, plan):
            attempt = retries.start(session.sync_session)
            try:
                async with AsyncSafeContext(session), AsyncSafeContext(session.begin()):
                    result = await _call_async(work, session)
                    await session.run_sync(attempt.finish)
            except Exception as error:
                pause = retries.handle_failure(attempt, error)
            else:
                retries.report_commit(attempt)
                return result
            finally:
                attempt.detach()
        # The sleep is outside the session, when the connection is in the pool again and no lock is held.
        await asyncio.sleep(pause)


@contextmanager
def _reject_nested(me: object, session: Session, factory: object, plan: Plan) -> Iterator[None]:
    """Reject a transaction inside another one of this thread or task on the same database."""
    bind = bind_of(session)
    # The dialect identifies the database, because an engine and its copies with execution options share it.
    here = (me, factory if bind is None else bind.dialect)
    if here in _RUNNING.get():
        raise TransactionStateError(
            f"{plan.name} was not run, because it was called inside a transaction of run_transaction. Its own transaction would be"
            " committed even if the outer transaction fails, would be repeated with each attempt of the outer transaction, and"
            " could wait indefinitely for locks of the outer transaction. Call the function itself with the open session; if it is"
            " decorated, call fn.__wrapped__(session, ...)"
        )
    before = _RUNNING.set((*_RUNNING.get(), here))
    try:
        yield
    finally:
        _RUNNING.reset(before)


def _call(work: Callable[[S], object], session: S) -> object:
    result = work(session)
    if inspect.iscoroutine(result):
        result.close()  # otherwise Python warns that it was never awaited
        raise TypeError(
            "with a sync sessionmaker, the function must not return a coroutine: pass an async_sessionmaker"
        )
    return result


def _call_async(work: Callable[[AS], object], session: AS) -> Awaitable[object]:
    result = work(session)
    if not inspect.isawaitable(result):
        raise TypeError(
            "the function for an async_sessionmaker must be awaitable: use async def, or pass a sessionmaker"
        )
    return result
