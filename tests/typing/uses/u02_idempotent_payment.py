"""2 FastAPI async, idempotent payment."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, mapped_column

from app import AsyncSessionLocal, Base, async_engine
from pgfence import PgfenceError, idempotent


class Payment(Base):
    __tablename__ = "payment"
    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int]
    amount: Mapped[Decimal]


class PayIn(BaseModel):
    amount: Decimal


class PayOut(BaseModel):
    id: int
    amount: Decimal


async def session() -> AsyncIterator[AsyncSession]:
    async with AsyncSessionLocal.begin() as opened:
        yield opened


def user(request: Request) -> int:
    return int(request.headers["x-user"])


def key(idempotency_key: Annotated[str, Header()]) -> str:
    return idempotency_key.strip('"')  # the header is a quoted string; many clients leave the quotes away


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    yield
    await async_engine.dispose()


app = FastAPI(lifespan=lifespan)


@app.post("/payments", status_code=201)
async def pay(
    body: PayIn,
    user: Annotated[int, Depends(user)],
    key: Annotated[str, Depends(key)],
    session: Annotated[AsyncSession, Depends(session, scope="function")],
) -> PayOut:
    async def charge() -> PayOut:
        payment = Payment(user_id=user, amount=body.amount)
        session.add(payment)
        await session.flush()
        return PayOut(id=payment.id, amount=payment.amount)

    try:
        once = idempotent(session, key, scope=f"pay:{user}", payload=body, result=PayOut)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    return await once.run(charge)


@app.exception_handler(PgfenceError)
def refused(request: Request, error: PgfenceError) -> JSONResponse:
    again = {} if error.retry_after is None else {"Retry-After": f"{error.retry_after:.0f}"}
    return JSONResponse({"detail": type(error).__name__}, error.http_status, again)
