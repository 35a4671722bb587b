"""`ps` on a standby, with prepared transactions, and where the server rejects the query."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence import AdvisoryLock, Lease, LockKey, TransactionLock, monitoring, schema
from pgfence.errors import LockTimeoutError, PgfenceError, SchemaError, UnreachableError
from support.locking import background, elsewhere
from support.servers import role
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.faults import Pair
    from support.proxy import Proxy
    from support.servers import OwnServer
    from support.worlds import World

pytestmark = pytest.mark.one_driver


def test_a_standby_lists_rows_of_the_primary_and_its_own_locks(world: World, name: str, pair: Pair) -> None:
    """Leases are replicated, advisory locks are not. Nothing is written."""
    primary, copy = (world.engine(dsn=server.dsn) for server in pair)
    schema.create_all(primary)
    try:
        with (
            Lease(primary, f"{name}:lease", ttl=60).hold(),
            AdvisoryLock(primary, f"{name}:primary").hold(),
            elsewhere(pair[1].dsn, f"{name}:copy"),
        ):
            rows = eventually(lambda: monitoring.ps(copy) if len(monitoring.ps(copy)) > 1 else None)
        keys = {row.holder.key for row in rows}
        assert [(row.holder.kind, row.state) for row in rows if row.label == f"{name}:lease"] == [("lease", "held")]
        assert LockKey.of(f"{name}:copy") in keys
        assert LockKey.of(f"{name}:primary") not in keys
    finally:
        schema.drop_all(primary)


def test_a_prepared_transaction_is_a_holder_without_a_session(
    world: World, name: str, lend_server: Callable[..., OwnServer]
) -> None:
    """Its identifier, its role and its age are listed, and a waiter is blocked by 0. The message of a waiter names it, too."""
    server = lend_server(max_prepared_transactions="2")
    engine = world.engine(dsn=server.dsn)
    with engine.connect() as connection:
        transaction = connection.begin_twophase(name)
        TransactionLock(connection, name).acquire()
        transaction.prepare()
        try:
            (row,) = monitoring.ps(engine)
            assert (row.holder.key, row.holder.kind, row.state) == (LockKey.of(name), "transaction", "prepared")
            assert (row.holder.owner, row.holder.backend_pid) == (f"prepared transaction {name}", None)
            assert row.holder.user == "postgres" and row.holder.since is not None
            with engine.begin() as waiting, psycopg.connect(server.dsn) as third:
                with pytest.raises(LockTimeoutError, match="prepared transaction"):
                    TransactionLock(waiting, name).acquire(timeout=0.1)
                third.execute("SELECT pg_advisory_xact_lock(1)")
                pid = third.info.backend_pid
                third.pgconn.send_query(f"SELECT pg_advisory_xact_lock({LockKey.of(name).value})".encode())
                held = eventually(lambda: [one for one in monitoring.ps(engine) if one.waiters])
                assert held[0].holder.key == LockKey.of(name) and held[0].waiters[0].blocked_by == (0,)
                (chain,) = [one for one in monitoring.ps(engine, state="waiting") if one.holder.backend_pid == pid]
                assert chain.blocked_by == (0,)
                third.close()
        finally:
            transaction.rollback()


@pytest.mark.usefixtures("tables")
def test_a_rejected_query_is_not_called_a_failed_connection(
    world: World, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """A missing privilege names its GRANT. Another error is the server's, with its SQLSTATE."""
    with role(admin, dsn, {}) as login:
        try:
            admin.execute("REVOKE SELECT ON pg_locks FROM PUBLIC")
            with pytest.raises(SchemaError) as denied:
                monitoring.ps(world.engine(dsn=login))
        finally:
            admin.execute("GRANT SELECT ON pg_locks TO PUBLIC")
    assert denied.value.command == "GRANT SELECT ON pg_catalog.pg_locks TO <role>"
    hurried = world.engine(connect_args={"options": "-c statement_timeout=50ms"})
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE pgfence_audit")
        with pytest.raises(PgfenceError, match="rejected a statement: canceling statement") as rejected:
            monitoring.audit(hurried)
    assert not isinstance(rejected.value, UnreachableError) and rejected.value.sqlstate == "57014"


@pytest.mark.every_driver
@pytest.mark.usefixtures("tables")
async def test_a_connection_that_is_lost_during_a_statement_is_reported_without_the_statement(
    world: World, dsn: str, admin: psycopg.Connection[Any], proxy: Proxy
) -> None:
    """The message is one line for an operator: the server, the driver's reason, and that the outcome is unknown."""
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'relation' AND query LIKE '%%pgfence_audit%%'"
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE pgfence_audit")
        async with background(world.call(monitoring.audit, world.engine(dsn=proxy.dsn))) as reading:
            await eventually(lambda: admin.execute(waits).fetchone() == (1,))
            proxy.cut()
            with pytest.raises(UnreachableError, match=r"was lost: .+\. It is unknown whether") as lost:
                await reading
    assert "SELECT" not in str(lost.value) and "\n" not in str(lost.value)
