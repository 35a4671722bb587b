"""A request that needs a lock which another process holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from ledger import ACCOUNT, Account
from sqlalchemy.orm import Session
from web import app, get_session

from pgfence.testing import PgfenceHolds


@pytest.fixture
def client(session: Session) -> Iterator[TestClient]:
    session.add_all([Account(id=1, balance=100), Account(id=2, balance=0)])
    session.commit()
    app.dependency_overrides[get_session] = lambda: session
    yield TestClient(app)
    app.dependency_overrides.clear()


def test_transfer_from_a_locked_account_returns_423(
    client: TestClient, pgfence_holds: PgfenceHolds
) -> None:
    transfer = {"src": 1, "dst": 2, "amount": 5}
    with pgfence_holds(ACCOUNT(1)):  # held in another session
        assert client.post("/transfer", json=transfer).status_code == 423
    assert client.post("/transfer", json=transfer).status_code == 204
