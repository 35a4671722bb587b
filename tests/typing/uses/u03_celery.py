"""3 Celery task, unique per argument while running."""

from __future__ import annotations

from celery import Celery, Task, current_task
from celery.signals import worker_process_init
from sqlalchemy import delete

import pgfence
from app import SessionLocal, engine, get_engine
from guarded import Entry
from pgfence import HeldLease, Lease, LockTimeoutError

app = Celery("books")


@worker_process_init.connect
def leave_the_parents_connections(**_: object) -> None:
    engine.dispose(close=False)


@app.task(bind=True, acks_late=True)
@Lease(get_engine, "close:{tenant_id}", ttl=60, max_hold=7200).wrap(busy="skip")
def close_books(self: Task, tenant_id: int) -> None:
    with pgfence.current(HeldLease).begin(SessionLocal) as session:
        session.add(Entry(book=str(tenant_id)))


def again(busy: LockTimeoutError) -> BaseException:
    return current_task.retry(exc=busy, countdown=30)


@app.task(acks_late=True, reject_on_worker_lost=True, max_retries=None)
@Lease(get_engine, "close:{tenant_id}", ttl=60).wrap(busy=again)
def reopen_books(tenant_id: int) -> int:
    with pgfence.current(HeldLease).begin(SessionLocal) as session:
        session.execute(delete(Entry).where(Entry.book == str(tenant_id)))
    return tenant_id


def by_hand() -> None:
    skipped: None = close_books(7)
    value: int = reopen_books(7)
    print(skipped, value)
    close_books.delay(7)
