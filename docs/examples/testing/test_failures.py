"""Locks that are held, lost or stale."""

from __future__ import annotations

import pytest
from ledger import ACCOUNT, Account, close_month, pay
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from pgfence import (
    AdvisoryLock,
    IdempotencyInProgressError,
    Lease,
    LockLostError,
    LockTimeoutError,
    StaleFencingTokenError,
    TransactionLock,
    UnreachableError,
    VersionConflictError,
    VersionedSession,
    idempotent,
    monitoring,
)
from pgfence.testing import PgfenceFaults, PgfenceHolds


def test_lock_is_held(engine: Engine, pgfence_holds: PgfenceHolds) -> None:
    with pgfence_holds("report"):
        assert AdvisoryLock(engine, "report").try_acquire() is None


def test_transaction_lock_is_held(
    session: Session, pgfence_holds: PgfenceHolds
) -> None:
    with pgfence_holds(ACCOUNT(1)):
        with pytest.raises(LockTimeoutError):
            TransactionLock(session, ACCOUNT(1)).acquire(timeout=0.1)


def test_lease_is_held(engine: Engine, pgfence_holds: PgfenceHolds) -> None:
    with pgfence_holds(Lease(engine, "close:2026-05", ttl=30)):
        assert not close_month(engine, "2026-05")


def test_session_lock_is_lost(engine: Engine, pgfence_faults: PgfenceFaults) -> None:
    with pytest.raises(LockLostError) as caught:
        with AdvisoryLock(engine, "report").hold() as held:
            pgfence_faults.kill(held)
            assert held.state == "lost"
    assert caught.value.reason == "killed"


def test_lease_expires(engine: Engine, pgfence_faults: PgfenceFaults) -> None:
    lease = Lease(engine, "report", ttl=30).acquire()
    pgfence_faults.expire(lease)
    assert lease.loss_reason == "expired"


def test_lease_is_evicted(engine: Engine) -> None:
    lease = Lease(engine, "report", ttl=30).acquire()
    monitoring.evict(engine, "report", reason="a test")
    assert lease.wait_lost(timeout=10)
    assert lease.loss_reason == "evicted"


def test_stale_writer_is_rejected(
    engine: Engine, pgfence_faults: PgfenceFaults
) -> None:
    lease = Lease(engine, "ledger", ttl=30).acquire()
    with pgfence_faults.steal(lease) as thief:
        assert thief.token == lease.token + 1
        assert lease.state == "held"  # the former holder is not notified
        with pytest.raises(StaleFencingTokenError):
            with lease.begin(engine):
                pytest.fail("entered with an old token")
    with pytest.raises(LockLostError):
        lease.release()


def test_connection_is_cut(pgfence_faults: PgfenceFaults) -> None:
    engine = create_engine(pgfence_faults.url)
    held = AdvisoryLock(engine, "report").acquire()
    with pgfence_faults.cut():
        assert held.wait_lost(timeout=10)
        with pytest.raises(UnreachableError):
            AdvisoryLock(engine, "report").acquire(timeout=0)
    engine.dispose()


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


def test_key_is_in_use(
    engine: Engine, session: Session, pgfence_namespace: str
) -> None:
    key = pgfence_namespace  # a str that no other test uses
    with Session(engine) as other:
        idempotent(other, key, scope="pay").run(lambda: "paid")  # not committed yet
        with pytest.raises(IdempotencyInProgressError):
            pay(session, key, 30, timeout=0.1)
