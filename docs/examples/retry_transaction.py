"""Transactions that are retried as a whole, sync and async.

pip install "pgfence[psycopg,asyncpg]"
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
"""

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgfence import in_transaction, run_transaction

engine = create_engine("postgresql+psycopg://", isolation_level="SERIALIZABLE")
async_engine = create_async_engine(
    "postgresql+asyncpg://", isolation_level="SERIALIZABLE"
)
SessionLocal = sessionmaker(engine)
AsyncSessionLocal = async_sessionmaker(async_engine)


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


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


def pay_interest(session: Session) -> int:
    account = session.get_one(Account, 1)
    account.balance += 1
    return account.balance


def nightly() -> int:
    return run_transaction(SessionLocal, pay_interest, attempts=10, timeout=5)
