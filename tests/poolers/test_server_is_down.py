"""PgBouncer without a server behind it: it still accepts clients, so only statements fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from pgfence import AdvisoryLock, Lease, TransactionLock, UnreachableError, configure, run_transaction, schema
from support.poolers import pgbouncer

if TYPE_CHECKING:
    from support.servers import OwnServer


def test_only_transactions_of_the_caller_raise_sqlalchemys_error(own_server: OwnServer) -> None:
    """Locks and leases raise UnreachableError. The caller's connection was opened, so its first statement raises."""
    with pgbouncer(own_server.dsn, "session", "query_wait_timeout = 1\n") as through:
        engine = create_engine(through.replace("postgresql:", "postgresql+psycopg:"), pool_pre_ping=True)
        configure(engine, pooler="session")
        schema.create_all(engine)
        engine.dispose()
        own_server.stop("immediate")
        with pytest.raises(OperationalError):
            run_transaction(sessionmaker(engine), lambda session: session.execute(text("SELECT 1")))
        with Session(engine) as session, pytest.raises(OperationalError):
            TransactionLock(session, "a").acquire()
        for attempt in (AdvisoryLock(engine, "a").try_acquire, Lease(engine, "b", ttl=5).try_acquire):
            with pytest.raises(UnreachableError) as caught:
                attempt()
            assert caught.value.retryable
        engine.dispose()
