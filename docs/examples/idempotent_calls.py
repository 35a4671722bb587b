"""Idempotency keys outside of a request, for a block, a function and a unique row."""

from decimal import Decimal

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgfence import idempotent, idempotent_call, insert_once

engine = create_engine("postgresql+psycopg://")  # reads PGHOST, PGDATABASE, ...
SessionLocal = sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "incoming_payment"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[Decimal]


def import_file(name: str) -> int:
    """Count the lines of a file once, and return the stored number in later calls."""
    with (
        SessionLocal.begin() as session,
        idempotent(session, name, scope="import", result=int) as op,
    ):
        if op.replayed:
            return op.result
        count = 7  # the work
        op.complete(count)
        return count


@idempotent_call(key="{event_id}", scope="webhook:orders", payload=["amount"])
def receive_payment(session: Session, event_id: str, amount: int) -> bool:
    session.add(Payment(amount=amount))
    return True


def receive_payment_by_number(session: Session, number: int, amount: int) -> Payment:
    """Insert the payment, or return the existing row with the same number."""
    return insert_once(session, Payment(id=number, amount=amount), key=[Payment.id])
