"""Tests of the ledger, each of which is rolled back."""

from __future__ import annotations

import pytest
from ledger import ACCOUNT, Account, Closing, close_month, pay, transfer
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from pgfence import TransactionLock


@pytest.fixture(autouse=True)
def accounts(session: Session) -> None:
    session.add_all([Account(id=1, balance=100), Account(id=2, balance=0)])
    session.commit()


def test_transfer_moves_money(session: Session) -> None:
    transfer(session, 1, 2, 30)
    session.commit()
    assert session.get_one(Account, 2).balance == 30


def test_each_test_starts_without_changes_of_the_others(session: Session) -> None:
    assert session.get_one(Account, 2).balance == 0


def test_transfer_holds_its_locks_until_the_end(
    session: Session, engine: Engine
) -> None:
    transfer(session, 1, 2, 30)
    with Session(engine) as other:
        assert not TransactionLock(other, ACCOUNT(1)).try_acquire()


def test_a_repeated_payment_is_paid_once(session: Session) -> None:
    assert pay(session, "k1", 30) == "paid"
    session.commit()
    assert pay(session, "k1", 30) == "paid"
    session.commit()
    assert session.get_one(Account, 2).balance == 30


def test_close_month_writes_one_row(engine: Engine) -> None:
    assert close_month(engine, "2026-04")
    with engine.connect() as connection:
        months = connection.scalars(select(Closing.month)).all()
    assert months == ["2026-04"]
