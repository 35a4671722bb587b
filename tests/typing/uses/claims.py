"""What a checker infers for claims, and what it rejects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from app import Base, Job
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Mapped, Session, mapped_column, scoped_session
from typing_extensions import assert_type

from pgfence import Claimable, claim, extend_claim, finish_claim


class Task(Claimable, Base):
    __tablename__ = "task"
    id: Mapped[int] = mapped_column(primary_key=True)


def claimed(session: Session, scoped: scoped_session[Session]) -> None:
    assert_type(claim(session, Job, Job.state == "new", limit=5), Sequence[Job])
    assert_type(claim(scoped, Job, order_by=[Job.state, Job.id.desc()]), Sequence[Job])
    assert_type(claim(session, select(Job).where(Job.id > 1), limit=5), Sequence[Any])
    for job in claim(session, Job, Job.state == "new", Job.id > 7, order_by=Job.id, limit=10):
        job.state = "done"
    for task in claim(session, Task, Task.id > 7, order_by=Task.id, limit=10, ttl=60):
        assert_type(task, Task)
        assert_type(task.claim_token, int | None)
        assert_type(task.claimed_until, datetime | None)
        assert_type(task.claimed_by, str | None)
        extend_claim(scoped, task)
        extend_claim(session, task, ttl=timedelta(minutes=5))
        finish_claim(session, task)


async def claimed_async(session: AsyncSession, scoped: async_scoped_session[AsyncSession]) -> None:
    assert_type(await claim(session, Job, Job.state == "new", limit=5), Sequence[Job])
    assert_type(await claim(scoped, Job, Job.state == "new"), Sequence[Job])
    assert_type(await claim(session, select(Job), limit=5), Sequence[Any])
    for job in await claim(session, Job, Job.state == "new", order_by=Job.id, limit=10):
        job.state = "done"
    for task in await claim(session, Task, ttl=60):
        assert_type(task, Task)
        assert_type(await extend_claim(session, task), None)
        assert_type(await finish_claim(scoped, task), None)


def no_claim(session: Session) -> None:
    claim(session, Job, ttl=60)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportCallIssue]
    claim(session, select(Task), ttl=60)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    finish_claim(session, Job())  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    extend_claim(session, Task(), 60)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


async def no_claim_async(session: AsyncSession) -> None:
    claim(session, Job)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    finish_claim(session, Task())  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
