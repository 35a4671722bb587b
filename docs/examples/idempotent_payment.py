"""A payment that is made once, however often the client sends the request.

pip install "pgfence[cli,fastapi,asyncpg,psycopg]" uvicorn
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
pgfence install
uvicorn idempotent_payment:app

Create the table `payment` first, for example with `Base.metadata.create_all`.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Annotated

from fastapi import Depends, FastAPI, Header
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import idempotent
from pgfence.fastapi import idempotency_key, install_error_handlers

engine = create_async_engine("postgresql+asyncpg://")  # reads PGHOST, PGDATABASE, ...
Sessions = async_sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "payment"
    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int]
    amount: Mapped[Decimal]


class PayIn(BaseModel):
    amount: Decimal = Field(gt=0)


class PayOut(BaseModel):
    id: int
    amount: Decimal


async def get_session() -> AsyncIterator[AsyncSession]:
    async with Sessions.begin() as session:
        yield session


def get_user(x_user: Annotated[int, Header()]) -> int:
    return x_user  # replace this with your authentication


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)
install_error_handlers(app)


@app.post("/payments", status_code=201)
async def pay(
    body: PayIn,
    user: Annotated[int, Depends(get_user)],
    key: Annotated[str, Depends(idempotency_key)],
    session: Annotated[AsyncSession, Depends(get_session, scope="function")],
) -> PayOut:
    async def charge() -> PayOut:
        payment = Payment(user_id=user, amount=body.amount)
        session.add(payment)
        await session.flush()
        return PayOut(id=payment.id, amount=payment.amount)

    request = idempotent(
        session, key, scope=f"pay:{user}", payload=body, result=PayOut, timeout=5
    )
    return await request.run(charge)
