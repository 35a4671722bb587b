"""The version trigger counts every UPDATE once, and `schema` creates and drops it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import BigInteger, Column, Integer, MetaData, Table, create_engine

from pgfence import schema
from pgfence.errors import SchemaError, TransactionStateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


@pytest.fixture
def table(admin: psycopg.Connection[Any]) -> str:
    """A table (id, version, title) with the row (1, 1, '')."""
    name = f"note_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, version bigint NOT NULL DEFAULT 1, title text)".encode())
    admin.execute(f"INSERT INTO {name} VALUES (1, 1, '')".encode())
    return name


def version(admin: psycopg.Connection[Any], table: str, column: str = "version") -> Any:
    found = admin.execute(f'SELECT "{column}" FROM {table} WHERE id = 1'.encode()).fetchone()
    assert found is not None
    return found[0]


def triggers(admin: psycopg.Connection[Any], table: str) -> list[str]:
    query = "SELECT tgname FROM pg_trigger WHERE tgrelid = %s::regclass AND NOT tgisinternal"
    return [name for (name,) in admin.execute(query, [table])]


async def test_every_update_counts_once(world: World, admin: psycopg.Connection[Any], table: str) -> None:
    """C064: plain SQL, an upsert, and a statement that assigns the version itself each raise it by exactly 1."""
    await world.call(schema.add_version_trigger, world.engine(), table)
    admin.execute(f"UPDATE {table} SET title = 'a'".encode())
    assert version(admin, table) == 2
    admin.execute(f"INSERT INTO {table} VALUES (1, 1, 'b') ON CONFLICT (id) DO UPDATE SET title = 'b'".encode())
    assert version(admin, table) == 3
    admin.execute(f"UPDATE {table} SET version = 99".encode())
    assert version(admin, table) == 4


async def test_adding_or_dropping_it_twice_changes_nothing(
    world: World, admin: psycopg.Connection[Any], table: str
) -> None:
    """A second add changes nothing, a drop ends the count, and a second drop is accepted."""
    engine = world.engine()
    await world.call(schema.add_version_trigger, engine, table)
    before = admin.execute("SELECT oid FROM pg_trigger WHERE tgrelid = %s::regclass", [table]).fetchall()
    await world.call(schema.add_version_trigger, engine, table)
    assert admin.execute("SELECT oid FROM pg_trigger WHERE tgrelid = %s::regclass", [table]).fetchall() == before
    for _ in range(2):
        await world.call(schema.drop_version_trigger, engine, table)
    admin.execute(f"UPDATE {table} SET title = 'a'".encode())
    assert (version(admin, table), triggers(admin, table)) == (1, [])


async def test_it_is_part_of_the_callers_transaction(world: World, admin: psycopg.Connection[Any], table: str) -> None:
    """On a Connection the trigger is there when that transaction commits, and not when it is rolled back."""
    async with world.enter(world.engine().connect()) as connection:
        await world.call(schema.add_version_trigger, connection, table)
        await world.call(connection.rollback)
        assert triggers(admin, table) == []
        await world.call(schema.add_version_trigger, connection, table)
        await world.call(connection.commit)
    assert triggers(admin, table) == ["pgfence_version"]


@pytest.fixture
def engine(dsn: str) -> Iterator[Any]:
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield engine
    engine.dispose()


def test_a_table_may_be_named_with_its_schema(engine: Any, admin: psycopg.Connection[Any]) -> None:
    """Schema and names may need quotes; a disabled trigger is created again."""
    place = f"Team {secrets.token_hex(4)}"
    admin.execute(f'CREATE SCHEMA "{place}"'.encode())
    admin.execute(f'CREATE TABLE "{place}"."Note \'s" (id int PRIMARY KEY, version int NOT NULL)'.encode())
    admin.execute(f'INSERT INTO "{place}"."Note \'s" VALUES (1, 7)'.encode())
    named = f'"{place}"."Note \'s"'
    schema.add_version_trigger(engine, f"{place}.Note 's")
    admin.execute(f"ALTER TABLE {named} DISABLE TRIGGER ALL".encode())
    schema.add_version_trigger(engine, Table("Note 's", MetaData(schema=place), Column("id", Integer)))
    admin.execute(f"UPDATE {named} SET id = 1".encode())
    assert version(admin, named) == 8
    admin.execute(f'DROP SCHEMA "{place}" CASCADE'.encode())


def test_partitions_count_too(engine: Any, admin: psycopg.Connection[Any]) -> None:
    """Rows of a partition created later count, and a row keeps its count when it moves to another partition."""
    name = f"parts_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {name} (id int, version int NOT NULL DEFAULT 1) PARTITION BY LIST (id)".encode())
    admin.execute(f"CREATE TABLE {name}_1 PARTITION OF {name} FOR VALUES IN (1)".encode())
    schema.add_version_trigger(engine, name)
    admin.execute(f"CREATE TABLE {name}_2 PARTITION OF {name} FOR VALUES IN (2)".encode())
    admin.execute(f"INSERT INTO {name} (id) VALUES (2)".encode())
    admin.execute(f"UPDATE {name} SET id = 2".encode())
    admin.execute(f"UPDATE {name} SET id = 1".encode())
    assert version(admin, name) == 3


def test_a_nullable_column_is_rejected_with_the_way_to_fill_it(engine: Any, admin: psycopg.Connection[Any]) -> None:
    """The command in the error fixes the column, and then the trigger can be created."""
    name = f"old_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, version bigint)".encode())
    admin.execute(f"INSERT INTO {name} VALUES (1)".encode())
    with pytest.raises(SchemaError, match="allows NULL") as refused:
        schema.add_version_trigger(engine, name)
    admin.execute(refused.value.command.encode())
    schema.add_version_trigger(engine, name)
    admin.execute(f"UPDATE {name} SET id = 1".encode())
    assert version(admin, name) == 2


def test_a_table_that_cannot_count_is_rejected(engine: Any, admin: psycopg.Connection[Any], table: str) -> None:
    """A missing table or column, a column of another type, another trigger of the same name, and autocommit raise errors."""
    for add in (schema.add_version_trigger, schema.drop_version_trigger):
        with pytest.raises(ValueError, match="does not exist"):
            add(engine, "nowhere")
        with pytest.raises(TypeError, match="must be a name, a Table"):
            add(engine, 7)  # type: ignore[call-overload]
    admin.execute(f"ALTER TABLE {table} RENAME version TO revision".encode())
    with pytest.raises(ValueError, match="has no column 'version'"):
        schema.add_version_trigger(engine, table)
    admin.execute(f"ALTER TABLE {table} ADD version uuid".encode())
    with pytest.raises(ValueError, match="is uuid"):
        schema.add_version_trigger(engine, table)
    admin.execute(f"ALTER TABLE {table} DROP version, ADD version int NOT NULL DEFAULT 1".encode())
    trigger = f"CREATE TRIGGER pgfence_version BEFORE UPDATE ON {table} FOR EACH ROW"
    admin.execute(f"{trigger} EXECUTE FUNCTION suppress_redundant_updates_trigger()".encode())
    for add in (schema.add_version_trigger, schema.drop_version_trigger):
        with pytest.raises(ValueError, match="unrelated trigger"):
            add(engine, table)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        with pytest.raises(TransactionStateError):
            schema.add_version_trigger(connection, table)


def test_a_column_with_a_long_name_has_its_own_function(engine: Any, admin: psycopg.Connection[Any]) -> None:
    """Two columns whose names begin alike are counted each by its own function."""
    made = []
    for last in "ab":
        name, column = f"long_{secrets.token_hex(6)}", "v" * 60 + last
        info = {"pgfence_version": True}
        table = Table(name, MetaData(), Column("id", Integer), Column(column, BigInteger, nullable=False, info=info))
        table.create(engine)
        schema.add_version_trigger(engine, table)
        admin.execute(f"INSERT INTO {name} VALUES (1, 1)".encode())
        made.append((name, column))
    for name, column in made:
        admin.execute(f"UPDATE {name} SET id = 1".encode())
        assert version(admin, name, column) == 2
