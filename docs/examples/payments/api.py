"""A payments API that charges each order once, even if clients retry and processes die.

pip install "pgfence[fastapi,psycopg]" uvicorn
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
export PROVIDER=http://127.0.0.1:8001
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
TTL = 30.0  # seconds until another process can take over from a dead one
engine = create_engine("postgresql+psycopg://")  # reads PGHOST, PGDATABASE, ...
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
    """The provider declined the charge. This is the result of the request."""


class ProviderUnavailable(Exception):
    """The provider sent no usable response. Retrying with the same key is safe."""


class AmountMismatch(Exception):
    """The key has expired, but its order exists with a different amount."""


def get_session() -> Iterator[Session]:
    with SessionLocal.begin() as session:
        yield session


def get_customer(x_customer: Annotated[int, Header(gt=0, lt=2**31)]) -> int:
    return x_customer  # replace this with your authentication


def get_principal(customer: Annotated[int, Depends(get_customer)]) -> str:
    return str(customer)


SessionDep = Annotated[Session, Depends(get_session, scope="function")]
Customer = Annotated[int, Depends(get_customer)]
Key = Annotated[str, Depends(idempotency_key)]
OrderId = Annotated[int, Path(gt=0, lt=2**31)]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
    # Each process runs this when it starts. Only one at a time creates the tables.
    with TransactionLock.begin(engine, "payments:tables") as connection:
        Base.metadata.create_all(connection)
        schema.create_all(connection)
    yield
    engine.dispose()


app = FastAPI(title="Payments", lifespan=lifespan)
install_error_handlers(app)


@app.exception_handler(RequestValidationError)
async def reject_invalid(
    request: object, error: RequestValidationError
) -> JSONResponse:
    # FastAPI's default handler echoes the input, and fails if it is NaN or not text.
    errors = [{"loc": one["loc"], "msg": one["msg"]} for one in error.errors()]
    return JSONResponse({"detail": errors}, 422)


# ---------------------------------------------------- an effect outside the database


@app.post("/orders", status_code=201)
def place_order(body: NewOrder, customer: Customer, key: Key) -> OrderOut:
    def work(attempt: Attempt) -> OrderOut:
        order, charge = attempt.step(
            "order", lambda key: write_order(key, customer, body.amount)
        )
        if charge is None:
            charge = attempt.step(
                "charge",
                lambda key: charge_card(f"{customer}:{key}", order, body.amount),
            )
        return settle_order(attempt, order, charge)

    effect = IdempotentEffect(
        engine,
        key,
        scope=f"order:{customer}",
        payload=body,
        result=OrderOut,
        ttl=TTL,
        record=[Declined],
        free=[ProviderUnavailable, AmountMismatch],
    )
    try:
        return effect.run(work)
    except Declined as error:
        raise HTTPException(402, str(error)) from error
    except AmountMismatch as error:
        raise HTTPException(422, "this key has an order for another amount") from error
    except ProviderUnavailable as error:
        detail = "the payment provider is unavailable"
        raise HTTPException(503, detail, {"Retry-After": "1"}) from error


def write_order(key: str, customer: int, amount: int) -> tuple[int, str | None]:
    new = Order(customer=customer, request=key, amount=amount)
    with SessionLocal.begin() as session:
        order = insert_once(session, new, key=[Order.customer, Order.request])
        if order.amount != amount:
            raise AmountMismatch
        return order.id, order.charge


def charge_card(key: str, order: int, amount: int) -> str:
    request = Request(
        f"{PROVIDER}/charges",
        json.dumps({"order": order, "amount": amount}).encode(),
        {"Content-Type": "application/json", "Idempotency-Key": key},
    )
    try:
        with urlopen(request, timeout=10) as response:
            return Charge.model_validate_json(response.read()).id
    except HTTPError as error:
        if error.code == 402:
            raise Declined("the card was declined") from error
        raise ProviderUnavailable from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        # The connection was lost or timed out, or a proxy sent an error page.
        raise ProviderUnavailable from error


def settle_order(attempt: Attempt, order: int, charge: str) -> OrderOut:
    with SessionLocal.begin() as session:
        row = session.get_one(Order, order)
        row.charge = charge
        out = OrderOut(id=row.id, amount=row.amount, charge=charge)
        attempt.complete(session, out)  # one commit for the row and the result
    return out


# ---------------------------------------------------- an effect in the database


voucher_key = Idempotent(
    session=get_session, principal=get_principal, result=VoucherOut
)
VoucherCall = Annotated[
    IdempotentCall[VoucherOut], Depends(voucher_key, scope="function")
]


@app.post("/vouchers", status_code=201)
def issue_voucher(
    body: NewOrder, customer: Customer, session: SessionDep, call: VoucherCall
) -> VoucherOut:
    def work() -> VoucherOut:
        voucher = Voucher(customer=customer, amount=body.amount)
        session.add(voucher)
        session.flush()
        return VoucherOut(id=voucher.id)

    return call.run(work)


# ---------------------------------------------------- one request at a time


order_lock = Locked("order:{order_id}", session=get_session, timeout=2)


@app.post(
    "/orders/{order_id}/shipment",
    dependencies=[Depends(get_customer), Depends(order_lock, scope="function")],
)
def ship_order(order_id: OrderId, customer: Customer, session: SessionDep) -> bool:
    """Return whether this request is the one that ships the order."""
    order = session.get(Order, order_id)
    if order is None or order.customer != customer:
        raise HTTPException(404)
    if order.charge is None:
        raise HTTPException(409, "the order is not paid")
    first = not order.shipped
    order.shipped = True
    return first
