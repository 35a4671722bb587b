"""3 Celery task, unique per argument while running."""

from __future__ import annotations

import pgfence
from app import SessionLocal, get_engine
from guarded import Entry
from celery import Celery, Task, current_task
from pgfence import HeldLease, Lease

app = Celery("books")


@app.task(bind=True, acks_late=True)
@Lease(get_engine, "close:{tenant_id}", ttl=60, max_hold=7200).wrap(busy="skip")
def close_books(self: Task, tenant_id: int) -> None:
    with pgfence.current(HeldLease).begin(SessionLocal) as session:
        session.add(Entry(book=str(tenant_id)))


@app.task(acks_late=True)
@Lease(get_engine, "reopen:{tenant_id}", ttl=60).wrap(busy=lambda e: current_task.retry(countdown=30))
def reopen_books(tenant_id: int) -> int:
    return tenant_id


skipped: None = close_books(7)
value: int = reopen_books(7)
close_books.delay(7)
