"""A sync version of fastapi_transfer.py, and a job that takes the same lock.

pip install "pgfence[fastapi,psycopg]" uvicorn
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
uvicorn fastapi_transfer_sync:app
"""

from collections.abc import Iterator
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgfence import LockKey, TransactionLock
from pgfence.fastapi import install_error_handlers

engine = create_engine("postgresql+psycopg://")  # reads PGHOST, PGDATABASE, ...
SessionLocal = sessionmaker(engine)
ACCOUNT = LockKey.family("account")


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: Mapped[int] = mapped_column(primary_key=True)
    balance: Mapped[int]


class Transfer(BaseModel):
    src: int
    dst: int
    amount: int = Field(gt=0)


class Receipt(BaseModel):
    src_balance: int
    dst_balance: int


def get_session() -> Iterator[Session]:
    with SessionLocal.begin() as session:
        yield session


SessionDep = Annotated[Session, Depends(get_session, scope="function")]
app = FastAPI()
install_error_handlers(app)


@app.post("/transfer")
def transfer(t: Transfer, session: SessionDep) -> Receipt:
    TransactionLock(session, ACCOUNT(t.src), ACCOUNT(t.dst)).acquire(timeout=2)
    src, dst = session.get(Account, t.src), session.get(Account, t.dst)
    if src is None or dst is None:
        raise HTTPException(404)
    if src.balance < t.amount:
        raise HTTPException(409, "insufficient funds")
    src.balance -= t.amount
    dst.balance += t.amount
    return Receipt(src_balance=src.balance, dst_balance=dst.balance)


def nightly(src: int, dst: int) -> int:
    """Read a balance in a job. `begin` opens the transaction and locks both accounts."""
    accounts = ACCOUNT(src), ACCOUNT(dst)
    with TransactionLock.begin(SessionLocal, *accounts, timeout=2) as session:
        return session.get_one(Account, src).balance
