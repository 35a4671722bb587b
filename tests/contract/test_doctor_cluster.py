"""monitoring.doctor(): what matters for a failover. Each finding is there when its fault is, and its fix removes it."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

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

PAGE = Path(__file__).parents[2] / "docs" / "operate" / "cluster.md"
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

    async def find_faults(**parameters: str) -> dict[str, monitoring.Finding]:
        found = await find(world, world.engine(dsn=build_list(world.dsn, world.name, **parameters)))
        return {code: found[code] for code in HOSTS & found.keys()}

    faults = await find_faults()
    assert not (await find(world, world.engine())).keys() & HOSTS
    if world.name == "asyncpg":
        assert faults.keys() == {"host-list", "target-session-attrs"}
        assert (await find_faults(target_session_attrs="read-write")).keys() == {"host-list"}
        return
    assert faults.keys() == HOSTS
    advised = {code: read_advice(finding) for code, finding in faults.items()}
    everything = {name: value for given in advised.values() for name, value in given.items()}
    assert everything == read_page()
    assert not await find_faults(**everything)
    for code, given in advised.items():
        assert (await find_faults(**{name: everything[name] for name in everything.keys() - given})).keys() == {code}
    for timeout in ("0", "60"):
        assert (await find_faults(**everything | {"connect_timeout": timeout})).keys() == {"host-list"}
    del everything["keepalives_idle"]
    assert "and no keepalives_idle." in (await find_faults(**everything))["tcp-user-timeout"].found
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "2")
    monkeypatch.setenv("PGTARGETSESSIONATTRS", "primary")
    assert (await find_faults()).keys() == {"tcp-user-timeout"}


def read_advice(finding: monitoring.Finding) -> dict[str, str]:
    """Return the parameters that a fix adds to the URL."""
    advice = re.match(r"Add (\S+) to the URL", finding.fix)
    assert advice is not None
    return dict(parse_qsl(advice[1]))


def read_page() -> dict[str, str]:
    """Return the parameters of the URL that the page On a cluster shows, without the hosts."""
    wrapped = re.search(
        r"^postgresql\+psycopg://app@/shop\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    assert wrapped is not None
    given = dict(parse_qsl("".join(wrapped[1].split()).removeprefix("?")))
    assert given.pop("host") == "db1,db2,db3"
    return given


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
    """It is found if the limit is missing or too long for the held leases, unless another standby makes the quorum."""
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
    """A standby's clock is reported as ahead by at least the seconds that its last reply proves."""
    primary, standby = pair
    engine = world.engine(dsn=primary.dsn)
    assert "standby-clock" not in await find(world, engine)
    with move_clock(standby, 100), psycopg.connect(primary.dsn, autocommit=True) as admin:
        following = "SELECT FROM pg_stat_replication WHERE state = 'streaming' AND reply_time IS NOT NULL"
        blocking(lambda: admin.execute(following).fetchone() is not None)
        finding = (await find(world, engine))["standby-clock"]
    assert "'walreceiver' by at least " in finding.found
    assert 50 < float(finding.found.rsplit(" ", 2)[1]) <= 100
