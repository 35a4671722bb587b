"""15 Acquired in the API, released in the worker."""

from __future__ import annotations

from celery import Celery
from celery.signals import worker_process_init
from fastapi import FastAPI, HTTPException

from app import SessionLocal, async_engine, engine
from pgfence import AsyncLease, Lease, LeaseRef

app = FastAPI()
queue = Celery("exports")


@worker_process_init.connect
def leave_the_parents_connections(**_: object) -> None:
    engine.dispose(close=False)


@queue.task()
def export(ref: LeaseRef) -> None:
    with Lease.adopt(engine, ref) as lease:
        with lease.begin(SessionLocal) as session:
            print(session, lease.token)


@app.post("/exports/{user_id}")
def start(user_id: int) -> None:
    held = Lease(engine, f"export:{user_id}", ttl=300).try_acquire()
    if held is None:
        raise HTTPException(409)
    export.delay(held.hand_over())


async def export_async(ref: LeaseRef) -> None:
    async with await AsyncLease.adopt(async_engine, ref) as lease:
        lease.progress()
