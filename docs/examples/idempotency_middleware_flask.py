"""The Idempotency-Key header on Flask, for endpoints that contain no code for it.

pip install "pgfence[cli,psycopg]" flask
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
pgfence install
flask --app idempotency_middleware_flask run

Create the table `refund` first, for example with `Base.metadata.create_all`.
"""

from flask import Flask, request
from flask.typing import ResponseReturnValue
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from pgfence.wsgi import IdempotencyMiddleware

engine = create_engine("postgresql+psycopg://")  # reads PGHOST, PGDATABASE, ...
SessionLocal = sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Refund(Base):
    __tablename__ = "refund"
    id: Mapped[int] = mapped_column(primary_key=True)
    payment: Mapped[int]


app = Flask(__name__)


@app.post("/refunds")
def refund() -> ResponseReturnValue:
    with SessionLocal.begin() as session:
        row = Refund(payment=request.json["payment"])
        session.add(row)
        session.flush()
        return {"refund": row.id}, 201


app.wsgi_app = IdempotencyMiddleware(  # type: ignore[method-assign]
    app.wsgi_app, engine, routes=["/refunds"]
)
