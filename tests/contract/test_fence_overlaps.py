"""However a stale writer and a new holder overlap, no stale write survives the new holder's entry."""

from __future__ import annotations

import asyncio
import random
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import schema
from pgfence.errors import StaleFencingTokenError
from pgfence.fence import fence
from support.fences import forged, overtake, rows
from support.transactions import connection, run, session, value

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator

    import psycopg

    from support.worlds import Contender, World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]

STALE, NEW = 1, 2


@dataclass(frozen=True)
class Overlap:
    """A combination of what the new holder does and what the stale writer does, after it or at the same time."""

    new: str
    stale: str
    first_use: bool = False
    """Nobody has entered the gate before."""


OVERLAPS = {
    "update of the same row": Overlap(
        "UPDATE {0} SET by = 'new' WHERE id = 1", "UPDATE {0} SET by = 'stale' WHERE id = 1"
    ),
    "update of another row": Overlap(
        "UPDATE {0} SET by = 'new' WHERE id = 1", "UPDATE {0} SET by = 'stale' WHERE id = 2"
    ),
    "insert": Overlap("UPDATE {0} SET by = 'new' WHERE id = 1", "INSERT INTO {0} VALUES (4, 'stale')"),
    "insert again of what was deleted": Overlap(
        "DELETE FROM {0} WHERE id = 1",
        "INSERT INTO {0} VALUES (1, 'stale') ON CONFLICT (id) DO UPDATE SET by = 'stale'",
    ),
    "delete": Overlap("UPDATE {0} SET by = 'new' WHERE id = 1", "DELETE FROM {0} WHERE id = 1"),
    "bulk update": Overlap("UPDATE {0} SET by = 'new' WHERE id = 2", "UPDATE {0} SET by = 'stale'"),
    "first use": Overlap(
        "UPDATE {0} SET by = 'new' WHERE id = 1", "UPDATE {0} SET by = 'stale' WHERE id = 2", first_use=True
    ),
}


@pytest.fixture
def table(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of three rows, each with the token that wrote it."""
    made = f"overlap_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {made} (id int PRIMARY KEY, by text NOT NULL)".encode())
    admin.execute(f"INSERT INTO {made} SELECT i, 'before' FROM generate_series(1, 3) AS i".encode())
    yield made
    admin.execute(f"DROP TABLE {made}".encode())


@pytest.fixture(params=OVERLAPS)
def overlap(request: pytest.FixtureRequest, admin: psycopg.Connection[Any], name: str) -> Overlap:
    """One overlap, with the gate as it is at its beginning."""
    found = OVERLAPS[request.param]
    if not found.first_use:
        overtake(admin, name, STALE)
    return found


@pytest.fixture(params=["enters the gate", "claims its token and enters no gate"])
async def stale_write(
    request: pytest.FixtureRequest, world: World, name: str, table: str
) -> Callable[[Contender, Any, Overlap], Awaitable[None]]:
    """Return a function that sends a stale write, either inside the gate or past it with a forged setting."""
    past_the_gate = request.param != "enters the gate"
    if past_the_gate:
        await world.call(schema.add_fence, world.engine(), table, resource=name)

    async def write(who: Contender, work: Any, overlap: Overlap) -> None:
        if past_the_gate:
            await run(who, work, f"SELECT {forged(name, STALE)}")
        else:
            await who.call(fence, work, name, STALE)
        await run(who, work, overlap.stale.format(table))

    return write


async def waiting(admin: psycopg.Connection[Any], eventually: Any, table: str) -> None:
    """Wait until a session waits for a lock in the gate or in the table."""
    asked = (
        "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        " AND (query LIKE '%%enter_gate%%' OR query LIKE %s)"
    )
    await eventually(lambda: admin.execute(asked, [f"%{table}%"]).fetchone())


async def new_write(who: Contender, work: Any, overlap: Overlap, name: str, table: str) -> None:
    await who.call(fence, work, name, NEW)
    await run(who, work, overlap.new.format(table))


@pytest.mark.every_driver
@pytest.mark.matrix
async def test_a_stale_write_after_the_new_holders_commit_is_rejected(
    world: World, admin: psycopg.Connection[Any], name: str, table: str, overlap: Overlap, stale_write: Any
) -> None:
    """C100: any write of an overtaken holder raises and changes nothing: same row, other row, new row."""
    engine = world.engine()
    async with session(world, engine) as new:
        await new_write(world, new, overlap, name, table)
        await world.call(new.commit)
    left = rows(admin, table)
    async with session(world, engine) as stale:
        with pytest.raises(StaleFencingTokenError) as told:
            await stale_write(world, stale, overlap)
        with pytest.raises(Exception, match="cannot commit|rolled back"):
            await world.call(stale.commit)
            raise AssertionError("a refused transaction was rolled back")
    assert (told.value.resource, told.value.token, told.value.newest) == (name, STALE, NEW)
    assert rows(admin, table) == left


@pytest.mark.every_driver
@pytest.mark.matrix
async def test_a_stale_write_waits_for_the_new_holder_and_is_rejected(
    world: World,
    admin: psycopg.Connection[Any],
    name: str,
    table: str,
    overlap: Overlap,
    stale_write: Any,
    eventually: Any,
) -> None:
    """C100: before the new holder commits, a stale write waits at its gate, and is then rejected."""
    engine, second = world.engine(), world.other()
    async with session(world, engine) as new, connection(world, engine, second) as stale:
        await new_write(world, new, overlap, name, table)
        late = asyncio.create_task(stale_write(second, stale, overlap))
        await waiting(admin, eventually, table)
        await world.call(new.commit)
        left = rows(admin, table)
        with pytest.raises(StaleFencingTokenError):
            await late
        await second.call(stale.rollback)
    assert rows(admin, table) == left


@pytest.mark.every_driver
@pytest.mark.matrix
async def test_a_new_holder_waits_for_a_stale_writer_in_the_gate(
    world: World,
    admin: psycopg.Connection[Any],
    name: str,
    table: str,
    overlap: Overlap,
    stale_write: Any,
    eventually: Any,
) -> None:
    """A writer that entered before the new holder may still commit: the new one enters after that, and sees it."""
    engine, second = world.engine(), world.other()
    async with session(world, engine) as stale, session(world, engine, second) as new:
        await stale_write(world, stale, overlap)
        entering = asyncio.create_task(second.call(fence, new, name, NEW))
        await waiting(admin, eventually, table)
        await world.call(stale.commit)
        left = rows(admin, table)
        await entering
        assert [tuple(row) for row in await run(second, new, f"SELECT * FROM {table} ORDER BY id")] == left
        await second.call(new.commit)
        with pytest.raises(StaleFencingTokenError):
            await stale_write(world, stale, overlap)


async def test_a_new_holder_that_rolls_back_leaves_the_old_token_valid(
    world: World, admin: psycopg.Connection[Any], name: str, table: str, stale_write: Any, eventually: Any
) -> None:
    """A token counts in the gate from its commit on: until then the one before it was not overtaken."""
    overlap, engine, second = OVERLAPS["update of another row"], world.engine(), world.other()
    overtake(admin, name, STALE)
    async with session(world, engine) as new, session(world, engine, second) as stale:
        await new_write(world, new, overlap, name, table)
        late = asyncio.create_task(stale_write(second, stale, overlap))
        await waiting(admin, eventually, table)
        await world.call(new.rollback)
        await late
        await second.call(stale.commit)
    assert rows(admin, table) == [(1, "before"), (2, "stale"), (3, "before")]


# ---------------------------------------------------------------- many at a time


async def together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all functions at the same time. The first error ends the other functions before it propagates."""
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


async def log_of(admin: psycopg.Connection[Any], world: World, resource: str) -> str:
    """Return a guarded table whose rows are numbered in the order in which they were written."""
    made = f"log_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {made} (id bigserial, token int)".encode())
    await world.call(schema.add_fence, world.engine(), made, resource=resource)
    return made


