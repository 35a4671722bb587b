"""monitoring.release_leaked() ends idle sessions with leaked locks; monitoring.audit() reads who did what."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from pgfence import LockKey, configure, monitoring
from pgfence.errors import SchemaError
from support.locking import is_free, lock, take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def leak(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of another program's pool."""
    connection = psycopg.connect(dsn, autocommit=True, application_name="importer")
    yield connection
    connection.close()


@pytest.mark.every_driver
async def test_a_leaked_lock_is_released_and_recorded(
    world: World, name: str, admin: psycopg.Connection[Any], leak: psycopg.Connection[Any]
) -> None:
    """Every lock of the session is a holder; the audit says who did it, why, and what was found."""
    pair = LockKey.pair(-7, -9)
    take(leak, name)
    take(leak, pair)
    engine = world.engine()
    seen = await world.call(monitoring.release_leaked, engine, reason="look", idle_for=0, dry_run=True)
    assert {one.key for one in seen} == {LockKey.of(name), pair}
    assert {(one.kind, one.application_name, one.backend_pid) for one in seen} == {
        ("advisory", "importer", leak.info.backend_pid)
    }
    assert not is_free(admin, name)
    assert await world.call(monitoring.release_leaked, engine, reason="old import", idle_for=600) == []
    ended = await world.call(monitoring.release_leaked, engine, reason="old import", actor="ann", idle_for=0)
    assert list(ended) == list(seen)
    assert is_free(admin, name)
    assert is_free(admin, pair)
    entry = (await world.call(monitoring.audit, engine, action="release leaked"))[-1]
    assert (entry.actor, entry.reason, entry.resource) == ("ann", "old import", f"backend {seen[0].backend_pid}")
    assert {one["key"] for one in entry.detail["holders"]} == {LockKey.of(name).value, pair.value}
    with pytest.raises(psycopg.OperationalError):
        leak.execute("SELECT 1")


async def test_sessions_in_use_and_holders_of_pgfence_stay(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C021: a session in a transaction, one of another database's, and a lock of pgfence."""
    engine = world.engine()
    with psycopg.connect(world.dsn) as busy:
        busy.execute("SELECT pg_advisory_lock(1)")
        async with world.enter(lock(world, engine, name).hold()) as held:
            assert await world.call(monitoring.release_leaked, engine, reason="r", idle_for=0) == []
            assert held.state == "held"
        assert not is_free(admin, LockKey.raw(1))


async def test_without_tables_it_is_not_recorded_and_without_rights_not_done(
    world: World,
    name: str,
    admin: psycopg.Connection[Any],
    leak: psycopg.Connection[Any],
    role: Callable[..., str],
) -> None:
    """The error has the GRANT. A role that sees no activity finds nothing."""
    take(leak, name)
    dsn = role()
    user = sql.Identifier(make_url(dsn).username)
    engine = world.engine(dsn=dsn)
    assert await world.call(monitoring.release_leaked, engine, reason="r", idle_for=0) == []
    admin.execute(sql.SQL("GRANT pg_read_all_stats TO {}").format(user))
    with pytest.raises(SchemaError, match='GRANT INSERT ON "pgfence_audit"'):
        await world.call(monitoring.release_leaked, engine, reason="r", idle_for=0)
    configure(bare := world.engine(dsn=dsn), prefix="absent_")
    with pytest.raises(SchemaError, match="pg_signal_backend"):
        await world.call(monitoring.release_leaked, bare, reason="r", idle_for=0)
    assert not is_free(admin, name)
    configure(unrecorded := world.engine(), prefix="absent_")
    assert len(await world.call(monitoring.release_leaked, unrecorded, reason="r", idle_for=0)) == 1
    assert is_free(admin, name)


async def test_the_audit_is_read_by_time_and_action(
    world: World, name: str, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """In the order of time, with the namespace apart; SELECT on the table is enough, and the error names it."""
    rows = [
        ("evict", f"shop\x1f{name}", "3 hours"),
        ("free key", f"shop\x1f{name}\x1fk1", "1 hour"),
        ("evict", name, "1 minute"),
    ]
    for action, resource, age in rows:
        admin.execute(
            "INSERT INTO pgfence_audit (action, resource, actor, reason, at)"
            " VALUES (%s, %s, 'ann', 'why', clock_timestamp() - %s::interval)",
            [action, resource, age],
        )
    dsn = role()
    engine = world.engine(dsn=dsn)

    async def read(**kwargs: Any) -> list[tuple[str, str, str]]:
        found = await world.call(monitoring.audit, engine, **kwargs)
        assert [one.at for one in found] == sorted(one.at for one in found)
        return [(one.action, one.namespace, one.resource) for one in found if name in one.resource]

    with pytest.raises(SchemaError) as caught:
        await read()
    assert caught.value.command == 'GRANT SELECT ON "pgfence_audit" TO <role>'
    admin.execute(sql.SQL("GRANT SELECT ON pgfence_audit TO {}").format(sql.Identifier(make_url(dsn).username)))
    first, second, third = ("evict", "shop", name), ("free key", "shop", f"{name} k1"), ("evict", "", name)
    assert await read() == [first, second, third]
    assert await read(since=timedelta(hours=2)) == [second, third]
    assert await read(since=timedelta(days=3_000_000)) == [first, second, third]
    assert await read(since=datetime.now(UTC) - timedelta(hours=2), action="evict") == [third]
    for wrong, error in ((datetime.now(UTC).replace(tzinfo=None), ValueError), (3, TypeError)):
        with pytest.raises(error, match="since"):
            await read(since=wrong)
    with pytest.raises(ValueError, match="action"):
        await read(action=" ")
