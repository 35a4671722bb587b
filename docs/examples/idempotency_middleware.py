"""The Idempotency-Key header on FastAPI, for endpoints that contain no code for it.

pip install "pgfence[cli,fastapi,asyncpg,psycopg]" uvicorn
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
pgfence install
uvicorn idempotency_middleware:app

Create the table `order_payment` first, for example with `Base.metadata.create_all`.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI
from pydantic import BaseModel, Field
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from starlette.datastructures import Headers

from pgfence.asgi import App, IdempotencyMiddleware, Receive, Scope, Send
from pgfence.fastapi import install_error_handlers

engine = create_async_engine("postgresql+asyncpg://")  # reads PGHOST, PGDATABASE, ...
Sessions = async_sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "order_payment"
    id: Mapped[int] = mapped_column(primary_key=True)
    order: Mapped[int]
    amount: Mapped[int]


class PayIn(BaseModel):
    amount: int = Field(gt=0)


class PayOut(BaseModel):
    id: int


async def get_session() -> AsyncIterator[AsyncSession]:
    async with Sessions.begin() as session:
        yield session


class Authentication:
    """Store the user in the scope. Replace this with your authentication."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            user = Headers(scope=scope).get("x-user")
            scope.setdefault("state", {})["user"] = user
        await self.app(scope, receive, send)


def get_principal(scope: Scope) -> str | None:
    user: str | None = scope["state"]["user"]
    return user


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)
install_error_handlers(app)
app.add_middleware(
    IdempotencyMiddleware,
    engine=engine,
    principal=get_principal,
    routes=["/orders/{order}/payments"],
)
app.add_middleware(Authentication)  # added last, so it runs first


@app.post("/orders/{order}/payments", status_code=201)
async def pay(
    order: int,
    body: PayIn,
    session: Annotated[AsyncSession, Depends(get_session, scope="function")],
) -> PayOut:
    payment = Payment(order=order, amount=body.amount)
    session.add(payment)
    await session.flush()
    return PayOut(id=payment.id)
