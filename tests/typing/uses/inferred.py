"""What checkers must infer, sync and async side by side."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session
from typing_extensions import assert_type

import pgfence
from app import Account, AsyncSessionLocal, Job, SessionLocal, async_engine, engine, get_async_engine, get_engine
from guarded import Page
from pgfence import (
    AdvisoryLock,
    AsyncAdvisoryLock,
    AsyncAttempt,
    AsyncFencedHeld,
    AsyncHeld,
    AsyncHeldLease,
    AsyncIdempotentEffect,
    AsyncLease,
    AsyncMember,
    AsyncOnce,
    AsyncReadWriteLock,
    AsyncSlot,
    AsyncTransactionLock,
    Attempt,
    Election,
    FencedHeld,
    Held,
    HeldLease,
    IdempotentEffect,
    Lease,
    LockKey,
    Member,
    Once,
    Op,
    Slot,
    SlotOverError,
    TransactionLock,
    claim,
    compat,
    etag,
    fence,
    fenced,
    idempotent,
    idempotent_call,
    if_match,
    in_transaction,
    insert_once,
    load_for_version,
    run_transaction,
    AttemptLostError,
    IdempotencyInProgressError,
)


def sync(session: Session, scoped: scoped_session[Session], connection: Connection) -> None:
    assert_type(AdvisoryLock(engine, "a").try_acquire(), Held | None)
    assert_type(AdvisoryLock(connection, "a", "b").acquire(timeout=timedelta(seconds=1)), Held)
    assert_type(AdvisoryLock(get_engine, LockKey.raw(1), "a").acquire(), Held)
    assert_type(TransactionLock(scoped, "a", shared=True).try_acquire(), bool)
    assert_type(TransactionLock(session, LockKey.family("account")(1)).acquire(), None)
    assert_type(compat.hashtext_key(connection, "a"), LockKey)
    with AdvisoryLock(engine, "a").hold() as held:
        assert_type(held, Held)
        assert_type(pgfence.current(Held), Held)
    with AdvisoryLock(engine, "a").connect() as conn:
        assert_type(conn, Connection)
        assert_type(pgfence.held(conn), Held)
    with TransactionLock.begin(SessionLocal, "a") as opened, fenced(opened, {"a": 1, "b": 2}):
        assert_type(opened, Session)
    with TransactionLock.begin(engine, "a") as plain:
        assert_type(plain, Connection)
        fence(plain, "a", 1)
    assert_type(AdvisoryLock(get_engine, "a", token=True).acquire(), FencedHeld)
    assert_type(Once(engine, "a", every=timedelta(hours=1)).try_acquire(), Slot | None)
    assert_type(Election(engine, "a").stand(), Member)
    assert_type(claim(session, Job, Job.state == "new", limit=5), Sequence[Job])
    with Lease(engine, "a", ttl=60).hold() as lease:
        assert_type(lease, HeldLease)
        assert_type(lease.token, int)
        with lease.begin(SessionLocal) as writer:
            assert_type(writer, Session)
        with lease.begin(engine, "b") as raw:
            assert_type(raw, Connection)
    with SessionLocal.begin() as other, fenced(other, {"a": 1, "b": 2}):
        assert_type(fence(other, "a", 1), None)
    page = load_for_version(scoped, Page, 1, 3, lock=True)
    assert_type(page, Page)
    assert_type(load_for_version(scoped, Page, 1, 3, lock=True), Page)
    assert_type(page.version, int)
    assert_type(load_for_version(session, Page, (1,), if_match({"If-Match": etag(page)})), Page)


async def asynchronous(session: AsyncSession, connection: AsyncConnection) -> None:
    assert_type(await AsyncAdvisoryLock(async_engine, "a").try_acquire(), AsyncHeld | None)
    assert_type(await AsyncAdvisoryLock(connection, "a", "b").acquire(timeout=1), AsyncHeld)
    assert_type(await AsyncAdvisoryLock(get_async_engine, "a").acquire(), AsyncHeld)
    assert_type(await AsyncTransactionLock(session, "a", shared=True).try_acquire(), bool)
    assert_type(await compat.hashtext_key(connection, "a"), LockKey)
    assert_type(await load_for_version(session, Page, 1, 3), Page)
    async with AsyncAdvisoryLock(async_engine, "a").hold() as held:
        assert_type(held, AsyncHeld)
        assert_type(pgfence.current(AsyncHeld), AsyncHeld)
    async with AsyncAdvisoryLock(async_engine, "a").connect() as conn:
        assert_type(conn, AsyncConnection)
        assert_type(pgfence.held(conn), AsyncHeld)
    async with AsyncTransactionLock.begin(AsyncSessionLocal, "a") as opened, fenced(opened, {"a": 1, "b": 2}):
        assert_type(opened, AsyncSession)
    async with AsyncTransactionLock.begin(async_engine, "a") as plain:
        assert_type(plain, AsyncConnection)
    assert_type(await AsyncAdvisoryLock(get_async_engine, "a", token=True).acquire(), AsyncFencedHeld)
    assert_type(await AsyncOnce(async_engine, "a", cron="0 7 * * *").try_acquire(), AsyncSlot | None)
    assert_type(pgfence.AsyncElection(async_engine, "a").stand(), AsyncMember)
    assert_type(await claim(session, Job, Job.state == "new", limit=5), Sequence[Job])
    async with AsyncReadWriteLock(async_engine, "a").write.hold() as writing:
        await (await writing.downgrade()).release()
    async with AsyncLease(async_engine, "a", ttl=60).hold() as lease:
        assert_type(lease, AsyncHeldLease)
        async with lease.begin(AsyncSessionLocal) as writer:
            assert_type(writer, AsyncSession)
        async with lease.begin(async_engine, "b") as raw:
            assert_type(raw, AsyncConnection)
    async with fenced(session, "a", 1):
        assert_type(await fence(session, "a", 1), None)
    await fence(connection, "a", 1)


@AdvisoryLock(get_engine, "a:{n}").wrap()
def raises(n: int) -> str:
    return str(n)


@Lease(get_engine, "a:{n}", ttl=60).wrap()
def leases(n: int) -> str:
    return str(n)


@Lease(get_engine, "a:{n}", ttl=60).wrap(busy="skip")
def leases_or_skips(n: int) -> str:
    return str(n)


@AsyncLease(get_async_engine, "a:{n}", ttl=60).wrap(busy="skip")
async def leases_or_skips_async(n: int) -> str:
    return str(pgfence.current(AsyncHeldLease).token + n)


@AdvisoryLock(get_engine, "a:{n}").wrap(busy="skip", unreachable="skip")
def skips(n: int) -> str:
    return str(n)


@AsyncAdvisoryLock(get_async_engine, "a:{n}").wrap(busy="skip")
async def skips_async(n: int) -> str:
    return str(n)


@Once(get_engine, "a", cron="0 7 * * *").wrap()
def once(n: int) -> str:
    return str(n)


def over(error: SlotOverError) -> None:
    assert_type(error.slot, datetime)


def when_to_ask(error: IdempotencyInProgressError, lost: AttemptLostError) -> None:
    assert_type(error.ended_with, str | None)
    assert_type(error.retry_after, float | None)
    assert_type(lost.retry_after, float | None)


@in_transaction(AsyncSessionLocal, attempts=3)
async def withdraw(session: AsyncSession, account_id: int) -> int:
    return (await session.get_one(Account, account_id)).balance


async def read(session: AsyncSession) -> int:
    return (await session.get_one(Account, 1)).balance


async def calls() -> None:
    assert_type(once(1), str | None)
    assert_type(raises(1), str)
    assert_type(skips(1), str | None)
    assert_type(await skips_async(1), str | None)
    assert_type(leases(1), str)
    assert_type(leases_or_skips(1), str | None)
    assert_type(await leases_or_skips_async(1), str | None)
    assert_type(await withdraw(1), int)
    assert_type(await run_transaction(AsyncSessionLocal, read), int)


class Receipt(NamedTuple):
    number: int


def charge_sync() -> Receipt:
    return Receipt(1)


async def charge() -> Receipt:
    return Receipt(1)


def step(attempt: Attempt) -> Receipt:
    assert_type(attempt.step("charge", len), int)
    assert_type(attempt.number, int)
    return Receipt(1)


async def derived(key: str) -> int:
    return len(key)


async def step_async(attempt: AsyncAttempt) -> Receipt:
    assert_type(await attempt.step("charge", derived), int)
    return Receipt(1)


@idempotent_call(key="{event_id}", scope="webhook")
def webhook(session: Session, event_id: str) -> Receipt:
    return Receipt(len(event_id))


@idempotent_call(key="{event_id}", scope="webhook", record=[ValueError])
async def webhook_async(session: AsyncSession, event_id: str) -> Receipt:
    return Receipt(len(event_id))


def keyed(session: Session, page: Page) -> None:
    assert_type(idempotent(session, "k", scope="a", result=Receipt).run(charge_sync), Receipt)
    with idempotent(session, "k", scope="a", result=Receipt) as op:
        assert_type(op, Op[Receipt])
        assert_type(op.replayed, bool)
        assert_type(op.result, Receipt)
    with idempotent(session, "k", scope="s", result=int, timeout=0) as number:
        assert_type(number.result, int)
    assert_type(webhook(session, "e"), Receipt)
    assert_type(insert_once(session, page, [Page.id]), Page)
    assert_type(insert_once(session, Job(id=1), key=["id"]), Job)
    assert_type(IdempotentEffect(get_engine, "k", scope="a", result=Receipt).run(step), Receipt)


async def keyed_async(session: AsyncSession, page: Page) -> None:
    assert_type(await idempotent(session, "k", scope="a", result=Receipt).run(charge), Receipt)
    async with idempotent(session, "k", scope="s", result=int) as op:
        assert_type(op.result, int)
    assert_type(await webhook_async(session, "e"), Receipt)
    assert_type(await insert_once(session, page, ["id"]), Page)
    assert_type(await insert_once(session, Job(id=1), key=[Job.id]), Job)
    assert_type(await AsyncIdempotentEffect(get_async_engine, "k", scope="a", result=Receipt).run(step_async), Receipt)
