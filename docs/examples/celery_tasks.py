"""Celery tasks that run one at a time for each tenant."""

from __future__ import annotations

from celery import Celery, Task, current_task
from celery.signals import worker_process_init
from sqlalchemy import Engine, create_engine, delete
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

import pgfence
from pgfence import Fenced, HeldLease, Lease, LockTimeoutError

app = Celery("books")
engine = create_engine("postgresql+psycopg://")
SessionLocal = sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Entry(Fenced, Base):
    __tablename__ = "entry"
    id: Mapped[int] = mapped_column(primary_key=True)
    book: Mapped[str]

    @staticmethod
    def __fence_resource__(row: Entry) -> str:
        return f"close:{row.book}"


def get_engine() -> Engine:
    return engine


@worker_process_init.connect
def abandon_inherited_connections(**_: object) -> None:
    engine.dispose(close=False)


@app.task(bind=True, acks_late=True)
@Lease(get_engine, "close:{tenant_id}", ttl=60, max_hold=7200).wrap(busy="skip")
def close_books(self: Task, tenant_id: int) -> None:
    with pgfence.current(HeldLease).begin(SessionLocal) as session:
        session.add(Entry(book=str(tenant_id)))


def requeue(error: LockTimeoutError) -> BaseException:
    return current_task.retry(exc=error, countdown=30)


@app.task(acks_late=True, reject_on_worker_lost=True, max_retries=None)
@Lease(get_engine, "close:{tenant_id}", ttl=60).wrap(busy=requeue)
def reopen_books(tenant_id: int) -> int:
    with pgfence.current(HeldLease).begin(SessionLocal) as session:
        session.execute(delete(Entry).where(Entry.book == str(tenant_id)))
    return tenant_id
