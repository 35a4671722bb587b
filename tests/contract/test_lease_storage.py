"""The tables of leases: missing or altered tables, required privileges, one schema per tenant."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import schema
from pgfence.config import configure
from pgfence.errors import LockTimeoutError, SchemaError
from pgfence.lease import AsyncLease, Lease
from support.leases import lease
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins

REF = {"name": "a", "lease_id": "00000000-0000-0000-0000-000000000001", "token": 1}


@pytest.fixture
def own_schema(admin: psycopg.Connection[Any], name: str) -> Iterator[str]:
    """The name of a schema that is not there yet."""
    own = f"at_{name[-12:]}"
    yield own
    admin.execute(f"DROP SCHEMA IF EXISTS {own} CASCADE".encode())


async def given(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


async def refused(world: World, engine: Any, name: str) -> list[SchemaError]:
    """Return the errors of every verb, all of them a SchemaError."""
    one = lease(world, engine, name)
    kind = world.pick(Lease, AsyncLease)
    errors = []
    for call in (one.try_acquire, one.acquire, one.holders, one.is_held, lambda: kind.adopt(engine, REF)):
        with pytest.raises(SchemaError) as caught:
            await world.call(call)
        errors.append(caught.value)
    return errors


@pytest.mark.every_driver
async def test_without_tables_every_verb_names_the_command(world: World, name: str, own_schema: str) -> None:
    """Without tables the error of every method names the command; after it was run, the same engine works."""
    engine = world.engine()
    configure(engine, schema=own_schema)
    for error in await refused(world, engine, name):
        assert error.command == f"pgfence install --schema {own_schema}"
        assert error.command in str(error)
        assert f"in database {world.dsn.rpartition('/')[2]!r}, schema {own_schema!r}: run" in str(error)
    await given(schema.create_all(engine))
    async with world.enter(lease(world, engine, name).hold()) as held:
        assert held.token == 1


@pytest.mark.parametrize("world", ["psycopg", "asyncpg"], indirect=True)
async def test_without_a_schema_the_error_names_the_search_path(world: World, name: str) -> None:
    """The error names the search path, because the tables are often in another schema or database."""
    engine = world.engine()
    configure(engine, prefix="absent_")
    there = (
        f"in database {world.dsn.rpartition('/')[2]!r}, on the search path '\"$user\", public': run `pgfence install"
    )
    for error in await refused(world, engine, name):
        assert there in str(error)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("ALTER TABLE {}.pgfence_lease ALTER expires_at TYPE timestamp", "timestamp without time zone"),
        ("ALTER TABLE {}.pgfence_lease DROP evicted", "evicted is missing"),
        ("DELETE FROM {}.pgfence_schema_version", "version 0"),
        ("DROP TABLE {}.pgfence_schema_version", "pgfence install"),
    ],
)
async def test_altered_tables_are_not_used(
    world: World, name: str, own_schema: str, admin: psycopg.Connection[Any], harm: str, message: str
) -> None:
    """C073: a naive timestamp, a missing column, another version: found before the first lease, and named."""
    engine = world.engine()
    configure(engine, schema=own_schema)
    await given(schema.create_all(engine))
    admin.execute(harm.format(own_schema).encode())
    for error in await refused(world, engine, name):
        assert message in str(error)


async def test_functions_that_are_missing_are_named_too(
    world: World, name: str, own_schema: str, admin: psycopg.Connection[Any]
) -> None:
    """The error names missing functions too, as after a plain `metadata.create_all()`."""
    engine = world.engine()
    configure(engine, schema=own_schema)
    await given(schema.create_all(engine))
    admin.execute(f"DROP FUNCTION {own_schema}.pgfence_acquire_lease_v2".encode())
    for call in (lease(world, engine, name).try_acquire, lease(world, engine, name).acquire):
        with pytest.raises(SchemaError, match="pgfence install"):
            await world.call(call)


RIGHTS = {"lease": "SELECT, INSERT, UPDATE", "gate": "SELECT", "checkpoint": "SELECT", "schema_version": "SELECT"}


@pytest.mark.every_driver
async def test_a_role_needs_the_documented_rights_and_no_more(
    world: World, name: str, own_schema: str, role: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """Without one of them the error contains a GRANT; with them a lease is acquired, renewed, handed over, adopted, released."""
    owner = world.engine()
    configure(owner, schema=own_schema)
    await given(schema.create_all(owner))
    least = role()
    engine = world.engine(dsn=least)
    configure(engine, schema=own_schema)
    for error in await refused(world, engine, name):
        assert error.sqlstate == "42501"
        assert error.command.startswith("GRANT ")
    who = least.split("//")[1].split(":")[0]
    for table, rights in RIGHTS.items():
        admin.execute(f"GRANT {rights} ON {own_schema}.pgfence_{table} TO {who}".encode())
    admin.execute(f"GRANT USAGE ON SCHEMA {own_schema} TO {who}".encode())
    held = await world.call(lease(world, engine, name, ttl=2).acquire)
    before = held.expires_at
    await eventually(lambda: held.expires_at > before)
    adopted = await world.call(world.pick(Lease, AsyncLease).adopt, engine, await world.call(held.hand_over))
    await world.call(adopted.release)


async def test_each_tenant_has_its_own_leases(world: World, name: str, own_schema: str) -> None:
    """One engine, a `schema_translate_map` for each: the same name is held in both, and waits inside one."""
    engine = world.engine()
    configure(engine, schema="tenant")
    tenants = [
        engine.execution_options(schema_translate_map={"tenant": one}) for one in (own_schema, f"{own_schema}_b")
    ]
    for tenant in tenants:
        await given(schema.create_all(tenant))
    first, second = [lease(world, tenant, name) for tenant in tenants]
    async with world.enter(first.hold()) as one:
        async with world.enter(second.hold(timeout=0)) as two:
            assert (one.token, two.token) == (1, 1)
            assert one.lease_id != two.lease_id
            with pytest.raises(LockTimeoutError):
                await world.other().call(second.acquire, timeout=0.2)
        assert not await world.call(second.is_held)
        assert await world.call(first.is_held)
    await given(schema.drop_all(tenants[1]))
