"""COPY, cascades, plain COMMIT and forged settings do not bypass a fence. Only a superuser can bypass it."""

from __future__ import annotations

import asyncio
import io
import secrets
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import Connection, text
from sqlalchemy.exc import IntegrityError

from pgfence import schema
from pgfence.config import configure
from pgfence.errors import FenceRequiredError, SchemaError, StaleFencingTokenError
from pgfence.fence import fence
from support.fences import forged, guarded, overtake, rows
from support.transactions import connection, factory, run, session, sqlstate_of, value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.worlds import Contender, World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def table(admin: psycopg.Connection[Any], dsn: str, name: str) -> Iterator[str]:
    """A guarded table of the test's resource, with the rows (1, 100), (2, 100)."""
    with guarded(admin, dsn, name) as made:
        yield made


@pytest.fixture
def diary(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A table without a fence."""
    made = f"diary_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {made} (entry text)".encode())
    yield made
    admin.execute(f"DROP TABLE {made}".encode())


async def swallowed(who: Contender, work: Any, name: str, token: int) -> None:
    """Catch the rejection of a gate inside a savepoint, and continue."""
    nested = await who.call(work.begin_nested)
    with pytest.raises(StaleFencingTokenError):
        await who.call(lambda: fence(work, name, token, after_reads=True))
    await who.call(nested.rollback)


# ---------------------------------------------------------------- after a refusal


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("opened", [connection, session])
async def test_no_later_commit_includes_the_rejected_writes(
    world: World, admin: psycopg.Connection[Any], name: str, diary: str, opened: Any
) -> None:
    """The rejected commit also ends the server's transaction, so the next one on that connection starts from scratch."""
    overtake(admin, name, 2)
    async with opened(world, world.engine()) as work:
        await run(world, work, f"INSERT INTO {diary} VALUES ('stale')")
        await swallowed(world, work, name, 1)
        with pytest.raises(StaleFencingTokenError, match="rejected before"):
            await world.call(work.commit)
        await world.call(work.rollback)
        await run(world, work, f"INSERT INTO {diary} VALUES ('next')")
        await world.call(work.commit)
    assert rows(admin, diary) == [("next",)]


@pytest.mark.parametrize("opened", [connection, session])
async def test_after_a_rollback_the_same_session_works_on(
    world: World, admin: psycopg.Connection[Any], name: str, table: str, opened: Any
) -> None:
    """The block on the commit ends with the transaction: after the rollback the session enters with the newest token and writes."""
    overtake(admin, name, 2)
    async with opened(world, world.engine()) as work:
        for _ in range(2):
            await swallowed(world, work, name, 1)
            await world.call(work.rollback)
        await world.call(fence, work, name, 2)
        await run(world, work, f"UPDATE {table} SET amount = 1")
        await world.call(work.commit)
    assert rows(admin, table) == [(1, 1), (2, 1)]


async def test_a_block_that_swallows_the_rejection_raises_it_at_its_end(
    world: World, admin: psycopg.Connection[Any], name: str, diary: str
) -> None:
    """`begin()` of a session factory commits at its end, and raises the rejection again."""
    overtake(admin, name, 2)
    with pytest.raises(StaleFencingTokenError, match="rejected before"):
        async with world.enter(factory(world, world.engine()).begin()) as work:
            await run(world, work, f"INSERT INTO {diary} VALUES ('stale')")
            await swallowed(world, work, name, 1)
    assert rows(admin, diary) == []


async def test_an_error_swallowed_in_the_server_opens_no_guarded_table(
    world: World, admin: psycopg.Connection[Any], name: str, table: str
) -> None:
    """A function that catches PF001 and continues is rejected again at its next statement."""
    overtake(admin, name, 2)
    body = f"""
        DO $$ BEGIN
            BEGIN
                PERFORM pgfence_enter_gates_v1(ARRAY['{name}'], ARRAY[1::bigint]);
            EXCEPTION WHEN SQLSTATE 'PF001' THEN NULL;
            END;
            UPDATE {table} SET amount = 0;
        END $$"""
    engine = world.engine()
    async with session(world, engine) as work:
        await world.call(fence, work, name + " of others", 1)
        with pytest.raises(FenceRequiredError):
            await world.call(work.execute, text(body))
    assert rows(admin, table) == [(1, 100), (2, 100)]


# ---------------------------------------------------------------- past SQLAlchemy's statements


async def driver_of(world: World, work: Any) -> Any:
    """Return the driver's own connection."""
    if world.is_async:
        return (await work.get_raw_connection()).driver_connection
    return work.connection.driver_connection


async def copy(world: World, work: Any, table: str) -> None:
    """Copy a row into a table in the way of the driver."""
    raw, statement = await driver_of(world, work), f"COPY {table} FROM STDIN"
    match world.name:
        case "asyncpg":
            await raw.copy_records_to_table(table, records=[(3, 3)])
        case "psycopg_async":
            async with raw.cursor().copy(statement) as stream:
                await stream.write_row((3, 3))
        case "psycopg":
            with raw.cursor().copy(statement) as stream:
                stream.write_row((3, 3))
        case _:
            raw.cursor().copy_expert(statement, io.StringIO("3\t3\n"))


@pytest.mark.every_driver
async def test_copy_past_sqlalchemy_is_fenced(
    world: World, admin: psycopg.Connection[Any], name: str, table: str
) -> None:
    """COPY through the driver is rejected without a gate, and passes in a transaction that has entered it."""
    async with connection(world, world.engine()) as work:
        await value(world, work, "SELECT 1")
        with pytest.raises(Exception, match="brought no token") as told:
            await copy(world, work, table)
        assert sqlstate_of(told.value) == "PF002"
        await world.call(work.rollback)
        await world.call(fence, work, name, 1)
        await copy(world, work, table)
        await world.call(work.commit)
    assert rows(admin, table) == [(1, 100), (2, 100), (3, 3)]


@pytest.mark.every_driver
async def test_a_commit_past_sqlalchemy_leaves_the_gate(
    world: World, admin: psycopg.Connection[Any], name: str
) -> None:
    """After COMMIT in plain text, or on the driver's own connection, the next transaction has entered no gate."""
    engine = world.engine()

    def in_plain_text(work: Connection) -> None:
        work.exec_driver_sql("COMMIT")

    def by_the_driver(work: Connection) -> None:
        work.connection.dbapi_connection.commit()  # type: ignore[union-attr]

    for token, end in enumerate((in_plain_text, by_the_driver), start=1):
        async with connection(world, engine) as work:
            await world.call(fence, work, name, token)
            await (world.call(work.run_sync, end) if world.is_async else world.call(end, work))
            overtake(admin, name, token + 1)
            with pytest.raises(StaleFencingTokenError):
                await world.call(fence, work, name, token)


async def test_a_cascade_from_an_unfenced_parent_is_rejected(
    world: World, admin: psycopg.Connection[Any], name: str, table: str, diary: str
) -> None:
    """Rows that a foreign key would delete are fenced too; without the gate, no row of the parent is deleted either."""
    admin.execute(f"ALTER TABLE {diary} ADD COLUMN id int PRIMARY KEY DEFAULT 1".encode())
    admin.execute(f"INSERT INTO {diary} VALUES ('parent', 1), ('parent', 2)".encode())
    admin.execute(
        f"ALTER TABLE {table} ADD CONSTRAINT up FOREIGN KEY (id) REFERENCES {diary} (id) ON DELETE CASCADE".encode()
    )
    engine = world.engine()
    try:
        async with session(world, engine) as work:
            await world.call(fence, work, name + " of others", 1)
            with pytest.raises(FenceRequiredError):
                await run(world, work, f"DELETE FROM {diary}")
        async with session(world, engine) as work:
            await world.call(fence, work, name, 1)
            await run(world, work, f"DELETE FROM {diary} WHERE id = 1")
            await world.call(work.commit)
        assert rows(admin, table) == [(2, 100)]
    finally:
        admin.execute(f"ALTER TABLE {table} DROP CONSTRAINT up".encode())


async def test_known_ways_around_are_those_of_a_superuser(
    world: World, admin: psycopg.Connection[Any], table: str
) -> None:
    """A replication role and a disabled trigger write past every fence, as they do past every trigger and foreign key."""
    engine = world.engine()
    async with session(world, engine) as work:
        await run(world, work, "SET LOCAL session_replication_role = replica")
        await run(world, work, f"UPDATE {table} SET amount = 1")
        await world.call(work.commit)
    admin.execute(f"ALTER TABLE {table} DISABLE TRIGGER ALL".encode())
    async with session(world, engine) as work:
        await run(world, work, f"UPDATE {table} SET amount = 2 WHERE id = 2")
        await world.call(work.commit)
    assert rows(admin, table) == [(1, 1), (2, 2)]


# ---------------------------------------------------------------- how a refusal is told


@pytest.mark.every_driver
async def test_rejections_are_translated_on_every_copy_of_the_engine(world: World, name: str, table: str) -> None:
    """The first fence may be entered on a copy with options; statements of the engine itself are translated too."""
    engine = world.engine()
    async with connection(world, engine.execution_options(stream_results=True)) as work:
        await world.call(fence, work, name, 1)
    async with session(world, engine) as work:
        with pytest.raises(FenceRequiredError, match=r"lease\.begin") as told:
            await run(world, work, f"DELETE FROM {table}")
    assert (told.value.resource, told.value.sqlstate) == (name, "PF002")


@pytest.mark.every_driver
async def test_other_errors_stay_as_they_are(world: World, name: str, table: str) -> None:
    """Inside a gate, a violated constraint is SQLAlchemy's IntegrityError, and does not block later commits."""
    async with session(world, world.engine()) as work:
        await world.call(fence, work, name, 1)
        nested = await world.call(work.begin_nested)
        with pytest.raises(IntegrityError):
            await run(world, work, f"INSERT INTO {table} VALUES (1, 1)")
        await world.call(nested.rollback)
        await world.call(work.commit)


# ---------------------------------------------------------------- where it stands


@pytest.mark.every_driver
async def test_a_role_without_rights_gets_the_grant_in_the_error(world: World, role: Any, name: str) -> None:
    """A role without privileges on gates gets a SchemaError with the GRANT that the owner must run."""
    async with session(world, world.engine(dsn=role())) as work:
        with pytest.raises(SchemaError, match="GRANT SELECT, INSERT, UPDATE ON"):
            await world.call(fence, work, name, 1)


async def test_each_tenant_has_its_own_gates(world: World, admin: psycopg.Connection[Any], name: str) -> None:
    """`schema_translate_map` selects the gates as it selects the application's tables; a prefix selects other ones."""
    tenant = f"tenant_{name[-12:]}"
    admin.execute(f"CREATE SCHEMA {tenant}".encode())
    engine = world.engine()
    configure(engine, prefix="own_")
    mapped = engine.execution_options(schema_translate_map={None: tenant})
    try:
        await world.call(schema.create_all, mapped)
        overtake(admin, name, 9)
        async with connection(world, mapped) as work:
            await world.call(fence, work, name, 2)
            await world.call(work.commit)
        assert admin.execute(f"SELECT token FROM {tenant}.own_gate".encode()).fetchall() == [(2,)]
    finally:
        admin.execute(f"DROP SCHEMA {tenant} CASCADE".encode())


@pytest.mark.every_driver
@pytest.mark.async_only
async def test_a_task_cancelled_at_the_gate_leaves_nothing_there(
    world: World, admin: psycopg.Connection[Any], name: str, eventually: Any
) -> None:
    """A newer holder that is cancelled while it waits at the gate does not enter it, and the next token does."""
    engine, other = world.engine(), world.other()
    overtake(admin, name, 1)
    async with session(world, engine) as old, session(world, engine, other) as new:
        await world.call(fence, old, name, 1)
        entering = asyncio.create_task(other.call(fence, new, name, 2))
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%%enter_gate%%'"
        await eventually(lambda: admin.execute(waiting).fetchone())
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        await world.call(old.commit)
    await eventually(lambda: not admin.execute(waiting).fetchone())
    assert admin.execute("SELECT token FROM pgfence_gate WHERE resource = %s", [name]).fetchone() == (1,)
    overtake(admin, name, 2)


# ------------------------------------------------------------ a forged setting


@pytest.mark.parametrize(("token", "state"), [("1", "PF001"), ("x", "22P02"), ("", "PF002")])
def test_a_forged_setting_opens_no_table(
    admin: psycopg.Connection[Any], dsn: str, name: str, token: str, state: str
) -> None:
    """The statement trigger does not trust a setting: only a locked gate of that very token counts."""
    with guarded(admin, dsn, name) as table:
        overtake(admin, name, 2)
        admin.execute(f"SELECT {forged(name, token, stays=True)}".encode())
        with pytest.raises(psycopg.Error) as refused:
            admin.execute(f"UPDATE {table} SET amount = 0".encode())
        assert refused.value.sqlstate == state


def test_claiming_the_newest_token_locks_its_gate(admin: psycopg.Connection[Any], dsn: str, name: str) -> None:
    """A write that passed the statement trigger keeps newer holders out until its transaction ends."""
    with guarded(admin, dsn, name) as table, psycopg.connect(dsn, autocommit=True) as newer:
        overtake(admin, name, 2)
        with admin.transaction():
            admin.execute(f"SELECT {forged(name, 2)}".encode())
            admin.execute(f"UPDATE {table} SET amount = 0".encode())
            newer.execute("SET lock_timeout = 50")
            with pytest.raises(psycopg.Error) as refused:
                overtake(newer, name, 3)
            assert refused.value.sqlstate == "PF003"


async def test_a_write_that_no_token_allows_says_what_to_do_instead(
    world: World, name: str, table: str, admin: psycopg.Connection[Any]
) -> None:
    """With a resource for each row, TRUNCATE and a row with NULL are rejected, and no gate is advised."""
    admin.execute(f"ALTER TABLE {table} ADD book text".encode())
    engine = world.engine()
    await world.call(schema.add_fence, engine, table, resource=f"{name}:{{book}}")
    for statement, advice in (
        (f"TRUNCATE {table}", "Delete the rows of one resource, or drop the fence first$"),
        (f"UPDATE {table} SET book = NULL", "Set these columns; if the row is already stored, drop the fence first$"),
    ):
        async with connection(world, engine) as work:
            await world.call(fence, work, f"{name}:1", 1)
            with pytest.raises(FenceRequiredError, match=advice) as caught:
                await run(world, work, statement)
            assert caught.value.resource is None
