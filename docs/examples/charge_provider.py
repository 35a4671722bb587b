"""Charge an order once at a payment provider, step by step, sync and async.

pip install "pgfence[cli,psycopg,asyncpg]"
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
pgfence install

Create the table `charged_payment` first, for example with `Base.metadata.create_all`.
"""

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from pgfence import AsyncAttempt, AsyncIdempotentEffect, Attempt, IdempotentEffect

engine = create_engine("postgresql+psycopg://")  # reads PGHOST, PGDATABASE, ...
async_engine = create_async_engine("postgresql+asyncpg://")


class Base(DeclarativeBase):
    pass


class Payment(Base):
    __tablename__ = "charged_payment"
    order: Mapped[str] = mapped_column(primary_key=True)
    receipt: Mapped[str]


class CardDeclined(Exception):
    pass


class Provider:
    """Replace this with the client of your payment provider."""

    def __init__(self) -> None:
        self.receipts: dict[str, str] = {}
        self.requests: list[str] = []

    def charge(self, amount: int, idempotency_key: str) -> str:
        self.requests.append(idempotency_key)
        if amount > 1000:
            raise CardDeclined(amount)
        receipt = f"receipt {len(self.receipts) + 1}"
        return self.receipts.setdefault(idempotency_key, receipt)

    def send_mail(self, receipt: str, idempotency_key: str) -> None:
        self.requests.append(idempotency_key)


provider = Provider()


def checkout(order: str, amount: int) -> str:
    def work(attempt: Attempt) -> str:
        receipt = attempt.step(
            "charge", lambda key: provider.charge(amount, idempotency_key=key)
        )
        attempt.step(
            "mail", lambda key: provider.send_mail(receipt, idempotency_key=key)
        )
        with Session(engine) as session, session.begin():
            session.add(Payment(order=order, receipt=receipt))
            attempt.complete(session, receipt)  # last, before the COMMIT
        return receipt

    effect = IdempotentEffect(
        engine,
        order,  # the key
        scope="checkout",
        payload=amount,
        result=str,
        record=[CardDeclined],
        free=[ConnectionRefusedError],
    )
    return effect.run(work)


async def charge_async(order: str, amount: int) -> str:
    async def charge(key: str) -> str:
        return provider.charge(amount, idempotency_key=key)

    async def work(attempt: AsyncAttempt) -> str:
        return await attempt.step("charge", charge)

    effect = AsyncIdempotentEffect(async_engine, order, scope="async", result=str)
    return await effect.run(work)
