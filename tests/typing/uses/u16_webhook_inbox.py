"""16 A webhook's inbox: each consumer takes each event once."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from flask import Flask, abort, request
from flask.typing import ResponseReturnValue
from sqlalchemy.orm import Mapped, Session, mapped_column

from app import Base, SessionLocal
from pgfence import PgfenceError, idempotent_call

SECRET = b"what the sender's settings say"


class Order(Base):
    __tablename__ = "order_paid"
    id: Mapped[int] = mapped_column(primary_key=True)
    paid: Mapped[int] = mapped_column(default=0)


class Mail(Base):
    __tablename__ = "mail"
    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


@dataclass(frozen=True)
class Paid:
    id: str
    order: int
    amount: int

    def __post_init__(self) -> None:
        if type(self.id) is not str or not 0 < len(self.id) <= 255:
            raise ValueError(f"an event needs an id: {self!r}")


app = Flask(__name__)
inbox = partial(idempotent_call, key="{event.id}", payload=["event"], keep=timedelta(days=30), timeout=5)


@inbox(scope="inbox:orders")
def mark_paid(session: Session, event: Paid) -> int:
    order = session.get_one(Order, event.order, with_for_update=True)
    order.paid += event.amount
    return order.paid


@inbox(scope="inbox:mails")
def write_mail(session: Session, event: Paid) -> None:
    session.add(Mail(text=f"We have received {event.amount} for order {event.order}."))


@app.post("/webhooks/payments")
def take() -> ResponseReturnValue:
    body = request.get_data()
    if not hmac.compare_digest(sign(body), request.headers.get("X-Signature", "").encode()):
        abort(401)
    try:
        event = Paid(**json.loads(body))
    except (TypeError, ValueError):
        abort(400)
    for consume in (mark_paid, write_mail):
        with SessionLocal.begin() as session:
            consume(session, event)
    return "", 204


def sign(body: bytes) -> bytes:
    return hmac.new(SECRET, body, hashlib.sha256).hexdigest().encode()


@app.errorhandler(PgfenceError)
def refused(error: PgfenceError) -> ResponseReturnValue:
    again = {} if error.retry_after is None else {"Retry-After": f"{math.ceil(error.retry_after)}"}
    return type(error).__name__, error.http_status, again
