"""monitoring.doctor(): each finding is there when its fault is, and nothing is found on a healthy installation."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import make_url

from pgfence import configure, monitoring, schema
from pgfence.errors import UnreachableError, UnsupportedServerError
from support.healthy import healthy_role
from support.proxy import RewritingProxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.faults import Pair
    from support.servers import OwnServer
    from support.standby import Standby
    from support.worlds import World

pytestmark = [pytest.mark.one_driver, pytest.mark.usefixtures("tables")]


async def examine(world: World, engine: Any, **kwargs: Any) -> dict[str, monitoring.Finding]:
    """Return the findings by their codes."""
    found = await world.call(monitoring.doctor, engine, **kwargs)
    assert len({finding.code for finding in found}) == len(found), found
    assert all(finding.found and finding.why and finding.fix for finding in found)
    return {finding.code: finding for finding in found}


def user_of(dsn: str) -> sql.Identifier:
    """Return the role of a DSN."""
    return sql.Identifier(make_url(dsn).username)


@pytest.fixture
def place(admin: psycopg.Connection[Any], name: str) -> Iterator[str]:
    """A schema with tables of pgfence, to be broken."""
    called = f"doctor_{name[-12:]}"
    admin.execute(schema.sql(schema=called).encode())
    yield called
    admin.execute(f"DROP SCHEMA {called} CASCADE".encode())


@pytest.mark.every_driver
async def test_a_healthy_installation_has_no_findings(
    world: World, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """With the privileges and settings of the documentation, no finding is reported."""
    assert await examine(world, world.engine(dsn=healthy_role(admin, role))) == {}


async def test_settings_of_the_role_are_examined(world: World, role: Callable[..., str]) -> None:
    """A role without any privilege finds each setting, with the ALTER ROLE that corrects it."""
    limits = {"idle_session_timeout": "5min", "statement_timeout": "5s", "synchronous_commit": "off"}
    dsn = role(limits)
    found = await examine(world, world.engine(dsn=dsn))
    assert {code: finding.severity for code, finding in found.items()} == {
        "keepalives": "warning",
        "idle-in-transaction": "warning",
        "synchronous-commit": "warning",
        "idle-session-timeout": "info",
        "statement-timeout": "info",
        "hidden-sessions": "info",
    }
    with psycopg.connect(dsn, autocommit=True) as own:
        for code in set(found) - {"hidden-sessions"}:
            fix = found[code].fix
            own.execute(fix[fix.index("ALTER ROLE") :].encode())
    assert (await examine(world, world.engine(dsn=dsn))).keys() == {"hidden-sessions"}


async def test_tables_that_are_not_found_are_looked_for_elsewhere(world: World, place: str) -> None:
    """The finding names the schema that has the tables, or the command that creates them if there is none."""
    engine = world.engine()
    configure(engine, schema="no_such_schema")
    assert repr(place) in (await examine(world, engine))["tables-elsewhere"].found
    engine = world.engine()
    configure(engine, prefix="absent_")
    assert (await examine(world, engine))["tables-missing"].fix == "pgfence install --prefix absent_"


async def test_broken_tables_and_functions_are_found(world: World, admin: psycopg.Connection[Any], place: str) -> None:
    """A missing function, a missing column and an old version are found."""
    engine = world.engine()
    configure(engine, schema=place)
    assert (
        not {"tables-missing", "tables-elsewhere", "tables-outdated", "tables-differ"}
        & (await examine(world, engine)).keys()
    )
    admin.execute(f"DROP FUNCTION {place}.pgfence_release_lease_v1".encode())
    assert "release_lease_v1" in (await examine(world, engine))["tables-differ"].found
    admin.execute(f"ALTER TABLE {place}.pgfence_lease DROP COLUMN purpose".encode())
    assert "ADD COLUMN purpose" in (await examine(world, engine))["tables-differ"].fix
    admin.execute(f"DELETE FROM {place}.pgfence_schema_version WHERE version > 2".encode())
    admin.execute(f"INSERT INTO {place}.pgfence_schema_version VALUES (2) ON CONFLICT DO NOTHING".encode())
    assert f"pgfence install --schema {place}" in (await examine(world, engine))["tables-outdated"].fix


async def test_a_feature_that_is_granted_in_part_is_found(
    world: World, admin: psycopg.Connection[Any], role: Callable[..., str], place: str
) -> None:
    """The fix is the GRANT that is missing and no more. A feature without any right is not used, so it is no finding."""
    dsn = role()
    engine = world.engine(dsn=dsn)
    configure(engine, schema=place)
    assert "grants-missing" not in await examine(world, engine)
    admin.execute(
        sql.SQL("GRANT INSERT ON {}.pgfence_idempotency_key TO {}").format(sql.Identifier(place), user_of(dsn))
    )
    finding = (await examine(world, engine))["grants-missing"]
    assert "idempotency keys" in finding.found
    assert "leases" not in finding.found
    assert '"pgfence_lease"' not in finding.fix
    admin.execute(finding.fix.encode())
    assert "grants-missing" not in await examine(world, engine)
    rights = admin.execute(
        "SELECT array_agg(privilege_type::text ORDER BY privilege_type::text) FROM information_schema.role_table_grants"
        " WHERE grantee = %s AND table_name = 'pgfence_idempotency_key'",
        [make_url(dsn).username],
    ).fetchone()
    assert rights == (["INSERT", "SELECT", "UPDATE"],)


async def test_an_invalid_index_is_found_and_one_that_is_being_built_is_not(
    world: World, admin: psycopg.Connection[Any], name: str, place: str
) -> None:
    """A unique index over duplicates that was built concurrently is found as invalid; one being built is not."""
    table = f'{place}."T"'
    admin.execute(f"CREATE TABLE {table} AS SELECT 1 AS n FROM generate_series(1, 2)".encode())
    with pytest.raises(psycopg.errors.UniqueViolation):
        admin.execute(f'CREATE UNIQUE INDEX CONCURRENTLY "I" ON {table} (n)'.encode())
    engine = world.engine()
    finding = (await examine(world, engine))["invalid-index"]
    assert f'{place}."I"' in finding.found
    with psycopg.connect(world.dsn) as builder:
        builder.execute(f"LOCK TABLE {table} IN SHARE UPDATE EXCLUSIVE MODE".encode())
        assert "invalid-index" not in await examine(world, engine)
    admin.execute(f"DELETE FROM {table}".encode())
    admin.execute(finding.fix[finding.fix.index("REINDEX") :].encode())
    assert "invalid-index" not in await examine(world, engine)


async def test_a_full_lock_table_is_found(world: World, lend_server: Callable[..., OwnServer]) -> None:
    """A lock table that is 80 % full is a warning, and from 90 % on it is an error."""
    server = lend_server(max_connections="20", max_locks_per_transaction="10")
    engine = world.engine(dsn=server.dsn)
    with psycopg.connect(server.dsn) as other:
        other.execute("SELECT pg_advisory_xact_lock(n) FROM generate_series(1, 160) AS n")
        assert (await examine(world, engine))["lock-table"].severity == "warning"
        other.execute("SELECT pg_advisory_xact_lock(n) FROM generate_series(161, 185) AS n")
        finding = (await examine(world, engine))["lock-table"]
    assert (finding.severity, "max_locks_per_transaction = 20" in finding.fix) == ("error", True)
    assert "lock-table" not in await examine(world, engine)


async def test_a_standby_and_how_it_follows_are_found(world: World, standby: Standby, pair: Pair) -> None:
    """On the standby itself, which proves that nothing is written; and on its primary, where it is asynchronous, or where the one that is needed is missing."""
    found = await examine(world, world.engine(dsn=standby.dsn))
    assert found["standby"].severity == "error"
    assert "asynchronous-standbys" not in found
    primary = world.engine(dsn=pair[0].dsn)
    following = (await examine(world, primary))["asynchronous-standbys"]
    assert following.severity == "warning"
    with psycopg.connect(pair[0].dsn, autocommit=True) as admin:
        admin.execute(
            following.fix.partition(";")[0].encode()
        )  # is valid, and has no effect before the configuration is read
        admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'absent'")
        admin.execute("SELECT pg_reload_conf()")
        try:
            assert (await examine(world, world.engine(dsn=pair[0].dsn)))["synchronous-standby"].severity == "error"
        finally:
            admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
            admin.execute("SELECT pg_reload_conf()")


async def test_an_alembic_environment_is_read(world: World, tmp_path: Any) -> None:
    """env.py is read without running it. pgfence's template has no findings, and an unreadable file is a ValueError."""
    engine = world.engine()
    ini, script = tmp_path / "alembic.ini", tmp_path / "env.py"
    ini.write_text("[alembic]\nscript_location = %(here)s\n")
    with pytest.raises(ValueError, match="cannot read"):
        await examine(world, engine, alembic_ini=str(ini))
    script.write_text("raise SystemExit\ncontext.configure(connection=connection)\n")
    assert {"alembic-lock", "alembic-plugin"} <= (await examine(world, engine, alembic_ini=ini)).keys()
    script.write_text("raise SystemExit\nwith migration_lock(c): context.configure(autogenerate_plugins=['pgfence'])\n")
    assert not {"alembic-lock", "alembic-plugin"} & (await examine(world, engine, alembic_ini=ini)).keys()
    with pytest.raises(TypeError, match="alembic_ini"):
        monitoring.doctor(engine, alembic_ini=7)


async def test_a_server_that_is_too_old_is_found(world: World, admin: psycopg.Connection[Any]) -> None:
    """The old version is the only finding, because the other checks need views that such a server does not have."""
    major = admin.info.server_version // 10000
    changes = {
        f"{text}{major}{more}".encode(): f"{text}13{more}".encode() for text, more in (("PostgreSQL ", ""), ("", "00"))
    }
    with closing(RewritingProxy(world.dsn, changes)) as old:
        found = await examine(world, world.engine(dsn=old.dsn))
    assert {code: one.severity for code, one in found.items()} == {"server-version": "error"}
    assert "PostgreSQL 13" in found["server-version"].found


@pytest.mark.twins
async def test_no_server_and_no_postgresql_raise(world: World) -> None:
    """A server that cannot be examined raises an error, and is not a finding."""
    with pytest.raises(UnreachableError):
        await world.call(monitoring.doctor, world.engine(dsn="postgresql://nobody@127.0.0.1:1/nothing"))
    if not world.is_async:
        from sqlalchemy import create_engine

        with pytest.raises(UnsupportedServerError):
            monitoring.doctor(create_engine("sqlite://"))
