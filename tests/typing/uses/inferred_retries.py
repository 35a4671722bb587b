"""What checkers must infer of retried transactions, and which mistakes they must report."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from typing_extensions import assert_type

from app import AsyncSessionLocal, SessionLocal, engine
from pgfence import Event, TransactionAttempt, VersionedSession, configure, in_transaction, run_transaction
from retry_transaction import deposit, pay_interest, withdraw


class OwnSession(AsyncSession):
    pass


Own = async_sessionmaker(class_=OwnSession, sync_session_class=VersionedSession)


async def count(session: AsyncSession) -> int:
    return 1


async def count_own(session: OwnSession) -> str:
    return "1"


async def calls() -> None:
    assert_type(run_transaction(SessionLocal, pay_interest), int)
    assert_type(run_transaction(SessionLocal, lambda session: session.get_bind().dialect.name), str)
    assert_type(await run_transaction(AsyncSessionLocal, count, attempts=2, timeout=1.5), int)
    assert_type(await run_transaction(Own, count_own), str)
    assert_type(withdraw(1, amount=5), int)
    assert_type(await deposit(1, amount=5), int)
    plain: Callable[[int], int] = in_transaction(SessionLocal, attempts=3)(with_number)
    awaited: Callable[[int], Coroutine[Any, Any, int]] = in_transaction(AsyncSessionLocal)(with_number_async)
    assert callable(plain)
    assert callable(awaited)


def with_number(session: Session, n: int) -> int:
    return n


async def with_number_async(session: AsyncSession, n: int) -> int:
    return n


def heard(event: Event) -> None:
    if isinstance(event, TransactionAttempt) and event.event == "retried":
        assert_type(event.attempt, int)
        assert_type(event.sqlstate, str | None)


configure(engine, on_event=heard)


def mistakes() -> None:
    withdraw(SessionLocal(), 1, amount=5)  # type: ignore[misc, arg-type]  # pyright: ignore[reportCallIssue]
    withdraw(1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    deposit(1, amount=5)  # type: ignore[unused-coroutine]  # pyright: ignore[reportUnusedCoroutine]
    run_transaction(SessionLocal(), pay_interest)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    run_transaction(AsyncSessionLocal, pay_interest)  # type: ignore[arg-type, unused-coroutine]  # pyright: ignore[reportArgumentType, reportCallIssue]
    run_transaction(SessionLocal, count)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]


def a_coroutine_never_awaited() -> None:
    run_transaction(SessionLocal, with_session)  # type: ignore[deprecated]  # pyright: ignore[reportDeprecated]


async def with_session(session: Session) -> int:
    return 1


@in_transaction(SessionLocal)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def without_a_session(n: int) -> int:
    return n


@in_transaction(AsyncSessionLocal)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
def not_awaited(session: AsyncSession) -> int:
    return 1
