"""monitoring.evict(): a hold is ended from outside, fenced off and audited."""

from __future__ import annotations

import asyncio
import getpass
import json
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence import AsyncSemaphore, Semaphore, monitoring, schema
from pgfence.config import configure
from pgfence.errors import LockLostError, LockTimeoutError, SchemaError, StandbyError, UnreachableError
from pgfence.keys import LockKey, qualify_name
from pgfence.lease import AsyncLease, Lease
from support.dates import strange
from support.locking import elsewhere, freed, is_free, labelled, lock
from support.rows import every_row
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.servers import OwnServer
    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]

_ACQUIRE = "SELECT granted, token FROM pgfence_acquire_lease_v2(%s, %s, %s, 0, 30, NULL, 'worker-7', 'host-1', 7, 'close', NULL, 'lease')"
LEASE = "11111111-2222-3333-4444-555555555555"


def lease(connection: psycopg.Connection[Any], name: str, ttl: float = 60) -> int:
    """Take a lease, as another process would, and return its token."""
    granted, token = connection.execute(_ACQUIRE, [name, LEASE, ttl]).fetchone()
    assert granted
    return token


def enter(connection: psycopg.Connection[Any], name: str, token: int) -> None:
    """Enter the gate of a name."""
    connection.execute("SELECT pgfence_enter_gates_v1(ARRAY[%s], ARRAY[%s::bigint])", [name, token])


def state(connection: psycopg.Connection[Any], name: str) -> tuple[Any, ...]:
    """Return the tokens of the name's row and gate, whether the lease has ended, and the audit rows."""
    return connection.execute(
        "SELECT (SELECT token FROM pgfence_lease WHERE name = %(n)s), (SELECT token FROM pgfence_gate WHERE resource = %(n)s),"
        " (SELECT released_at IS NOT NULL AND free_at <= clock_timestamp() FROM pgfence_lease WHERE name = %(n)s),"
        " (SELECT count(*) FROM pgfence_audit WHERE resource = %(n)s)",
        {"n": name},
    ).fetchone()


def blocked_by(admin: psycopg.Connection[Any], connection: psycopg.Connection[Any]) -> bool:
    """Whether another session waits for a connection's transaction."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))"
    return admin.execute(query, [connection.info.backend_pid]).fetchone()[0] > 0


@pytest.mark.every_driver
async def test_a_lease_is_ended_fenced_and_written_down(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Row and gate get a higher token, the lease is free, and the audit row has the actor, the reason and the holder."""
    token = lease(admin, name)
    (holder,) = await world.call(monitoring.evict, world.engine(), name, reason="hung since 3 a.m.", actor="ann")
    assert (holder.kind, holder.name, holder.owner, holder.host, holder.pid) == ("lease", name, "worker-7", "host-1", 7)
    assert (holder.token, holder.purpose) == (token, "close")
    assert state(admin, name) == (token + 1, token + 1, True, 1)
    audit = admin.execute(
        "SELECT action, actor, reason, detail, at BETWEEN clock_timestamp() - interval '1 min' AND clock_timestamp()"
        " FROM pgfence_audit WHERE resource = %s",
        [name],
    ).fetchone()
    assert audit[:3] == ("evict", "ann", "hung since 3 a.m.")
    assert audit[3]["token"] == token
    assert audit[3]["holders"][0]["owner"] == "worker-7"
    assert audit[4]
    assert lease(admin, name) == token + 2


