"""Mistakes that a checker must report: the comment is the report, and an unused comment is an error."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import pgfence
from app import AsyncSessionLocal, SessionLocal, async_engine, engine, get_async_engine, get_engine
from guarded import Note, Page
from pgfence import (
    AdvisoryLock,
    AsyncAdvisoryLock,
    AsyncHeldLease,
    AsyncLease,
    AsyncTransactionLock,
    Held,
    HeldLease,
    Lease,
    LockKey,
    Once,
    TransactionLock,
    fenced,
    load_for_version,
)


def a_session_for_a_session_lock(session: Session) -> None:
    AdvisoryLock(session, "a")  # type: ignore[deprecated]  # pyright: ignore[reportDeprecated]


def an_async_session_for_a_session_lock(session: AsyncSession) -> None:
    AsyncAdvisoryLock(session, "a")  # type: ignore[deprecated]  # pyright: ignore[reportDeprecated]


def the_wrong_twin(session: AsyncSession, sync: Session) -> None:
    TransactionLock(session, "a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AsyncTransactionLock(sync, "a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AdvisoryLock(async_engine, "a")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    AsyncAdvisoryLock(engine, "a")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def the_lock_for_the_handle() -> None:
    with AdvisoryLock(engine, "a"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass


def none_not_looked_at() -> None:
    AdvisoryLock(engine, "a").try_acquire().release()  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]


async def await_forgotten(session: AsyncSession) -> None:
    AsyncAdvisoryLock(async_engine, "a").acquire()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    AsyncTransactionLock(session, "a").acquire()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    with AsyncAdvisoryLock(async_engine, "a").hold():  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    if AsyncAdvisoryLock(async_engine, "a").is_held():  # type: ignore[truthy-bool]  # pyright: ignore[reportUnnecessaryComparison]
        pass


def wrong_names(engine_name: int) -> None:
    AdvisoryLock(engine, engine_name)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    LockKey.raw("a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def wrong_arguments() -> None:
    AdvisoryLock(engine, "a").acquire(5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    AdvisoryLock(engine, "a").acquire(blocking=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    AdvisoryLock(engine, "a").hold(on_loss="raise")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AdvisoryLock(engine, "a").wrap(busy="ignore")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    TransactionLock(SessionLocal, "a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def a_token_where_there_is_none(held: Held) -> None:
    print(held.token)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]


def a_skip_not_looked_at() -> int:
    def work(n: int) -> int:
        return n

    guarded = AdvisoryLock(engine, "a:{n}").wrap(busy="skip")(work)
    return guarded(1) + 1  # type: ignore[operator]  # pyright: ignore[reportOptionalOperand, reportUnknownVariableType]


def arguments_kept() -> None:
    def work(n: int) -> int:
        return n

    AdvisoryLock(engine, "a:{n}").wrap()(work)("one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def work() -> int:
    return 1


def sync_lock_on_async_work() -> None:
    AdvisoryLock(engine, "a").wrap()(work)  # type: ignore[deprecated]


def sync_skip_on_async_work() -> None:
    AdvisoryLock(engine, "a").wrap(busy="skip")(work)  # type: ignore[deprecated]


def pages() -> Generator[int, None, None]:
    yield 1


async def async_pages() -> AsyncGenerator[int, None]:
    yield 1


def lock_on_a_generator() -> None:
    AdvisoryLock(engine, "a").wrap()(pages)  # type: ignore[deprecated]


def lock_on_an_async_generator() -> None:
    AdvisoryLock(engine, "a").wrap()(async_pages)  # type: ignore[deprecated]


def async_lock_on_other_work() -> None:
    AsyncAdvisoryLock(async_engine, "a").wrap()(pages)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AsyncAdvisoryLock(async_engine, "a").wrap()(async_pages)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


guard = AdvisoryLock(engine, "a").wrap()


@guard  # type: ignore[deprecated]  # pyright: ignore[reportDeprecated]
async def decorated() -> int:
    return 1


def other_functions() -> None:
    pgfence.configure(engine, pooler="pgbouncer")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    pgfence.current(int)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    pgfence.held(engine)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def the_wrong_twin_of_a_lease() -> None:
    Lease(get_async_engine, "a", ttl=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AsyncLease(get_engine, "a", ttl=1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def a_lease_that_is_wrong() -> None:
    with Lease(engine, "a", ttl=60).try_acquire():  # type: ignore[union-attr]  # pyright: ignore[reportOptionalContextManager]
        pass
    Lease(engine, LockKey.of("a"), ttl=60)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Lease(engine, "a")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Lease(engine, "a", ttl="60s")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Lease(engine, "a", ttl=60, heartbeat=False)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AdvisoryLock(engine, "a", "b", token=True)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def a_slot_that_is_wrong() -> None:
    Once(engine, "a", every=timedelta(days=1), cron="0 7 * * *")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Once(engine, "a")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


async def await_of_a_lease_forgotten(session: AsyncSession, lease: AsyncHeldLease) -> None:
    lease.renew()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    lease.hand_over()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    with fenced(session, "a", 1):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    pgfence.schema.create_all(async_engine)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]


def a_token_that_is_none(session: Session, held: Held, lease: HeldLease) -> None:
    fenced(session, "a", held.token)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
    fenced(session, "a", lease)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    fenced(session, "a", None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    lease.begin(AsyncSessionLocal)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    lease.token = 7  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]


def no_version_of_a_row(session: Session) -> None:
    note: Note = load_for_version(session, Page, 1, 3)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    load_for_version(session, Page, 1, "3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    load_for_version(session, Page, 1, None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    load_for_version(session, Page, 1, 3, True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    load_for_version(SessionLocal, Page, 1, 3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    print(note)


async def a_row_not_awaited(session: AsyncSession) -> None:
    load_for_version(session, Page, 1, 3)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
