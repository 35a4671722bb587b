"""What checkers must infer, sync and async side by side."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session, scoped_session
from typing_extensions import assert_type

import pgfence
from app import AsyncSessionLocal, SessionLocal, async_engine, engine, get_async_engine, get_engine
from pgfence import (
    AdvisoryLock,
    AsyncAdvisoryLock,
    AsyncHeld,
    AsyncTransactionLock,
    Held,
    LockKey,
    TransactionLock,
    compat,
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
    with TransactionLock.begin(SessionLocal, "a") as opened:
        assert_type(opened, Session)
    with TransactionLock.begin(engine, "a") as plain:
        assert_type(plain, Connection)


async def asynchronous(session: AsyncSession, connection: AsyncConnection) -> None:
    assert_type(await AsyncAdvisoryLock(async_engine, "a").try_acquire(), AsyncHeld | None)
    assert_type(await AsyncAdvisoryLock(connection, "a", "b").acquire(timeout=1), AsyncHeld)
    assert_type(await AsyncAdvisoryLock(get_async_engine, "a").acquire(), AsyncHeld)
    assert_type(await AsyncTransactionLock(session, "a", shared=True).try_acquire(), bool)
    assert_type(await compat.hashtext_key(connection, "a"), LockKey)
    async with AsyncAdvisoryLock(async_engine, "a").hold() as held:
        assert_type(held, AsyncHeld)
        assert_type(pgfence.current(AsyncHeld), AsyncHeld)
    async with AsyncAdvisoryLock(async_engine, "a").connect() as conn:
        assert_type(conn, AsyncConnection)
        assert_type(pgfence.held(conn), AsyncHeld)
    async with AsyncTransactionLock.begin(AsyncSessionLocal, "a") as opened:
        assert_type(opened, AsyncSession)
    async with AsyncTransactionLock.begin(async_engine, "a") as plain:
        assert_type(plain, AsyncConnection)


@AdvisoryLock(get_engine, "a:{n}").wrap()
def raises(n: int) -> str:
    return str(n)


@AdvisoryLock(get_engine, "a:{n}").wrap(busy="skip", unreachable="skip")
def skips(n: int) -> str:
    return str(n)


@AsyncAdvisoryLock(get_async_engine, "a:{n}").wrap(busy="skip")
async def skips_async(n: int) -> str:
    return str(n)


async def calls() -> None:
    assert_type(raises(1), str)
    assert_type(skips(1), str | None)
    assert_type(await skips_async(1), str | None)
