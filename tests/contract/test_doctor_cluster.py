"""monitoring.doctor(): what matters for a failover. Each finding is there when its fault is, and its fix removes it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import make_url

from pgfence import AsyncLease, Lease, monitoring, schema
from support.standby import move_clock, receive_wal
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.faults import Pair
    from support.servers import OwnServer
    from support.worlds import World

HOSTS = {"host-list", "target-session-attrs", "tcp-user-timeout"}


async def find(world: World, engine: Any) -> dict[str, monitoring.Finding]:
    """Return the findings by their codes."""
    return {finding.code: finding for finding in await world.call(monitoring.doctor, engine)}


def build_list(dsn: str, driver: str, **parameters: str) -> str:
    """Return a DSN that names its host twice."""
    url = make_url(dsn)
    place = f"{url.host}:{url.port}" if driver == "asyncpg" else None
    hosts = {"host": [place, place]} if place else {"host": f"{url.host},{url.host}", "port": f"{url.port},{url.port}"}
    return url.set(host=None, port=None, query={**hosts, **parameters}).render_as_string(hide_password=False)


@pytest.mark.twins
async def test_a_host_list_that_is_no_failover_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a time limit for each host, with standbys, and with statements that wait for a dead server; asyncpg has no such limits."""
    found = (await find(world, world.engine(dsn=build_list(world.dsn, world.name)))).keys() & HOSTS
    assert found == (HOSTS if world.name == "psycopg" else HOSTS - {"tcp-user-timeout"})
    given = {"connect_timeout": "2", "target_session_attrs": "read-write", "tcp_user_timeout": "5000"}
    if world.name == "asyncpg":
        del given["connect_timeout"], given["tcp_user_timeout"]
    found = (await find(world, world.engine(dsn=build_list(world.dsn, world.name, **given)))).keys() & HOSTS
    assert found == (set() if world.name == "psycopg" else {"host-list"})
    assert not (await find(world, world.engine())).keys() & HOSTS
    if world.name == "psycopg":
        for timeout in ("0", "60"):
            slow = build_list(world.dsn, world.name, **given | {"connect_timeout": timeout})
            assert (await find(world, world.engine(dsn=slow))).keys() & HOSTS == {"host-list"}
        monkeypatch.setenv("PGCONNECT_TIMEOUT", "2")
        monkeypatch.setenv("PGTARGETSESSIONATTRS", "primary")
        found = (await find(world, world.engine(dsn=build_list(world.dsn, world.name)))).keys() & HOSTS
        assert found == {"tcp-user-timeout"}


@contextmanager
def altered(primary: OwnServer) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection for ALTER SYSTEM, and reset everything afterwards."""
    with psycopg.connect(primary.dsn, autocommit=True) as admin:
        try:
            yield admin
        finally:
            admin.execute("ALTER SYSTEM RESET ALL")
            admin.execute("SELECT pg_reload_conf()")


def alter(admin: psycopg.Connection[Any], *changes: str) -> None:
    """Run statements, and wait until all sessions have seen the changed configuration."""
    before = admin.execute("SELECT pg_conf_load_time()").fetchone()
    for change in changes:
        admin.execute(change.encode())
    admin.execute("SELECT pg_reload_conf()")
    blocking(lambda: admin.execute("SELECT pg_conf_load_time()").fetchone() != before)


@pytest.mark.one_driver
async def test_a_synchronous_standby_that_may_hang_for_too_long_is_found(world: World, pair: Pair) -> None:
    """Too long for the leases that are held, or without a limit; not where another standby is enough for a quorum."""
    primary, _ = pair
    engine = world.engine(dsn=primary.dsn)
    await world.call(schema.create_all, engine)
    with altered(primary) as admin:
        alter(admin, "ALTER SYSTEM SET synchronous_standby_names = 'walreceiver'")
        counted = "SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')"
        blocking(lambda: admin.execute(counted).fetchone() == (1,))
        assert not {"synchronous-standby", "wal-sender-timeout"} & (await find(world, engine)).keys()
        kind = world.pick(Lease, AsyncLease)
        async with world.enter(kind(engine, "long", ttl=600).hold()):
            assert "wal-sender-timeout" not in await find(world, engine)
            async with world.enter(kind(engine, "short", ttl=60).hold()):
                finding = (await find(world, engine))["wal-sender-timeout"]
                assert (finding.severity, "60 s, and" in finding.found) == ("warning", True)
                alter(admin, finding.fix.partition(";")[0])
                assert "wal-sender-timeout" not in await find(world, engine)
        alter(admin, "ALTER SYSTEM SET wal_sender_timeout = 0")
        assert "never" in (await find(world, engine))["wal-sender-timeout"].found
        with receive_wal(primary):
            alter(admin, "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (walreceiver, pg_receivewal)'")
            blocking(lambda: admin.execute(counted).fetchone() == (2,))
            assert "wal-sender-timeout" not in await find(world, engine)
            alter(admin, "ALTER SYSTEM SET synchronous_standby_names = 'ANY 2 (walreceiver, pg_receivewal)'")
            assert "wal-sender-timeout" in await find(world, engine)
    await world.call(schema.drop_all, engine)


@pytest.mark.one_driver
async def test_a_standby_whose_clock_is_ahead_is_found(world: World, pair: Pair) -> None:
    """By at least the seconds that its last reply proves."""
    primary, standby = pair
    engine = world.engine(dsn=primary.dsn)
    assert "standby-clock" not in await find(world, engine)
    with move_clock(standby, 100), psycopg.connect(primary.dsn, autocommit=True) as admin:
        following = "SELECT FROM pg_stat_replication WHERE state = 'streaming' AND reply_time IS NOT NULL"
        blocking(lambda: admin.execute(following).fetchone() is not None)
        finding = (await find(world, engine))["standby-clock"]
    assert "walreceiver by at least " in finding.found
    assert 50 < float(finding.found.rsplit(" ", 2)[1]) <= 100
