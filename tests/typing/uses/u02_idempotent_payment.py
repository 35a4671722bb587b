"""2 FastAPI async, idempotent payment; the same for code outside of a request and for the outside world."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Annotated

from fastapi import Depends, FastAPI, Request
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Mapped, Session, mapped_column
from starlette.datastructures import Headers

from app import Account, AsyncSessionLocal, Base, async_engine, engine, get_session
from pgfence import Attempt, IdempotentEffect, idempotent, idempotent_call, insert_once
from pgfence.asgi import App, IdempotencyMiddleware, Receive, Scope, Send
from pgfence.fastapi import Locked, idempotency_key, install_error_handlers


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


async def get_async_session() -> AsyncIterator[AsyncSession]:
    async with AsyncSessionLocal.begin() as opened:
        yield opened


def get_user(request: Request) -> int:
    return int(request.headers["x-user"])


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    yield
    await async_engine.dispose()


app = FastAPI(lifespan=lifespan)
install_error_handlers(app)


@app.post("/payments", status_code=201)
async def pay(
    body: PayIn,
    user: Annotated[int, Depends(get_user)],
    key: Annotated[str, Depends(idempotency_key)],
    session: Annotated[AsyncSession, Depends(get_async_session, scope="function")],
) -> PayOut:
    async def charge() -> PayOut:
        payment = Payment(user_id=user, amount=body.amount)
        session.add(payment)
        await session.flush()
        return PayOut(id=payment.id, amount=payment.amount)

    return await idempotent(session, key, scope=f"pay:{user}", payload=body, result=PayOut).run(charge)


@app.delete(
    "/accounts/{account_id}",
    dependencies=[Depends(get_user), Depends(Locked("account:{account_id}", session=get_session), scope="function")],
)
def close(account_id: int, session: Annotated[Session, Depends(get_session, scope="function")]) -> None:
    session.delete(session.get_one(Account, account_id))


class Authentication:
    """Stands for whatever knows who asks."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["user"] = Headers(scope=scope).get("x-user")
        await self.app(scope, receive, send)


def principal(scope: Scope) -> str | None:
    user: str | None = scope["state"]["user"]
    return user


app.add_middleware(IdempotencyMiddleware, engine=async_engine, principal=principal, routes=["/refunds"])
app.add_middleware(Authentication)  # added last, it runs first


@app.post("/refunds", status_code=201)
def refund(
    body: PayIn,
    user: Annotated[int, Depends(get_user)],
    session: Annotated[Session, Depends(get_session, scope="function")],
) -> PayOut:
    payment = Payment(user_id=user, amount=-body.amount)
    session.add(payment)
    session.flush()
    return PayOut(id=payment.id, amount=payment.amount)


def guarded_block(session: Session, key: str) -> int:
    with idempotent(session, key, scope="import", result=int) as op:
        if op.replayed:
            return op.result
        op.complete(7)
        return 7


@idempotent_call(key="{event_id}", scope="webhook:orders", payload=["amount"])
def webhook(session: Session, event_id: str, amount: int) -> bool:
    session.add(Payment(user_id=0, amount=amount))
    return True


def once_per_row(session: Session, number: int) -> Payment:
    return insert_once(session, Payment(id=number, user_id=1, amount=1), key=[Payment.id])


def provider_charge(idempotency_key: str) -> str:
    return f"charged under {idempotency_key}"


def charge_outside(user: int, key: str) -> str:
    def work(attempt: Attempt) -> str:
        return attempt.step("charge", lambda key: provider_charge(f"{user}:{key}"))

    return IdempotentEffect(engine, key, scope=f"orders:{user}", result=str).run(work)
