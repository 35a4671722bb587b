"""Where the operations look: the search path, a `schema_translate_map`, and places where nothing is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, MetaData, create_engine

from pgfence import schema
from pgfence._sql.storage import VERSION
from pgfence.errors import SchemaError
from support.revisions import Project

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy import Connection

OURS = "SELECT relnamespace::regnamespace::text FROM pg_class WHERE relname = 'pgfence_gate'"
GUARDED = "SELECT tgrelid::regclass::text, tgname FROM pg_trigger WHERE tgname IN ('pgfence_fence', 'pgfence_version')"


@pytest.fixture
def tenant(engine: Engine) -> Iterator[Engine]:
    """An engine whose search path has a schema of its own first, and then `public`."""
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA tenant")
    own = create_engine(engine.url, connect_args={"options": "-csearch_path=tenant,public"})
    yield own
    own.dispose()


def perform(engine: Engine, work: Callable[[Any], Any]) -> None:
    with engine.begin() as connection:
        work(Operations(MigrationContext.configure(connection)))


def found(connection: Connection, query: str) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in connection.exec_driver_sql(query))


def test_an_installation_further_down_the_search_path_is_dropped_by_name_only(
    engine: Engine, tenant: Engine, tmp_path: Path
) -> None:
    """What create_pgfence has found and left as it was, drop_pgfence does not take from others, in no script either."""
    schema.create_all(engine)
    perform(tenant, lambda op: op.create_pgfence())
    with pytest.raises(SchemaError, match="not its first schema") as told:
        perform(tenant, lambda op: op.drop_pgfence())
    project = Project(tmp_path / "alembic", tenant, MetaData())
    project.write("op.drop_pgfence()")
    script = project.sql().partition("Running upgrade")[2].partition("\n")[2].partition("INSERT INTO alembic")[0]
    with tenant.connect() as connection:
        driver = connection.connection.dbapi_connection
        assert isinstance(driver, psycopg.Connection)
        with pytest.raises(psycopg.errors.RaiseException, match="are in public, not in the first schema"):
            driver.execute(script.encode())
        driver.rollback()
        assert found(connection, OURS) == [("public",)]
    assert told.value.command == "op.drop_pgfence(schema='public')"
    perform(tenant, lambda op: op.drop_pgfence(schema="public"))
    perform(tenant, lambda op: op.drop_pgfence())
    perform(tenant, lambda op: op.create_pgfence())
    perform(tenant, lambda op: op.drop_pgfence())
    with engine.connect() as connection:
        assert found(connection, OURS) == []


def test_a_translated_schema_is_where_everything_is_made_and_dropped(engine: Engine, tenant: Engine) -> None:
    """Tables, fence and version trigger are beside the table that Alembic's own operation makes on that connection."""
    translated = engine.execution_options(schema_translate_map={None: "tenant"})

    def up(op: Any) -> None:
        op.create_pgfence()
        op.execute("CREATE TABLE tenant.account (id int PRIMARY KEY, version int NOT NULL)")
        op.add_fence("account", resource="a")
        op.add_version_trigger("account")
        op.upgrade_pgfence(1, VERSION)

    perform(translated, up)
    with tenant.connect() as connection:
        assert found(connection, OURS) == [("tenant",)]
        assert found(connection, GUARDED) == [("account", "pgfence_fence"), ("account", "pgfence_version")]
        assert found(connection, "SELECT to_regproc('public.pgfence_version_v1') IS NULL") == [(True,)]

    def down(op: Any) -> None:
        op.drop_version_trigger("account")
        op.drop_fence("account")
        op.upgrade_pgfence(VERSION, 1)
        op.drop_pgfence()

    perform(translated, down)
    with tenant.connect() as connection:
        assert found(connection, OURS) == found(connection, GUARDED) == []


def test_tables_that_are_not_there_are_not_brought_to_a_version(engine: Engine, tmp_path: Path) -> None:
    """A misspelt schema ends the migration, or the script of it, and no second installation comes to be."""
    with pytest.raises(SchemaError, match="no tables of pgfence in 'lokcs'.*create_pgfence"):
        perform(engine, lambda op: op.upgrade_pgfence(1, VERSION, schema="lokcs"))
    project = Project(tmp_path / "alembic", engine, MetaData())
    project.write(f"op.upgrade_pgfence(1, {VERSION}, schema='lokcs')")
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False), autocommit=True) as psql:
        with pytest.raises(psycopg.errors.RaiseException, match="not installed here"):
            psql.execute(project.sql().encode())
        psql.execute("ROLLBACK")
        assert psql.execute("SELECT to_regnamespace('lokcs')").fetchone() == (None,)
