"""What a role needs for the operations: to make something in a schema, and nothing where all of it is there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, create_engine, make_url, text

from pgfence import schema
from pgfence._sql.storage import VERSION, TableNames
from pgfence._sql.tables import is_installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

RIGHTS = "GRANT USAGE, CREATE ON SCHEMA public TO {0}; CREATE SCHEMA own AUTHORIZATION {0}"


@pytest.fixture
def owner(own: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection of the database's owner."""
    with psycopg.connect(own, autocommit=True) as connection:
        yield connection


@pytest.fixture
def app(own: str, owner: psycopg.Connection[Any], role: Callable[..., str]) -> Iterator[Engine]:
    """An engine of a role that may make tables in `public` and owns the schema `own`, and may not make schemas."""
    least = make_url(role())
    owner.execute(RIGHTS.format(least.username).encode())
    engine = create_engine(least.set(drivername="postgresql+psycopg", database=make_url(own).database))
    yield engine
    engine.dispose()
    owner.execute(f"DROP OWNED BY {least.username} CASCADE".encode())


def perform(engine: Engine, work: Callable[[Any], Any]) -> None:
    with engine.begin() as connection:
        work(Operations(MigrationContext.configure(connection)))


@pytest.mark.parametrize("place", [None, "own"])
@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_a_role_with_create_on_a_schema_may_install(app: Engine, place: str | None, version: int) -> None:
    """A schema that is there needs no right to make schemas in the database, for none of the ways to install."""
    perform(app, lambda op: op.create_pgfence(schema=place, version=version))
    with app.begin() as connection:
        assert is_installed(connection, TableNames(place or "public"), version)
    perform(app, lambda op: op.drop_pgfence(schema=place))
    with psycopg.connect(app.url.set(drivername="postgresql").render_as_string(False), autocommit=True) as psql:
        psql.execute(schema.sql(schema=place).encode())
    with app.begin() as connection:
        assert is_installed(connection, TableNames(place or "public"))


def test_a_complete_installation_of_another_process_is_left_alone(
    app: Engine, engine: Engine, owner: psycopg.Connection[Any]
) -> None:
    """Where an administrator has installed, the operations need no right but to look, and wait for no writer of keys."""
    schema.create_all(engine)
    owner.execute(f"GRANT SELECT ON pgfence_schema_version TO {app.url.username}".encode())
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE pgfence_idempotency_key IN ROW EXCLUSIVE MODE"))

        def up(op: Any) -> None:
            op.execute("SET LOCAL lock_timeout = '2s'")
            op.create_pgfence()
            op.create_pgfence(version=1)
            op.upgrade_pgfence(1, VERSION)

        perform(app, up)


def test_two_roles_count_versions_each_in_its_own_table(
    app: Engine, engine: Engine, owner: psycopg.Connection[Any]
) -> None:
    """The function that another role has made is used as it is; one of another body is still to be made anew."""
    table = "CREATE TABLE {} (id int PRIMARY KEY, version int NOT NULL DEFAULT 1)"
    perform(app, lambda op: op.execute(table.format("mine")))
    owner.execute(table.format("theirs").encode())
    schema.add_version_trigger(engine, "theirs")
    perform(app, lambda op: op.add_version_trigger("mine"))
    schema.drop_version_trigger(app, "mine")
    schema.add_version_trigger(app, "mine")
    owner.execute("INSERT INTO mine VALUES (1); UPDATE mine SET id = 2")
    assert owner.execute("SELECT version FROM mine").fetchall() == [(2,)]
    owner.execute(
        "CREATE OR REPLACE FUNCTION pgfence_version_v1() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'"
    )
    schema.drop_version_trigger(engine, "mine")
    schema.add_version_trigger(engine, "mine")
    owner.execute("UPDATE mine SET id = 3")
    assert owner.execute("SELECT version FROM mine").fetchall() == [(3,)]
