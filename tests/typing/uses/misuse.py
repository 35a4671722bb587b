"""Mistakes that a checker must report: the comment is the report, and an unused comment is an error."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from datetime import timedelta

from sqlalchemy import Connection, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

import pgfence
from app import Account, AsyncSessionLocal, Job, SessionLocal, async_engine, engine, get_async_engine, get_engine
from guarded import Note, Page
from pgfence import (
    AdvisoryLock,
    AsyncAdvisoryLock,
    AsyncAttempt,
    AsyncHeldLease,
    AsyncIdempotentEffect,
    AsyncLease,
    AsyncTransactionLock,
    Heartbeat,
    Held,
    HeldLease,
    IdempotentEffect,
    Json,
    Lease,
    LockKey,
    Once,
    Semaphore,
    TransactionLock,
    claim,
    fence,
    fenced,
    idempotent,
    idempotent_call,
    insert_once,
    load_for_version,
    run_transaction,
)
from pgfence import AdvisoryLok as AdvisoryLok  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from pgfence.fence import Fence as Fence  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
from pgfence.monitoring import evict
from pgfence.versions import Version as Version  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]


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


async def locks_are_no_context_managers(session: Session, asynchronous: AsyncSession) -> None:
    with AsyncAdvisoryLock(async_engine, "a"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    async with AdvisoryLock(engine, "a"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    async with AsyncAdvisoryLock(async_engine, "a"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    with TransactionLock(session, "a"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    with AsyncTransactionLock(asynchronous, "a"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    with Lease(engine, "a", ttl=5):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    with Once(engine, "a", cron="0 7 * * *"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    with IdempotentEffect(engine, "k", scope="a"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    async with AdvisoryLock(engine, "a").hold():  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass


def locks_are_no_decorators(session: Session) -> None:
    AdvisoryLock(engine, "a")(pages)  # type: ignore[operator]  # pyright: ignore[reportCallIssue]
    Lease(engine, "a", ttl=5)(pages)  # type: ignore[operator]  # pyright: ignore[reportCallIssue]
    TransactionLock(session, "a")(pages)  # type: ignore[operator]  # pyright: ignore[reportCallIssue]
    AdvisoryLock(engine, "a").wrap(pages)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    AsyncAdvisoryLock(async_engine, "a").wrap(pages)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    AdvisoryLock(engine, "a").hold()(pages)  # type: ignore[operator]  # pyright: ignore[reportCallIssue]
    TransactionLock(session, "a").wrap()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


def what_belongs_to_the_handle(session: Session) -> None:
    AdvisoryLock(engine, "a").release()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    Lease(engine, "a", ttl=5).renew()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    TransactionLock(session, "a").release()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


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
    AdvisoryLock(engine, "a").hold(blocking=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    AdvisoryLock(engine, "a").acquire(blocking_timeout=5)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    AdvisoryLock(engine, ("a", "b"))  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    TransactionLock(Session(engine), ["a"])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Lease(engine, ("a", "b"), ttl=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AdvisoryLock(SessionLocal, "a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    AsyncAdvisoryLock(AsyncSessionLocal, "a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Lease(SessionLocal, "a", ttl=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Lease(Session(engine), "a", ttl=5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    TransactionLock(engine, "a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
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


def leases_on_work() -> int:
    def numbered(n: int) -> int:
        return n

    Lease(engine, "a:{n}", ttl=60).wrap()(numbered)("one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AsyncLease(async_engine, "a", ttl=60).wrap()(pages)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AsyncLease(async_engine, "a", ttl=60).wrap()(async_pages)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    guarded = Lease(engine, "a:{n}", ttl=60).wrap(busy="skip")(numbered)
    return guarded(1) + 1  # type: ignore[operator]  # pyright: ignore[reportOptionalOperand, reportUnknownVariableType]


def sync_lease_on_async_work() -> None:
    Lease(engine, "a", ttl=60).wrap()(work)  # type: ignore[deprecated]


def sync_lease_skip_on_async_work() -> None:
    Lease(engine, "a", ttl=60).wrap(busy="skip")(work)  # type: ignore[deprecated]


guard = AdvisoryLock(engine, "a").wrap()


@guard  # type: ignore[deprecated]  # pyright: ignore[reportDeprecated]
async def decorated() -> int:
    return 1


guard_slot = Once(engine, "a", every=timedelta(days=1)).wrap()


@guard_slot  # type: ignore[deprecated]  # pyright: ignore[reportDeprecated]
async def decorated_slot() -> int:
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
    Semaphore(engine, "a", ttl=60)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    AdvisoryLock(engine, "a", "b", token=True)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


def a_slot_that_is_wrong() -> None:
    Once(engine, "a", every=timedelta(days=1), cron="0 7 * * *")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Once(engine, "a")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


async def await_of_a_lease_forgotten(session: AsyncSession, lease: AsyncHeldLease) -> None:
    lease.renew()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    fence(session, "a", 1)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    fence(session, {"a": 1, "b": 2})  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    lease.fence(session)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    lease.checkpoint(session, 1)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
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


def not_one_of_the_choices(heartbeat: str) -> None:
    chosen: Heartbeat = heartbeat  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    data: Json = {"at": object()}  # type: ignore[dict-item]  # pyright: ignore[reportAssignmentType]
    print(chosen, data)


async def other_awaits_forgotten(session: AsyncSession, connection: AsyncConnection, held: AsyncHeldLease) -> None:
    pgfence.compat.hashtext_key(connection, "a")  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    pgfence.run_transaction(AsyncSessionLocal, _nothing)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    pgfence.schema.add_fence(async_engine, "a", resource="a")  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    evict(async_engine, "a", reason="b")  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    held.wait_lost()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    held.release()  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    AsyncLease.adopt(async_engine, {"name": "a", "lease_id": "b", "token": 1})  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]


async def _nothing(session: AsyncSession) -> None: ...


async def a_row_not_awaited(session: AsyncSession) -> None:
    load_for_version(session, Page, 1, 3)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]


async def no_key_of_a_request(session: Session, asynchronous: AsyncSession, connection: Connection) -> None:
    idempotent(session, "k")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    idempotent(connection, "k", scope="a")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    idempotent(SessionLocal, "k", scope="a")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    idempotent(session, 7, scope="a")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    number: int = idempotent(session, "k", scope="a", result=str).run(lambda: "a")  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    idempotent(session, "k", scope="s", result=int).run(lambda: "x")  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType]
    idempotent(session, "k", scope="s", result=str).complete("x")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    idempotent(session, "k", scope="a", result=str).run(lambda: 7)  # type: ignore[arg-type, return-value]  # pyright: ignore[reportArgumentType]
    idempotent(session, "k", scope="a", result=int).run(work)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    idempotent(asynchronous, "k", scope="a", result=int).run(work)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    with idempotent(asynchronous, "k", scope="a"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    async with idempotent(session, "k", scope="a"):  # type: ignore[attr-defined]  # pyright: ignore[reportGeneralTypeIssues]
        pass
    print(number)


async def pay(session: Session) -> int:
    return 1


async def pay_async(session: AsyncSession) -> int:
    return 1


def async_work_in_a_sync_transaction() -> None:
    run_transaction(AsyncSessionLocal, pay)  # type: ignore[arg-type, unused-coroutine]  # pyright: ignore[reportArgumentType, reportCallIssue]
    run_transaction(SessionLocal, pay_async)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]


def another_model(session: Session) -> None:
    page: Job = load_for_version(session, Account, 1, 3)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    jobs: list[Account] = claim(session, Job)  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    claim(session, Job, "state = 'new'")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    claim(session, select(Job), Job.state == "new")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    print(page, jobs)


def no_key_of_a_call() -> None:
    idempotent_call(key="{n}")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    idempotent_call(key="{n}", scope="a", payload=7)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@idempotent_call(key="{n}", scope="a")
def counted(session: Session, n: int) -> int:
    return n


async def no_row_that_is_there_once(session: Session, asynchronous: AsyncSession, page: Page) -> None:
    counted(session, "one")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    insert_once(session, page, key=[7])  # type: ignore[list-item]  # pyright: ignore[reportCallIssue, reportArgumentType]
    insert_once(SessionLocal, page, ["id"])  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue, reportArgumentType]
    insert_once(asynchronous, page, ["id"])  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    note: Note = insert_once(session, page, ["id"])  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]
    print(note)


async def no_effect(session: Session) -> None:
    IdempotentEffect(engine, "k")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    IdempotentEffect(session, "k", scope="a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    IdempotentEffect(get_async_engine, "k", scope="a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AsyncIdempotentEffect(engine, "k", scope="a")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    IdempotentEffect(engine, "k", scope="a", result=int).run(attempt_async)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    IdempotentEffect(engine, "k", scope="a", result=int).run(work)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    AsyncIdempotentEffect(async_engine, "k", scope="a", result=int).run(attempt_async)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]


async def attempt_async(attempt: AsyncAttempt) -> int:
    attempt.step("a", charge)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    return 1


async def charge(key: str) -> int:
    return len(key)