@pytest.mark.every_driver
async def test_in_a_crowd_tokens_never_go_back(world: World, admin: psycopg.Connection[Any], name: str) -> None:
    """Six writers use older and newer tokens at random times; no row follows a row with a newer token."""
    engine = world.engine(pool_size=6)
    log = await log_of(admin, world, name)
    refused = 0

    async def writer(seed: int) -> None:
        nonlocal refused
        who, dice = world.other(), random.Random(seed)
        for step in range(12):
            async with session(world, engine, who) as work:
                token = max(1, step + dice.randint(-2, 2))
                try:
                    await who.call(fence, work, name, token)
                    await run(who, work, f"INSERT INTO {log} (token) VALUES ({token})")
                    await run(who, work, "SELECT pg_sleep(random() * 0.004)")
                    await who.call(work.commit)
                except StaleFencingTokenError:
                    refused += 1

    try:
        await together(writer(seed) for seed in range(6))
        order = [token for (token,) in admin.execute(f"SELECT token FROM {log} ORDER BY id".encode()).fetchall()]
    finally:
        admin.execute(f"DROP TABLE {log}".encode())
    assert order == sorted(order)
    assert len(order) + refused == 72
    assert refused


async def test_new_holders_at_one_gate_do_not_deadlock(world: World, name: str) -> None:
    """Three new holders that raise the same gate at once, repeatedly, wait for each other without a deadlock."""
    engine = world.engine(pool_size=3)

    async def holder(first: int) -> None:
        who = world.other()
        for token in range(first, 30, 3):
            async with session(world, engine, who) as work:
                try:
                    await who.call(fence, work, name, token)
                    await who.call(work.commit)
                except StaleFencingTokenError:
                    assert token < 29

    await together(holder(first) for first in (1, 2, 3))


async def test_gates_named_in_any_order_are_entered_in_one(world: World, name: str) -> None:
    """Four writers, three resources in random order, growing tokens: there is no deadlock."""
    engine = world.engine(pool_size=4)

    async def writer(seed: int) -> None:
        who, dice = world.other(), random.Random(seed)
        for token in range(1, 16):
            names = [f"{name} {i}" for i in range(3)]
            dice.shuffle(names)
            async with session(world, engine, who) as work:
                try:
                    await who.call(fence, work, dict.fromkeys(names, token))
                    await who.call(work.commit)
                except StaleFencingTokenError:
                    assert token < 15

    await together(writer(seed) for seed in range(4))


async def test_eight_writers_with_one_token_are_all_inside_at_once(world: World, name: str) -> None:
    """The same token takes the gate in shared mode: eight transactions are inside at the same time."""
    engine = world.engine(pool_size=8)
    who = [world.other() for _ in range(8)]
    async with session(world, engine) as first:
        await world.call(fence, first, name, 5)
        await world.call(first.commit)
    opened = [session(world, engine, one) for one in who]
    works = [await one.__aenter__() for one in opened]
    try:
        await together(one.call(fence, work, name, 5) for one, work in zip(who, works, strict=True))
        assert [await value(one, work, "SELECT 1") for one, work in zip(who, works, strict=True)] == [1] * 8
    finally:
        for one in opened:
            await one.__aexit__(None, None, None)
