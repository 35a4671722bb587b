"""Transfers between accounts: FastAPI, an AsyncSession and one lock for two accounts.

pip install "pgfence[fastapi,asyncpg]" uvicorn
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
uvicorn fastapi_transfer:app

Create the table `account` first, for example with `Base.metadata.create_all`.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import AsyncTransactionLock, LockKey
from pgfence.fastapi import Locked, install_error_handlers

engine = create_async_engine("postgresql+asyncpg://")  # reads PGHOST, PGDATABASE, ...
Sessions = async_sessionmaker(engine)
ACCOUNT = LockKey.family("account")  # ACCOUNT(7) is the key of the lock "account:7"


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


async def get_session() -> AsyncIterator[AsyncSession]:
    async with Sessions.begin() as session:
        yield session


def get_user(x_user: Annotated[int, Header()]) -> int:
    return x_user  # replace this with your authentication


SessionDep = Annotated[AsyncSession, Depends(get_session, scope="function")]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)
install_error_handlers(app)


@app.post("/transfer", dependencies=[Depends(get_user)])
async def transfer(t: Transfer, session: SessionDep) -> Receipt:
    await AsyncTransactionLock(session, ACCOUNT(t.src), ACCOUNT(t.dst)).acquire(
        timeout=2
    )
    src, dst = await session.get(Account, t.src), await session.get(Account, t.dst)
    if src is None or dst is None:
        raise HTTPException(404)
    if src.balance < t.amount:
        raise HTTPException(409, "insufficient funds")
    src.balance -= t.amount
    dst.balance += t.amount
    return Receipt(src_balance=src.balance, dst_balance=dst.balance)


account_lock = Locked("account:{account_id}", session=get_session, timeout=2)


@app.delete(
    "/accounts/{account_id}",
    dependencies=[Depends(get_user), Depends(account_lock, scope="function")],
)
async def close(account_id: int, session: SessionDep) -> None:
    account = await session.get(Account, account_id)
    if account is None:
        raise HTTPException(404)
    if account.balance:
        raise HTTPException(409, "the account is not empty")
    await session.delete(account)
