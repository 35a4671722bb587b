"""A small ledger: the application whose tests the documentation shows."""

from __future__ import annotations

from sqlalchemy import Engine, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from pgfence import Lease, LockKey, TransactionLock, Versioned, idempotent

ACCOUNT = LockKey.family("account")


class Base(DeclarativeBase):
    pass


class Account(Versioned, Base):
    __tablename__ = "account"

    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


class Closing(Base):
    __tablename__ = "closing"

    id: Mapped[int] = mapped_column(primary_key=True)
    month: Mapped[str]


def transfer(session: Session, source: int, target: int, amount: int) -> None:
    TransactionLock(session, ACCOUNT(source), ACCOUNT(target)).acquire(timeout=1)
    session.get_one(Account, source).balance -= amount
    session.get_one(Account, target).balance += amount


def pay(session: Session, key: str, amount: int, *, timeout: float = 5) -> str:
    """Move an amount from account 1 to account 2, once for each key."""

    def work() -> str:
        transfer(session, 1, 2, amount)
        return "paid"

    once = idempotent(session, key, scope="pay", result=str, timeout=timeout)
    return once.run(work)


def close_month(engine: Engine, month: str) -> bool:
    lease = Lease(engine, f"close:{month}", ttl=30).try_acquire()
    if lease is None:
        return False  # another process is closing it
    with lease, lease.begin(engine) as connection:
        connection.execute(insert(Closing).values(month=month))
    return True
