"""The ledger as an async web application."""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends, FastAPI
from ledger import ACCOUNT, Account
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from pgfence import AsyncTransactionLock
from pgfence.fastapi import install_error_handlers

Sessions = async_sessionmaker(create_async_engine("postgresql+asyncpg://"))


class Transfer(BaseModel):
    src: int
    dst: int
    amount: int


async def get_session() -> AsyncIterator[AsyncSession]:
    async with Sessions.begin() as session:
        yield session


SessionDep = Annotated[AsyncSession, Depends(get_session, scope="function")]
app = FastAPI()
install_error_handlers(app)


@app.post("/transfer", status_code=204)
async def post_transfer(t: Transfer, session: SessionDep) -> None:
    lock = AsyncTransactionLock(session, ACCOUNT(t.src), ACCOUNT(t.dst))
    await lock.acquire(timeout=1)
    (await session.get_one(Account, t.src)).balance -= t.amount
    (await session.get_one(Account, t.dst)).balance += t.amount
