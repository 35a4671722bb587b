"""A payments API: each order is charged once, however often the client asks and whichever process dies on the way.

export PGHOST=... PGDATABASE=... PROVIDER=http://127.0.0.1:8001
uvicorn api:app --port 8000
"""

import http.client
import json
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fastapi import Depends, FastAPI, Header, HTTPException, Path
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from sqlalchemy import UniqueConstraint, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgfence import Attempt, IdempotentEffect, TransactionLock, insert_once, schema
from pgfence.fastapi import (
    Idempotent,
    IdempotentCall,
    Locked,
    idempotency_key,
    install_error_handlers,
)

PROVIDER = os.environ.get("PROVIDER", "http://127.0.0.1:8001")
TTL = 30.0  # seconds after which the request of a dead process is continued by another one
engine = create_engine("postgresql+psycopg://")
SessionLocal = sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "customer_order"
    __table_args__ = (UniqueConstraint("customer", "request"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]
    request: Mapped[str]
    amount: Mapped[int]
    charge: Mapped[str | None]
    shipped: Mapped[bool] = mapped_column(default=False)


class Voucher(Base):
    __tablename__ = "voucher"
    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[int]
    amount: Mapped[int]


class NewOrder(BaseModel):
    amount: int = Field(gt=0, le=1_000_000)


class OrderOut(NewOrder):
    id: int
    charge: str


class VoucherOut(BaseModel):
    id: int


class Charge(BaseModel):
    id: str


class Declined(Exception):
    """The provider has said no: that is an answer, and stays one."""


class Away(Exception):
    """The provider gave no answer, or none that makes sense. To ask it again under the same key is safe."""


class Different(Exception):
    """There is an order of this key, for another amount: it is older than what is remembered of keys."""


# ------------------------------------------------------------------ who asks, and in which transaction


def get_session() -> Iterator[Session]:
    with SessionLocal.begin() as session:
        yield session


def get_customer(x_customer: Annotated[int, Header(gt=0, lt=2**31)]) -> int:
    return x_customer  # stands for whatever authenticates


def principal(customer: Annotated[int, Depends(get_customer)]) -> str:
    return str(customer)


SessionDep = Annotated[Session, Depends(get_session, scope="function")]
Customer = Annotated[int, Depends(get_customer)]
Key = Annotated[str, Depends(idempotency_key)]
OrderId = Annotated[int, Path(gt=0, lt=2**31)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    with TransactionLock.begin(
        engine, "payments:tables"
    ) as connection:  # every process does this at its start
        Base.metadata.create_all(connection)
        schema.create_all(connection)
    yield
    engine.dispose()


app = FastAPI(title="Payments", lifespan=lifespan)
install_error_handlers(app)


@app.exception_handler(RequestValidationError)
async def invalid(request: object, error: RequestValidationError) -> JSONResponse:
    # FastAPI's own answer repeats what it got, and fails where that is NaN or no text.
    return JSONResponse(
        {"detail": [{"loc": one["loc"], "msg": one["msg"]} for one in error.errors()]},
        422,
    )


# ------------------------------------------------------------------ an effect outside of the database


@app.post("/orders", status_code=201)
def place(body: NewOrder, customer: Customer, key: Key) -> OrderOut:
    def work(attempt: Attempt) -> OrderOut:
        order, paid = attempt.step(
            "order", lambda key: write(key, customer, body.amount)
        )
        charge = paid or attempt.step(
            "charge", lambda key: ask_provider(f"{customer}:{key}", order, body.amount)
        )
        return settle(attempt, order, charge)

    effect = IdempotentEffect(
        engine,
        key,
        scope=f"order:{customer}",
        payload=body,
        result=OrderOut,
        ttl=TTL,
        record=[Declined],
        free=[Away, Different],
    )
    try:
        return effect.run(work)
    except Declined as error:
        raise HTTPException(402, str(error)) from error
    except Different as error:
        raise HTTPException(
            422, "there is an order of this key, for another amount"
        ) from error
    except Away as error:
        raise HTTPException(
            503, "the payment provider is away", {"Retry-After": "1"}
        ) from error


def write(key: str, customer: int, amount: int) -> tuple[int, str | None]:
    new = Order(customer=customer, request=key, amount=amount)
    with SessionLocal.begin() as session:
        order = insert_once(session, new, key=[Order.customer, Order.request])
        if order.amount != amount:
            raise Different
        return order.id, order.charge


def ask_provider(key: str, order: int, amount: int) -> str:
    headers = {"Content-Type": "application/json", "Idempotency-Key": key}
    asked = Request(
        f"{PROVIDER}/charges",
        json.dumps({"order": order, "amount": amount}).encode(),
        headers,
    )
    try:
        with urlopen(asked, timeout=10) as answer:
            return Charge.model_validate_json(answer.read()).id
    except HTTPError as error:
        if error.code == 402:
            raise Declined("the card was declined") from error
        raise Away from error
    except (
        OSError,
        http.client.HTTPException,
        ValueError,
    ) as error:  # a cut connection, a timeout, a proxy's page
        raise Away from error


def settle(attempt: Attempt, order: int, charge: str) -> OrderOut:
    with SessionLocal.begin() as session:
        row = session.get_one(Order, order)
        row.charge = charge
        out = OrderOut(id=row.id, amount=row.amount, charge=charge)
        attempt.complete(session, out)  # the row and the end of the key are one commit
    return out


# ------------------------------------------------------------------ an effect in the database


voucher_key = Idempotent(session=get_session, principal=principal, result=VoucherOut)


@app.post("/vouchers", status_code=201)
def give_voucher(
    body: NewOrder,
    customer: Customer,
    session: SessionDep,
    call: Annotated[IdempotentCall[VoucherOut], Depends(voucher_key, scope="function")],
) -> VoucherOut:
    def work() -> VoucherOut:
        voucher = Voucher(customer=customer, amount=body.amount)
        session.add(voucher)
        session.flush()
        return VoucherOut(id=voucher.id)

    return call.run(work)


# ------------------------------------------------------------------ one at a time


order_lock = Locked("order:{order_id}", session=get_session, timeout=2)


@app.post(
    "/orders/{order_id}/shipment",
    dependencies=[Depends(get_customer), Depends(order_lock, scope="function")],
)
def ship(order_id: OrderId, customer: Customer, session: SessionDep) -> bool:
    """Say whether this request is the one that ships the order."""
    order = session.get(Order, order_id)
    if order is None or order.customer != customer:
        raise HTTPException(404)
    if order.charge is None:
        raise HTTPException(409, "the order is not paid")
    first = not order.shipped
    order.shipped = True
    return first
