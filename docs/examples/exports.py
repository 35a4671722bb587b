"""An export whose lease is acquired in the API and released in a Celery worker."""

from __future__ import annotations

from celery import Celery
from celery.signals import worker_process_init
from fastapi import FastAPI, HTTPException
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import sessionmaker

from pgfence import AsyncLease, Lease, LeaseRef

app = FastAPI()
queue = Celery("exports")
engine = create_engine("postgresql+psycopg://")
SessionLocal = sessionmaker(engine)


@app.post("/exports/{user_id}", status_code=202)
def start(user_id: int) -> None:
    held = Lease(engine, f"export:{user_id}", ttl=300).try_acquire()
    if held is None:
        raise HTTPException(409, "an export is already queued or running")
    ref = held.hand_over()
    try:
        export.delay(ref)
    except Exception:  # probably not queued, so do not block the next request
        Lease.adopt(engine, ref).release()
        raise


@queue.task()
def export(ref: LeaseRef) -> None:
    with Lease.adopt(engine, ref) as lease:
        with lease.begin(SessionLocal) as session:
            session.execute(text("SELECT 1"))  # your work, in a fenced transaction


@worker_process_init.connect
def abandon_inherited_connections(**_: object) -> None:
    engine.dispose(close=False)


async def export_in_asyncio(ref: LeaseRef) -> None:
    async_engine = create_async_engine("postgresql+asyncpg://")
    async with await AsyncLease.adopt(async_engine, ref) as lease:
        lease.check()  # your work
    await async_engine.dispose()
