"""A webhook inbox on Flask, where each consumer processes each event once.

pip install "pgfence[cli,psycopg]" flask
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
pgfence install
flask --app webhook_inbox run

Create the tables `order_paid` and `mail` first, for example with `Base.metadata.create_all`.
"""

import hashlib
import hmac
import json
import math
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from flask import Flask, abort, request
from flask.typing import ResponseReturnValue
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgfence import PgfenceError, idempotent_call

SECRET = b"the shared secret from the sender's settings"
engine = create_engine("postgresql+psycopg://")  # reads PGHOST, PGDATABASE, ...
SessionLocal = sessionmaker(engine)


class Base(DeclarativeBase):
    pass


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
inbox = partial(
    idempotent_call,
    key="{event.id}",
    payload=["event"],
    keep=timedelta(days=30),
    timeout=5,
)


@inbox(scope="inbox:orders")
def mark_paid(session: Session, event: Paid) -> int:
    order = session.get_one(Order, event.order, with_for_update=True)
    order.paid += event.amount
    return order.paid


@inbox(scope="inbox:mails")
def write_mail(session: Session, event: Paid) -> None:
    text = f"We have received {event.amount} for order {event.order}."
    session.add(Mail(text=text))


@app.post("/webhooks/payments")
def receive() -> ResponseReturnValue:
    body = request.get_data()
    signature = request.headers.get("X-Signature", "").encode()
    if not hmac.compare_digest(sign(body), signature):
        abort(401)
    try:
        event = Paid(**json.loads(body))
    except (TypeError, ValueError):
        abort(400)
    for consume in (mark_paid, write_mail):
        with SessionLocal.begin() as session:
            consume(session, event)
    return "", 204  # after both commits


def sign(body: bytes) -> bytes:
    return hmac.new(SECRET, body, hashlib.sha256).hexdigest().encode()


@app.errorhandler(PgfenceError)
def reject(error: PgfenceError) -> ResponseReturnValue:
    app.logger.warning("%s", error)
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["Retry-After"] = f"{math.ceil(error.retry_after)}"
    return type(error).__name__, error.http_status, headers
