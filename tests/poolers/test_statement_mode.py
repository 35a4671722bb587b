"""PgBouncer in statement mode allows no transactions: nothing of pgfence works, and every call raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from pgfence import AdvisoryLock, Lease, TransactionLock, UnreachableError, idempotent, monitoring

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine


def lock_in_transaction(engine: Engine, name: str) -> None:
    with Session(engine) as session, session.begin():
        TransactionLock(session, name).acquire()


def claim_key(engine: Engine, name: str) -> None:
    with Session(engine) as session, session.begin():
        idempotent(session, name, scope="s").run(lambda: 1)


CALLS: dict[str, Callable[[Engine, str], object]] = {
    "advisory lock": lambda engine, name: AdvisoryLock(engine, name).try_acquire(),
    "lease": lambda engine, name: Lease(engine, name, ttl=5).try_acquire(),
    "transaction lock": lock_in_transaction,
    "key": claim_key,
    "purge": lambda engine, _name: monitoring.purge(engine),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_raises_in_statement_mode(
    call: str, name: str, pgbouncer: Callable[..., str], advisory_rows: Callable[[], list[Any]]
) -> None:
    """SQLAlchemy cannot begin a transaction there, so that no session is had and nothing is left behind."""
    through = pgbouncer("statement").replace("://", "+psycopg://", 1)
    engine = create_engine(through, connect_args={"prepare_threshold": None})
    with pytest.raises(UnreachableError, match="transaction blocks not allowed"):
        CALLS[call](engine, name)
    engine.dispose()
    assert advisory_rows() == []
