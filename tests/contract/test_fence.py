"""`fence()` admits the newest token to a transaction; a rejected transaction cannot commit."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from pgfence import configure, schema
from pgfence.errors import (
    FenceRequiredError,
    SchemaError,
    StaleFencingTokenError,
    StandbyError,
    TransactionStateError,
)
from pgfence.fence import fence, fenced
from support.fences import forged, get_entered_token, overtake
from support.transactions import connection, factory, run, scoped, session, sqlstate_of, statements, value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from support.worlds import Contender, World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def ledger(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of amounts with one row of 100, not guarded."""
    table = f"ledger_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, amount int NOT NULL)")
    admin.execute(f"INSERT INTO {table} VALUES (1, 100)")
    yield table
    admin.execute(f"DROP TABLE {table}")


@pytest.fixture
async def guarded(world: World, ledger: str, name: str) -> str:
    """The same table, fenced by the resource of this test."""
    await world.call(schema.add_fence, world.engine(), ledger, resource=name)
    return ledger


async def on_sync(world: World, work: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of the sync core with a session or connection of this world."""
    if world.is_async:
        return await world.call(work.run_sync, function, *args)
    return await world.call(function, work, *args)


async def add(who: Contender, work: Any, ledger: str, amount: int) -> None:
    await run(who, work, f"UPDATE {ledger} SET amount = amount + {amount} WHERE id = 1")


def amount(admin: psycopg.Connection[Any], ledger: str) -> int:
    row = admin.execute(f"SELECT amount FROM {ledger} WHERE id = 1").fetchone()
    assert row is not None
    return int(row[0])


# ---------------------------------------------------------------- what it refuses, and what not


@pytest.mark.every_driver
async def test_only_the_newest_token_can_commit(world: World, name: str, ledger: str, admin: Any) -> None:
    """A stale token is rejected at the gate with both numbers, and the same token and newer tokens pass."""
    engine = world.engine()
    for token in (1, 1, 3):
        async with session(world, engine) as work:
            await world.call(fence, work, name, token)
            await add(world, work, ledger, 1)
            await world.call(work.commit)
    async with session(world, engine) as work:
        with pytest.raises(StaleFencingTokenError) as caught:
            await world.call(fence, work, name, 2)
    assert (caught.value.resource, caught.value.token, caught.value.newest) == (name, 2, 3)
    assert caught.value.sqlstate == "PF001"
    assert caught.value.http_status == 409
    assert amount(admin, ledger) == 103


async def test_holders_of_one_token_write_side_by_side(world: World, name: str, ledger: str, admin: Any) -> None:
    """Two transactions with the same token are inside at once: neither waits, and both commit."""
    engine, second = world.engine(), world.other()
    async with session(world, engine) as work:
        await world.call(fence, work, name, 1)
        await world.call(work.commit)
        await world.call(fence, work, name, 1)
        async with session(world, engine, second) as other:
            await asyncio.wait_for(second.call(fence, other, name, 1), 20)
            await add(second, other, ledger, 10)
            await second.call(other.commit)
        await add(world, work, ledger, 1)
        await world.call(work.commit)
    assert amount(admin, ledger) == 111


async def test_a_newer_holder_waits_for_older_writers_and_sees_their_rows(
    world: World, name: str, ledger: str, admin: Any, eventually: Any
) -> None:
    """A newer holder reads what older writers have committed, so no update is lost."""
    engine, newer = world.engine(), world.other()
    async with session(world, engine) as work, session(world, engine, newer) as other:
        await world.call(fence, work, name, 1)
        await add(world, work, ledger, 50)
        entering = asyncio.ensure_future(newer.call(fence, other, name, 2))
        await eventually(
            lambda: (
                admin.execute(
                    "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                ).rowcount
            )
        )
        assert not entering.done()
        await world.call(work.commit)
        await entering
        seen = await value(newer, other, f"SELECT amount FROM {ledger} WHERE id = 1")
        await run(newer, other, f"UPDATE {ledger} SET amount = {seen + 1} WHERE id = 1")
        await newer.call(other.commit)
    assert amount(admin, ledger) == 151


@pytest.mark.every_driver
async def test_a_token_above_the_leases_row_was_never_issued(world: World, name: str, admin: Any) -> None:
    """C080: a token from another resource, or from before a restore, is rejected as such."""
    admin.execute(
        "SELECT pgfence_acquire_lease_v2(%s, gen_random_uuid()::text, 30, 0, 0, NULL, NULL, NULL, NULL, '', NULL, 'lease')",
        (name,),
    )
    async with session(world, world.engine()) as work:
        with pytest.raises(
            StaleFencingTokenError, match=r"(?s)this server never issued it.*former primary.*engine\.dispose\(\)"
        ) as caught:
            await world.call(fence, work, name, 9)
    assert (caught.value.token, caught.value.newest) == (9, 1)


@pytest.mark.every_driver
async def test_several_resources_are_entered_by_one_statement_all_or_none(world: World, name: str, admin: Any) -> None:
    """All gates are entered in one round trip and in one order, and one stale token rejects all of them."""
    engine, names = world.engine(), {f"{name}:{n}": 1 for n in (3, 1, 2)}
    with statements(engine) as sent:
        async with session(world, engine) as work:
            await world.call(fence, work, names)
            await world.call(work.commit)
    assert len([text for text in sent if "enter_gates" in text]) == 1
    overtake(admin, f"{name}:2", 2)
    async with session(world, engine) as work:
        with pytest.raises(StaleFencingTokenError) as caught:
            await world.call(fence, work, names)
    assert caught.value.resource == f"{name}:2"


@pytest.mark.every_driver
async def test_a_connection_and_a_scoped_session_have_transactions_too(world: World, name: str, admin: Any) -> None:
    """A Core connection and a scoped session enter like a Session, and the namespace is part of the resource."""
    engine = world.engine()
    configure(engine, namespace="bank")
    overtake(admin, f"bank\x1f{name}", 5)
    async with connection(world, engine) as work:
        with pytest.raises(StaleFencingTokenError, match="bank:") as caught:
            await world.call(fence, work, name, 4)
        await world.call(work.rollback)
        async with world.enter(fenced(work, name, 5)):
            assert await on_sync(world, work, get_entered_token, f"bank\x1f{name}") == 5
    assert caught.value.newest == 5
    registry = scoped(world, engine)
    await world.call(fence, registry, {name: 5})
    await world.call(registry.remove)


# ---------------------------------------------------------------- where it may stand


async def test_a_gate_entered_after_a_read_is_rejected_and_can_be_allowed(world: World, name: str, ledger: str) -> None:
    """What was read before may be older than the last holder's commit: an error, unless `after_reads=True`."""
    async with session(world, world.engine()) as work:
        await value(world, work, f"SELECT amount FROM {ledger}")
        with pytest.raises(TransactionStateError, match="first statement"):
            await world.call(fence, work, name, 1)
        await world.call(fence, work, name, 1, after_reads=True)
        await world.call(work.commit)
        await world.call(fence, work, name, 1)  # the first of the next transaction


async def test_on_a_connection_too_the_gate_comes_first(world: World, name: str, ledger: str) -> None:
    """On a Core connection too, the gate must be entered right after BEGIN."""
    async with connection(world, world.engine()) as work:
        await world.call(work.begin)
        await world.call(fence, work, name, 1)
        await world.call(work.rollback)
        await value(world, work, f"SELECT amount FROM {ledger}")
        with pytest.raises(TransactionStateError, match="first statement"):
            await world.call(fence, work, name, 1)


async def test_settings_sent_by_a_begin_hook_are_not_reads(world: World, name: str) -> None:
    """A begin hook may send settings, such as a tenant for row-level security, before the gate is entered."""
    async with session(world, world.engine()) as work:
        sync = getattr(work, "sync_session", work)
        event.listen(sync, "after_begin", lambda s, t, c: c.execute(text("SELECT set_config('app.tenant', '7', true)")))
        await world.call(fence, work, name, 1)
        assert await value(world, work, "SELECT current_setting('app.tenant')") == "7"
        assert await value(world, work, f"SELECT token FROM pgfence_gate WHERE resource = '{name}'") == 1


@pytest.mark.every_driver
async def test_an_error_with_our_sqlstate_from_another_program_is_unchanged(world: World, name: str) -> None:
    """An error of another program with SQLSTATE PF001 is raised unchanged."""
    raised = "DO $$ BEGIN RAISE EXCEPTION 'not ours' USING ERRCODE = 'PF001', DETAIL = '{no json'; END $$"
    async with session(world, world.engine()) as work:
        await world.call(fence, work, name, 1)
        with pytest.raises(DBAPIError, match="not ours"):
            await world.call(work.execute, text(raised))
        await world.call(work.rollback)


async def test_entering_again_costs_nothing_and_more_gates_may_follow(world: World, name: str, ledger: str) -> None:
    """Entering the same gate again takes no round trip, and another gate can be entered right after it."""
    engine = world.engine()
    async with session(world, engine) as work:
        await world.call(fence, work, name, 1)
        with statements(engine) as sent:
            await world.call(fence, work, name, 1)
        assert sent == []
        await world.call(fence, work, f"{name}:2", 1)
        await value(world, work, f"SELECT amount FROM {ledger}")
        await world.call(fence, work, name, 1)
        with pytest.raises(TransactionStateError):
            await world.call(fence, work, f"{name}:3", 1)


async def test_a_session_on_a_connection_of_a_test_may_have_had_statements(
    world: World, name: str, ledger: str
) -> None:
    """Rollback-isolated tests begin the transaction outside and fill tables in it: the code under test enters its gate."""
    async with connection(world, world.engine()) as outer:
        await world.call(outer.begin)
        await run(world, outer, f"INSERT INTO {ledger} VALUES (2, 0)")
        for mode in ("create_savepoint", "rollback_only"):
            async with session(world, outer, join_transaction_mode=mode) as work:
                await world.call(fence, work, name, 1)
                await world.call(work.commit)
        entered = text("SELECT token FROM pgfence_gate WHERE resource = :name")
        assert (await world.call(outer.execute, entered, {"name": name})).scalar() == 1
        await world.call(outer.rollback)
        assert (await world.call(outer.execute, entered, {"name": name})).scalar() is None


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_leaving_fenced_raises_if_its_transaction_ended(world: World, name: str, end: str) -> None:
    """If the transaction ends inside the block, leaving it raises an error, unless the block raised one."""
    async with session(world, world.engine()) as work:
        with pytest.raises(TransactionStateError, match="ended inside the block"):
            async with world.enter(fenced(work, name, 1)):
                await world.call(getattr(work, end))
        with pytest.raises(ZeroDivisionError):
            async with world.enter(fenced(work, name, 1)):
                await world.call(getattr(work, end))
                raise ZeroDivisionError
        async with world.enter(fenced(work, name, 1)):
            await run(world, work, "SELECT 1")
        await world.call(work.commit)


@pytest.mark.every_driver
async def test_autocommit_is_rejected(world: World, name: str) -> None:
    """Autocommit is rejected, because the gate would be left at the end of the statement that entered it."""
    engine = world.engine(isolation_level="AUTOCOMMIT")
    async with session(world, engine) as work:
        with pytest.raises(TransactionStateError, match="autocommit"):
            await world.call(fence, work, name, 1)


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_waiter_with_an_old_snapshot_gets_a_serialization_failure(
    world: World, name: str, admin: Any, eventually: Any, level: str
) -> None:
    """With a snapshot older than the gate PostgreSQL itself raises 40001, never a stale read."""
    engine, newer = world.engine(), world.other()
    overtake(admin, name, 1)
    async with session(world, engine) as work, session(world, world.engine(isolation_level=level), newer) as other:
        await world.call(fence, work, name, 2)
        entering = asyncio.ensure_future(newer.call(fence, other, name, 3))
        await eventually(
            lambda: (
                admin.execute(
                    "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                ).rowcount
            )
        )
        await world.call(work.commit)
        with pytest.raises(DBAPIError) as caught:
            await entering
        assert sqlstate_of(caught.value) == "40001"
        await newer.call(other.rollback)
        await newer.call(fence, other, name, 3)


async def test_the_first_snapshot_of_a_newer_holder_is_older_than_its_wait(
    world: World, name: str, ledger: str, admin: psycopg.Connection[Any], eventually: Callable[..., Any]
) -> None:
    """In REPEATABLE READ it does not see what it waited for. A write of the same row fails, and the next transaction sees all."""
    overtake(admin, name, 1)
    engine, newer = world.engine(isolation_level="REPEATABLE READ"), world.other()
    amount = f"SELECT amount FROM {ledger}"
    waits = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with session(world, engine) as work, session(world, engine, newer) as other:
        await world.call(fence, work, name, 1)
        await run(world, work, f"UPDATE {ledger} SET amount = 70")
        entering = asyncio.ensure_future(newer.call(fence, other, name, 2))
        await eventually(lambda: admin.execute(waits).rowcount)
        await world.call(work.commit)
        await entering
        assert await value(newer, other, amount) == 100
        with pytest.raises(DBAPIError) as caught:
            await run(newer, other, f"UPDATE {ledger} SET amount = amount + 1")
        assert sqlstate_of(caught.value) == "40001"
        await newer.call(other.rollback)
        await newer.call(fence, other, name, 2)
        assert await value(newer, other, amount) == 70


@pytest.mark.parametrize(
    ("resource", "token", "kind"),
    [
        ("r", 0, ValueError),
        ("r", -1, ValueError),
        ("r", 2**63, ValueError),
        ("r", True, TypeError),
        ("r", "1", TypeError),
        ("r", None, TypeError),
        ("", 1, ValueError),
        ("a\x1fb", 1, ValueError),
        ("x" * 256, 1, ValueError),
        (7, 1, TypeError),
        ({}, None, ValueError),
        ({"r": 1}, 1, TypeError),
        ({"r": 0}, None, ValueError),
    ],
)
@pytest.mark.parametrize("function", [fence, fenced])
def test_bad_resources_and_tokens_are_rejected_before_a_statement(
    function: Any, resource: Any, token: Any, kind: type[Exception]
) -> None:
    """A name that is too long, and a token below 1 or of another type, raise an error before a statement is sent."""
    with pytest.raises(kind):
        function(Session(), resource, token)


async def test_objects_without_their_own_transaction_are_rejected(world: World, name: str) -> None:
    """An engine or a factory has no transaction: the message says what to do."""
    engine = world.engine()
    for thing in (engine, factory(world, engine)):
        with pytest.raises(TypeError, match="open a transaction first"):
            fence(thing, name, 1)
    with pytest.raises(TypeError, match="not int"):
        fence(1, name, 1)  # type: ignore[call-overload]


@pytest.mark.every_driver
async def test_without_the_tables_the_command_is_named(world: World, name: str) -> None:
    """A fence in a schema where nothing is installed raises SchemaError, which says how to fix it."""
    engine = world.engine()
    configure(engine, schema="nowhere")
    async with session(world, engine) as work:
        with pytest.raises(SchemaError) as caught:
            await world.call(fence, work, name, 1)
    assert caught.value.command == "pgfence install --schema nowhere"


@pytest.mark.every_driver
async def test_in_a_read_only_transaction_the_primary_is_named(world: World, name: str) -> None:
    """In a read-only transaction the error says that a gate must be entered on the primary."""
    async with session(world, world.engine()) as work:
        await run(world, work, "SET TRANSACTION READ ONLY")
        with pytest.raises(StandbyError, match="read-only transaction.* Begin on the primary"):
            await world.call(fence, work, name, 1, after_reads=True)


# ---------------------------------------------------------------- refusals of the database, and what follows them


@pytest.mark.every_driver
async def test_a_write_that_entered_no_gate_raises_fence_required(
    world: World, name: str, guarded: str, admin: Any
) -> None:
    """PF002 reaches the caller as FenceRequiredError for every kind of statement, Core or ORM."""
    engine = world.engine()
    async with session(world, engine) as work:
        await world.call(fence, work, f"{name}:other", 1)
        with pytest.raises(FenceRequiredError) as caught:
            await add(world, work, guarded, 1)
    assert caught.value.resource == name
    assert caught.value.sqlstate == "PF002"
    assert amount(admin, guarded) == 100


EVERY = {
    "insert": "INSERT INTO {0} VALUES (2, 0)",
    "upsert": "INSERT INTO {0} VALUES (1, 0) ON CONFLICT (id) DO UPDATE SET amount = 0",
    "update": "UPDATE {0} SET amount = 0",
    "no row": "UPDATE {0} SET amount = 0 WHERE id = 99",
    "delete": "DELETE FROM {0}",
    "truncate": "TRUNCATE {0}",
    "merge": "MERGE INTO {0} USING (VALUES (1)) AS v(id) ON {0}.id = v.id WHEN MATCHED THEN UPDATE SET amount = 0",
    "forged": "UPDATE {0} SET amount = 0 WHERE {1} <> ''",
}


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("kind", EVERY)
async def test_an_overtaken_holder_cannot_write_by_any_statement(
    world: World, name: str, guarded: str, admin: Any, kind: str
) -> None:
    """A savepoint's rollback left the gate and a newer holder came: the token that is still claimed is rejected."""
    if kind == "merge" and admin.info.server_version < 150000:
        pytest.skip("MERGE is of PostgreSQL 15")
    overtake(admin, name, 2)
    async with session(world, world.engine()) as work:
        await world.call(fence, work, f"{name}:other", 1)
        await run(world, work, f"SELECT {forged(name, 1)}")
        with pytest.raises(StaleFencingTokenError) as caught:
            await run(world, work, EVERY[kind].format(guarded, forged(name, 1)))
        assert (caught.value.token, caught.value.newest) == (1, 2)
    assert amount(admin, guarded) == 100


async def test_a_savepoint_rolled_back_takes_the_gate_with_it(
    world: World, name: str, guarded: str, admin: Any
) -> None:
    """A gate that was entered inside a savepoint is left with its rollback, and must be entered again."""
    async with session(world, world.engine()) as work:
        nested = await world.call(work.begin_nested)
        await world.call(fence, work, name, 1)
        assert await on_sync(world, work, get_entered_token, name) == 1
        await world.call(nested.rollback)
        assert await on_sync(world, work, get_entered_token, name) is None
        with pytest.raises(FenceRequiredError):
            await add(world, work, guarded, 1)
        await world.call(work.rollback)
        await world.call(fence, work, name, 1)
        nested = await world.call(work.begin_nested)
        await world.call(nested.rollback)
        assert await on_sync(world, work, get_entered_token, name) == 1
        await add(world, work, guarded, 1)
        await world.call(work.commit)
        assert await on_sync(world, work, get_entered_token, name) is None
    assert amount(admin, guarded) == 101


async def test_a_rejection_inside_a_savepoint_blocks_the_commit(
    world: World, name: str, ledger: str, admin: Any
) -> None:
    """If the caller catches the error and continues, the commit is rejected until the outermost rollback."""
    overtake(admin, name, 2)
    engine = world.engine()
    async with session(world, engine) as work:
        await world.call(fence, work, f"{name}:other", 1)
        await add(world, work, ledger, 1)
        nested = await world.call(work.begin_nested)
        with pytest.raises(StaleFencingTokenError):
            await world.call(fence, work, name, 1, after_reads=True)
        await world.call(nested.rollback)
        await add(world, work, ledger, 1)
        with pytest.raises(StaleFencingTokenError, match="cannot commit"):
            await world.call(work.commit)
        await world.call(work.rollback)
        assert amount(admin, ledger) == 100
        await world.call(fence, work, name, 2)
        await add(world, work, ledger, 1)
        await world.call(work.commit)
    assert amount(admin, ledger) == 101


@pytest.mark.every_driver
async def test_a_rejection_blocks_the_commit_of_a_connection_too(
    world: World, name: str, ledger: str, guarded: str, admin: Any
) -> None:
    """The same rule holds for Core, also if the trigger rejected the write."""
    overtake(admin, name, 2)
    async with connection(world, world.engine()) as work:
        outer = await world.call(work.begin)
        await world.call(fence, work, f"{name}:other", 1)
        nested = await world.call(work.begin_nested)
        await run(world, work, f"SELECT {forged(name, 1)}")
        with pytest.raises(StaleFencingTokenError):
            await add(world, work, guarded, 1)
        await world.call(nested.rollback)
        with pytest.raises(StaleFencingTokenError, match="cannot commit"):
            await world.call(outer.commit)
        await world.call(work.rollback)
        await world.call(fence, work, name, 2)
        await world.call(work.commit)


# ---------------------------------------------------------------- without Python


RECIPE = """
BEGIN;
SELECT pgfence_enter_gates_v1(ARRAY['{name}'], ARRAY[{token}::bigint]);
{statement};
COMMIT;
"""


@pytest.mark.skipif(shutil.which("psql") is None, reason="there is no psql")
@pytest.mark.parametrize("world", ["psycopg"], indirect=True)
async def test_other_languages_enter_the_gate_by_sql(
    world: World, dsn: str, name: str, guarded: str, admin: Any
) -> None:
    """Any client enters the gate with one statement after BEGIN. Without it, or with an old token, writes fail."""
    del world
    update = f"UPDATE {guarded} SET amount = amount + 1"
    copy = f"COPY {guarded} FROM STDIN;\n2\t0\n\\.\n"

    def psql(script: str) -> tuple[int, str]:
        done = subprocess.run(
            ["psql", "-X", "-v", "ON_ERROR_STOP=1", "-v", "VERBOSITY=verbose", dsn],
            input=script,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.returncode, done.stderr

    assert psql(RECIPE.format(name=name, token=1, statement=update))[0] == 0
    assert psql(RECIPE.format(name=name, token=1, statement=copy))[0] == 0
    overtake(admin, name, 2)
    for script, state in [
        (RECIPE.format(name=name, token=1, statement=update), "PF001"),
        (update, "PF002"),
        (copy, "PF002"),
    ]:
        code, told = await asyncio.to_thread(psql, script)
        assert code != 0
        assert state in told
    assert amount(admin, guarded) == 101