async def test_the_evicted_holder_is_rejected_and_notified(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Its token opens no gate any more, and its renewal and its release return "evicted"."""
    token = lease(admin, name)
    await world.call(monitoring.evict, world.engine(), name, reason="hung")
    with pytest.raises(psycopg.DatabaseError) as caught:
        enter(admin, name, token)
    assert caught.value.sqlstate == "PF001"
    told = admin.execute(
        "SELECT pgfence_renew_leases_v1(ARRAY[%(n)s], ARRAY[%(id)s], ARRAY[%(t)s::bigint], ARRAY[60::float]),"
        " pgfence_release_lease_v1(%(n)s, %(id)s, %(t)s)",
        {"n": name, "id": LEASE, "t": token},
    ).fetchone()
    assert json.loads(told[0]) == [["lost", "evicted"]]
    assert told[1] == "evicted"


@pytest.mark.matrix
@pytest.mark.parametrize("heartbeat", ["auto", "manual"])
async def test_a_lease_held_here_is_lost_when_evict_returns(
    world: World, name: str, admin: psycopg.Connection[Any], heartbeat: Any
) -> None:
    """The handle is lost at once with the reason "evicted", and a waiter of this process gets the name."""
    engine = world.engine()
    one = world.pick(Lease, AsyncLease)(engine, name, ttl=3600, purpose="close", heartbeat=heartbeat)
    other = world.pick(Lease, AsyncLease)(engine, f"{name}!", ttl=3600)
    held, beside = await world.call(one.acquire), await world.call(other.acquire)
    told: list[str] = []
    held.on_lost(lambda: told.append(held.loss_reason))
    (holder,) = await world.call(monitoring.evict, engine, name, reason="hung")
    assert (holder.kind, holder.purpose, holder.token) == ("lease", "close", held.token)
    assert (held.state, held.loss_reason, beside.state) == ("lost", "evicted", "held")
    assert state(admin, name) == (held.token + 1, held.token + 1, True, 1)
    neighbour = await world.other().call(one.try_acquire)
    assert neighbour.token == held.token + 2
    await eventually(lambda: told == ["evicted"])
    with pytest.raises(LockLostError, match="evicted") as caught:
        await world.call(held.release)
    assert (caught.value.reason, caught.value.token) == ("evicted", held.token)
    for each in (neighbour, beside):
        await world.call(each.release)


def listening(admin: psycopg.Connection[Any], label: str) -> bool:
    """Return whether a session with this application_name listens and has checked for missed evictions."""
    query = (
        "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND state = 'idle' AND query LIKE '%%json_agg%%'"
    )
    return admin.execute(query, [label]).fetchone() is not None


@pytest.mark.every_driver
async def test_a_holder_in_another_process_is_notified_of_its_eviction(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The server notifies the holder long before its next renewal, even without a heartbeat; other leases stay held."""
    kind = world.pick(Lease, AsyncLease)
    engine = labelled(world, name)
    held = await world.call(kind(engine, name, ttl=3600, heartbeat="manual").acquire)
    beside = await world.call(kind(engine, f"{name}!", ttl=3600, heartbeat="manual").acquire)
    await eventually(lambda: listening(admin, name))
    await world.call(monitoring.evict, world.engine(), name, reason="hung")
    assert await world.call(held.wait_lost, 20)
    assert (held.loss_reason, beside.state) == ("evicted", "held")
    await world.call(beside.release)


async def test_an_eviction_before_the_holder_listens_is_not_missed(world: World, name: str) -> None:
    """A new holder does not listen at first; when its connection is open, it checks for missed evictions."""
    held = await world.call(world.pick(Lease, AsyncLease)(world.engine(), name, ttl=3600).acquire)
    await world.call(monitoring.evict, world.engine(), name, reason="hung")
    assert await world.call(held.wait_lost, 20)
    assert held.loss_reason == "evicted"


def test_a_notification_is_only_a_hint(dsn: str, name: str, admin: psycopg.Connection[Any]) -> None:
    """After a notification, which any session may send, the holder queries the server and does not renew."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}", connect_args={"application_name": name})
    asked = "SELECT query_start FROM pg_stat_activity WHERE application_name = %s AND query LIKE '%%json_agg%%'"
    with Lease(engine, name, ttl=3600, heartbeat="manual").hold() as held:
        (before,) = eventually(lambda: admin.execute(asked, [name]).fetchone())
        admin.execute("SELECT pg_notify('pgfence_evicted', %s)", [name])
        eventually(lambda: admin.execute(asked, [name]).fetchone() > (before,))
        assert held.state == "held"
        renewed = "SELECT renewed_at = acquired_at FROM pgfence_lease WHERE name = %s"
        assert admin.execute(renewed, [name]).fetchone() == (True,)
    engine.dispose()


def test_an_eviction_in_one_schema_ends_nothing_in_another(dsn: str, name: str, admin: psycopg.Connection[Any]) -> None:
    """A tenant's holder of the same name in the same process is not affected by the eviction or its notification."""
    tenant = f"evict_{name[-12:]}"
    admin.execute(f"CREATE SCHEMA {tenant}".encode())
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    mapped = engine.execution_options(schema_translate_map={None: tenant})
    try:
        schema.create_all(mapped)
        with Lease(engine, name, ttl=3600).hold() as ours:
            with pytest.raises(LockLostError, match="evicted"), Lease(mapped, name, ttl=3600).hold() as theirs:
                monitoring.evict(mapped, name, reason="hung")
                assert (ours.state, theirs.state) == ("held", "lost")
            ours.renew()
    finally:
        engine.dispose()
        admin.execute(f"DROP SCHEMA {tenant} CASCADE".encode())


@pytest.mark.every_driver
async def test_a_dry_run_names_the_holder_and_changes_nothing(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """dry_run=True returns the holder that it would evict; row, gate, audit and session are unchanged, for any DateStyle."""
    token = lease(admin, name)
    times = admin.execute("SELECT acquired_at, expires_at FROM pgfence_lease WHERE name = %s", [name]).fetchone()
    with elsewhere(world.dsn, name, label="other-deploy") as session:
        found = await world.call(monitoring.evict, strange(world), name, reason="hung", dry_run=True)
        assert [(holder.kind, holder.backend_pid) for holder in found][1:] == [("advisory", session.info.backend_pid)]
        assert (found[0].owner, found[0].since, found[0].expires_at) == ("worker-7", *times)
        assert found[1].since is not None
        assert state(admin, name) == (token, None, False, 0)
        assert not is_free(admin, name)


async def test_a_name_that_was_never_held_is_left_alone(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """For an unknown name the result is empty, and nothing is written."""
    assert list(await world.call(monitoring.evict, world.engine(), name, reason="hung")) == []
    assert state(admin, name) == (None, None, None, 0)


async def test_a_released_lease_still_gets_a_higher_token(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """After an eviction a late writer of the last holder is rejected, though the lease was free."""
    token = lease(admin, name)
    admin.execute("SELECT pgfence_release_lease_v1(%s, %s, %s)", [name, LEASE, token])
    enter(admin, name, token)
    assert list(await world.call(monitoring.evict, world.engine(), name, reason="late writer")) == []
    assert state(admin, name) == (token + 1, token + 1, True, 1)
    with pytest.raises(psycopg.DatabaseError, match="refused"):
        enter(admin, name, token)


async def test_an_expired_lease_without_a_new_holder_is_evicted(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A paused holder whose lease has expired is returned and fenced off like any other."""
    token = lease(admin, name, ttl=0.01)
    await eventually(
        lambda: admin.execute(
            "SELECT expires_at < clock_timestamp() FROM pgfence_lease WHERE name = %s", [name]
        ).fetchone()[0]
    )
    (holder,) = await world.call(monitoring.evict, world.engine(), name, reason="paused")
    assert holder.token == token
    assert state(admin, name)[:3] == (token + 1, token + 1, True)


async def test_a_writer_inside_is_waited_for(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A transaction that entered the gate before the eviction may commit; the eviction follows it."""
    token = lease(admin, name)
    with psycopg.connect(world.dsn) as writer:
        enter(writer, name, token)
        eviction = asyncio.create_task(world.other().call(monitoring.evict, world.engine(), name, reason="hung"))
        await eventually(
            lambda: admin.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE %s = ANY (pg_blocking_pids(pid))",
                [writer.info.backend_pid],
            ).fetchone()[0]
        )
        assert not eviction.done()
        writer.commit()
        assert len(await eviction) == 1
    assert state(admin, name)[:2] == (token + 1, token + 1)


@pytest.mark.every_driver
async def test_a_writer_that_stays_inside_is_named_and_nothing_is_done(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """After 2 s the eviction gives up, says which server process is inside, and has changed nothing."""
    token = lease(admin, name)
    with psycopg.connect(world.dsn, application_name="hung-worker") as writer:
        enter(writer, name, token)
        with pytest.raises(LockTimeoutError, match="hung-worker") as caught:
            await world.call(monitoring.evict, strange(world), name, reason="hung")
        assert [holder.backend_pid for holder in caught.value.holders] == [writer.info.backend_pid]
        assert caught.value.holders[0].since is not None
        assert caught.value.names == (name,)
        assert caught.value.retryable
        assert state(admin, name) == (token, None, False, 0)


@pytest.mark.every_driver
async def test_the_session_of_an_advisory_lock_is_ended(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C021: a session lock is freed by ending its session, in the transaction that writes the audit row."""
    with elsewhere(world.dsn, name, label="other-deploy") as session:
        (holder,) = await world.call(monitoring.evict, world.engine(), name, reason="behind a pooler", actor="ann")
        assert (holder.kind, holder.application_name) == ("advisory", "other-deploy")
        await freed(admin, name)
        with pytest.raises(psycopg.OperationalError):
            session.execute("SELECT 1")
    assert state(admin, name) == (None, None, None, 1)


async def test_the_holder_of_a_lock_with_a_token_is_notified_and_fenced_off(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """For AdvisoryLock(token=True), the session ends, the handle is lost, and its token opens no gate."""
    held = await world.call(lock(world, world.engine(), name, token=True).acquire)
    enter(admin, name, held.token)
    (holder,) = await world.call(monitoring.evict, world.engine(), name, reason="hung")
    assert holder.backend_pid == held._hold.session.pid
    await eventually(lambda: held.lost)
    with pytest.raises(LockLostError) as caught:
        await world.call(held.release)
    assert (caught.value.reason, caught.value.token) == ("killed", held.token)
    assert state(admin, name)[:2] == (held.token + 1, held.token + 1)
    with pytest.raises(psycopg.DatabaseError, match="refused"):
        enter(admin, name, held.token)


async def test_other_keys_and_half_keys_are_left_alone(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Only sessions that hold exactly this key are ended, not those that hold its halves as a pair."""
    key = LockKey.of(name)
    pair = LockKey.pair(*key.halves)
    with elsewhere(world.dsn, pair, f"{name}:other") as session, elsewhere(world.dsn, name):
        assert len(await world.call(monitoring.evict, world.engine(), name, reason="hung")) == 1
        assert session.execute("SELECT 1").fetchone() == (1,)


async def test_a_role_with_the_documented_rights_evicts(
    world: World, name: str, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """A role that may write leases, gates and the audit, and end its own sessions, can evict."""
    login = role()
    user = login.split("//")[1].split(":")[0]
    admin.execute(f"GRANT SELECT, INSERT, UPDATE ON pgfence_lease, pgfence_gate TO {user}")
    admin.execute(f"GRANT INSERT ON pgfence_audit TO {user}")
    token = lease(admin, name)
    try:
        with elsewhere(login, name):
            found = await world.call(monitoring.evict, world.engine(dsn=login), name, reason="hung")
        assert [holder.kind for holder in found] == ["lease", "advisory"]
        assert state(admin, name) == (token + 1, token + 1, True, 1)
    finally:
        admin.execute(f"REVOKE ALL ON pgfence_lease, pgfence_gate, pgfence_audit FROM {user}")


@pytest.mark.every_driver
async def test_without_the_right_to_end_a_session_nothing_is_done(
    world: World, name: str, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """The error names the GRANT; token and audit are as before, also from an engine in AUTOCOMMIT, and the session lives."""
    login = role()
    engine = world.engine(dsn=login, isolation_level="AUTOCOMMIT")
    user = login.split("//")[1].split(":")[0]
    admin.execute(f"GRANT SELECT, INSERT, UPDATE ON pgfence_lease, pgfence_gate, pgfence_audit TO {user}")
    token = lease(admin, name)
    admin.execute("SELECT pgfence_release_lease_v1(%s, %s, %s)", [name, LEASE, token])
    try:
        with elsewhere(world.dsn, name) as session:
            with pytest.raises(SchemaError, match=r"pg_signal_backend.*\(only a superuser can end") as caught:
                await world.call(monitoring.evict, engine, name, reason="hung")
            assert caught.value.command.startswith("GRANT pg_signal_backend")
            assert session.execute("SELECT 1").fetchone() == (1,)
            assert state(admin, name) == (token, None, True, 0)
    finally:
        admin.execute(f"REVOKE ALL ON pgfence_lease, pgfence_gate, pgfence_audit FROM {user}")


@pytest.mark.every_driver
async def test_without_a_right_to_the_tables_the_error_names_the_grant(
    world: World, name: str, role: Callable[..., str]
) -> None:
    """A role that may not read the lease's row gets an error with the missing GRANT, and without a password."""
    login = role()
    with pytest.raises(SchemaError, match="GRANT") as caught:
        await world.call(monitoring.evict, world.engine(dsn=login), name, reason="hung")
    assert login.split("@")[0].rsplit(":", 1)[1] not in str(caught.value)


async def test_missing_tables_name_the_command(world: World, name: str) -> None:
    """For a prefix that is not installed the error names `pgfence install` with that prefix."""
    engine = world.engine()
    configure(engine, prefix="absent_")
    with pytest.raises(SchemaError, match="pgfence install --prefix absent_"):
        await world.call(monitoring.evict, engine, name, reason="hung")


@pytest.mark.every_driver
async def test_an_unreachable_server_is_named_in_the_error(world: World, name: str) -> None:
    """A server that does not respond raises UnreachableError, and is never an empty result."""
    engine = world.engine(dsn="postgresql://nobody:secret@127.0.0.1:1/nothing")
    with pytest.raises(UnreachableError) as caught:
        await world.call(monitoring.evict, engine, name, reason="hung", dry_run=True)
    assert "secret" not in str(caught.value)


async def test_a_read_only_server_is_named_in_the_error(
    world: World, name: str, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """On a read-only server the eviction raises the same error as on a standby."""
    lease(admin, name)
    login = role(settings={"default_transaction_read_only": "on"})
    user = login.split("//")[1].split(":")[0]
    admin.execute(f"GRANT ALL ON pgfence_lease, pgfence_gate, pgfence_audit TO {user}")
    try:
        with pytest.raises(StandbyError):
            await world.call(monitoring.evict, world.engine(dsn=login), name, reason="hung")
    finally:
        admin.execute(f"REVOKE ALL ON pgfence_lease, pgfence_gate, pgfence_audit FROM {user}")


@pytest.mark.every_driver
async def test_a_stricter_default_isolation_changes_nothing(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """With an engine at SERIALIZABLE or in AUTOCOMMIT, an eviction is one transaction too."""
    for number, isolation in enumerate(("SERIALIZABLE", "AUTOCOMMIT"), start=1):
        token = lease(admin, name)
        engine = world.engine(isolation_level=isolation)
        assert len(await world.call(monitoring.evict, engine, name, reason="hung")) == 1
        assert state(admin, name) == (token + 1, token + 1, True, number)


async def test_namespace_and_prefix_are_the_configured_ones(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The row of namespace and name is evicted, in the tables of the configured prefix, and no other."""
    engine = world.engine()
    configure(engine, namespace="shop", prefix="evict_t_")
    await world.call(schema.create_all, engine)
    whole = qualify_name(name, "shop")
    bare = lease(admin, name)
    admin.execute(_ACQUIRE.replace("pgfence_", "evict_t_"), [whole, LEASE, 60])
    with elsewhere(world.dsn, LockKey.of(name, namespace="shop")), elsewhere(world.dsn, name) as untouched:
        found = await world.call(monitoring.evict, engine, name, reason="hung")
        assert [(holder.kind, holder.name) for holder in found] == [("lease", f"shop:{name}"), ("advisory", name)]
        assert untouched.execute("SELECT 1").fetchone() == (1,)
    assert admin.execute("SELECT resource FROM evict_t_audit ORDER BY id DESC LIMIT 1").fetchone() == (whole,)
    assert state(admin, name) == (bare, None, False, 0)


async def test_the_error_names_a_grant_that_was_made_in_the_meantime(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Result and audit name the holder that was evicted, even if it was granted after the first query."""
    lease(admin, name)
    with psycopg.connect(world.dsn) as other:
        other.execute("UPDATE pgfence_lease SET token = 5, owner = 'worker-8' WHERE name = %s", [name])
        eviction = asyncio.create_task(world.other().call(monitoring.evict, world.engine(), name, reason="hung"))
        await eventually(lambda: blocked_by(admin, other))
        other.commit()
        (holder,) = await eviction
    assert (holder.owner, holder.token) == ("worker-8", 5)
    assert state(admin, name) == (6, 6, True, 1)
    detail = admin.execute("SELECT detail FROM pgfence_audit WHERE resource = %s", [name]).fetchone()[0]
    assert (detail["token"], detail["holders"][0]["owner"]) == (5, "worker-8")


@every_row(
    ("arguments", "error"),
    [
        ({"reason": ""}, ValueError),
        ({"reason": "  "}, ValueError),
        ({"reason": None}, TypeError),
        ({"reason": "a\x00b"}, ValueError),
        ({"reason": "hung", "actor": ""}, ValueError),
        ({"reason": "hung", "actor": 7}, TypeError),
        ({"name": "", "reason": "hung"}, ValueError),
        ({"name": "x" * 256, "reason": "hung"}, ValueError),
        ({"name": LockKey.raw(1), "reason": "hung"}, TypeError),
    ],
)
async def test_bad_input_is_rejected_before_any_statement(
    world: World, arguments: dict[str, Any], error: type[Exception]
) -> None:
    """Names, reasons and actors that cannot be used are rejected without a query."""
    engine = world.engine(dsn="postgresql://nobody@127.0.0.1:1/nothing")
    with pytest.raises(error):
        await world.call(monitoring.evict, engine, **{"name": "any", **arguments})


async def test_an_unnamed_actor_is_this_user_on_this_host(
    world: World, name: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `actor` the audit has the OS user and the host; a user without a name appears by number."""

    def nameless() -> str:
        raise KeyError

    lease(admin, name)
    await world.call(monitoring.evict, world.engine(), name, reason="hung")
    monkeypatch.setattr(getpass, "getuser", nameless)
    await world.call(monitoring.evict, world.engine(), name, reason="hung again")
    actors = admin.execute("SELECT actor FROM pgfence_audit WHERE resource = %s ORDER BY id", [name]).fetchall()
    assert "@" in actors[0][0]
    assert actors[1][0].startswith("uid ")


async def test_a_session_of_another_database_is_left_alone(
    world: World, name: str, make_server: Callable[..., OwnServer]
) -> None:
    """The session that holds the same key in another database of the server is not ended."""
    server = make_server()
    engine = world.engine(dsn=server.dsn)
    await world.call(schema.create_all, engine)
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        admin.execute("CREATE DATABASE neighbour")
    with elsewhere(server.dsn.rsplit("/", 1)[0] + "/neighbour", name) as session:
        assert list(await world.call(monitoring.evict, engine, name, reason="hung")) == []
        assert session.execute("SELECT 1").fetchone() == (1,)


async def test_a_semaphore_is_evicted_by_its_permits(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """The name of a semaphore, or of partitions, has no holder of its own: the error gives a name that has one."""
    engine = world.engine()
    permit = await world.call(
        world.pick(Semaphore, AsyncSemaphore)(engine, name, permits=2, ttl=30, heartbeat="manual").acquire
    )
    for dry_run in (True, False):
        with pytest.raises(ValueError, match=f"is a semaphore, and each permit .* such as '{name}#1'"):
            await world.call(monitoring.evict, engine, name, reason="hung", dry_run=dry_run)
    (holder,) = await world.call(monitoring.evict, engine, f"{name}#1", reason="hung")
    assert (holder.kind, holder.token) == ("permit", permit.token)
    admin.execute("UPDATE pgfence_lease SET name = %s, kind = 'partition' WHERE name = %s", [f"{name}/0", f"{name}#1"])
    with pytest.raises(ValueError, match="is a set of partitions"):
        await world.call(monitoring.evict, engine, name, reason="hung")
