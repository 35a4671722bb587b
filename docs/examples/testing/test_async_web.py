"""Requests to an async application, in a session that is rolled back."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest
from async_web import app, get_session
from ledger import ACCOUNT, Account
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from pgfence.testing import PgfenceHolds


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def async_engine(engine: Engine, pgfence_server: str) -> AsyncEngine:
    url = pgfence_server.replace("+psycopg", "+asyncpg")
    return create_async_engine(url, poolclass=NullPool)


@pytest.fixture
async def async_session(async_engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with async_engine.connect() as connection:
        outer = await connection.begin()
        async with AsyncSession(
            connection, join_transaction_mode="create_savepoint"
        ) as session:
            yield session
        await outer.rollback()


@pytest.fixture
async def client(async_session: AsyncSession) -> AsyncIterator[httpx2.AsyncClient]:
    async_session.add_all([Account(id=1, balance=100), Account(id=2, balance=0)])
    await async_session.commit()
    app.dependency_overrides[get_session] = lambda: async_session
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
        yield http
    app.dependency_overrides.clear()


@pytest.mark.anyio
async def test_transfer_from_a_locked_account_returns_423(
    client: httpx2.AsyncClient,
    async_session: AsyncSession,
    pgfence_holds: PgfenceHolds,
) -> None:
    transfer = {"src": 1, "dst": 2, "amount": 5}
    with pgfence_holds(ACCOUNT(1)):  # held in another session
        locked = await client.post("/transfer", json=transfer)
    assert locked.status_code == 423
    done = await client.post("/transfer", json=transfer)
    assert done.status_code == 204
    account = await async_session.get_one(Account, 2)
    assert account.balance == 5
