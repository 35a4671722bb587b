"""Locks that are held, lost or stale."""

from __future__ import annotations

import pytest
from elsewhere import held_elsewhere
from ledger import Account, close_month, pay
from sqlalchemy import Engine, create_engine, func, select, text
from sqlalchemy.orm import Session

from pgfence import (
    AdvisoryLock,
    IdempotencyInProgressError,
    Lease,
    LockKey,
    LockLostError,
    LockTimeoutError,
    StaleFencingTokenError,
    TransactionLock,
    UnreachableError,
    VersionConflictError,
    VersionedSession,
    fenced,
    idempotent,
    monitoring,
)


def test_held_by_another_process(engine: Engine, name: str) -> None:
    with held_elsewhere(AdvisoryLock(engine, name)):
        assert AdvisoryLock(engine, name).try_acquire() is None
        with pytest.raises(LockTimeoutError):
            AdvisoryLock(engine, name).acquire(timeout=0.1)


def test_close_month_does_nothing_while_another_process_closes(engine: Engine) -> None:
    with held_elsewhere(Lease(engine, "close:2026-05", ttl=30)):
        assert not close_month(engine, "2026-05")


def test_transaction_lock_held_by_another_transaction(
    engine: Engine, session: Session, name: str
) -> None:
    with engine.begin() as other:
        other.execute(select(func.pg_advisory_xact_lock(LockKey.of(name).sql)))
        with pytest.raises(LockTimeoutError):
            TransactionLock(session, name).acquire(timeout=0.1)


def test_session_lock_is_lost(engine: Engine, name: str) -> None:
    with pytest.raises(LockLostError) as caught:
        with AdvisoryLock(engine, name).hold() as held:
            (holder,) = AdvisoryLock(engine, name).holders()
            with engine.connect() as other:
                terminate = text("SELECT pg_terminate_backend(:pid)")
                other.execute(terminate, {"pid": holder.backend_pid})
            held.wait_lost(timeout=10)
            assert held.state == "lost"
    assert caught.value.reason == "killed"


def test_lease_is_lost(engine: Engine, name: str) -> None:
    with pytest.raises(LockLostError) as caught:
        with Lease(engine, name, ttl=30).hold() as lease:
            monitoring.evict(engine, name, reason="a test")
            lease.wait_lost(timeout=10)
    assert caught.value.reason == "evicted"


def test_lease_expires(engine: Engine, name: str) -> None:
    lease = Lease(engine, name, ttl=0.5, heartbeat="manual").acquire()
    lease.wait_lost(timeout=10)
    assert lease.loss_reason == "expired"


def test_stale_token_is_rejected(engine: Engine, name: str) -> None:
    lease = Lease(engine, name, ttl=30).acquire()
    monitoring.evict(engine, name, reason="a test")  # raises the token
    with pytest.raises(StaleFencingTokenError):
        with engine.begin() as connection, fenced(connection, name, lease.token):
            pytest.fail("entered with an old token")


def test_row_was_changed_by_another_transaction(engine: Engine) -> None:
    with VersionedSession(engine) as session:
        session.add(Account(id=7, balance=100))
        session.commit()
        account = session.get_one(Account, 7)
        with Session(engine) as other:
            other.get_one(Account, 7).balance = 0
            other.commit()
        account.balance += 1
        with pytest.raises(VersionConflictError):
            session.commit()


def test_key_is_in_use(engine: Engine, session: Session, name: str) -> None:
    with Session(engine) as other:
        idempotent(other, name, scope="pay").run(lambda: "paid")  # not committed yet
        with pytest.raises(IdempotencyInProgressError):
            pay(session, name, 30, timeout=0.1)


def test_server_is_unreachable(name: str) -> None:
    nowhere = create_engine("postgresql+psycopg://127.0.0.1:1/none")
    with pytest.raises(UnreachableError):
        AdvisoryLock(nowhere, name).acquire(timeout=0)
