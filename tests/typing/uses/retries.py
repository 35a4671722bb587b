"""8 Retries of whole transactions, sync and async."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from app import Account, AsyncSessionLocal, SessionLocal
from pgfence import in_transaction, run_transaction


def pay_interest(session: Session) -> int:
    account = session.get_one(Account, 1)
    account.balance += 1
    return account.balance


def nightly() -> int:
    return run_transaction(SessionLocal, pay_interest, attempts=10, timeout=timedelta(seconds=5))


@in_transaction(SessionLocal)
def withdraw(session: Session, account_id: int, *, amount: int) -> int:
    account = session.get_one(Account, account_id)
    account.balance -= amount
    return account.balance


@in_transaction(AsyncSessionLocal)
async def deposit(session: AsyncSession, account_id: int, *, amount: int) -> int:
    account = await session.get_one(Account, account_id)
    account.balance += amount
    return account.balance
