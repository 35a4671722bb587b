"""RateLimit: how many takes a window holds, waits, changes, a clock that is set back; invalid arguments."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy.orm import Session

from pgfence import AsyncRateLimit, RateLimit
from pgfence.errors import LockTimeoutError, SchemaError
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


def rate(world: World, engine: Any, name: str, *, limit: int = 3, per: Any = 60) -> Any:
    """Return the world's rate limit."""
    return world.pick(RateLimit, AsyncRateLimit)(engine, name, limit=limit, per=per)


def age(admin: psycopg.Connection[Any], name: str, seconds: float) -> None:
    """Move the stored takes into the past by a number of seconds."""
    back = "taken_at - make_interval(secs => %s)"
    admin.execute(f"UPDATE pgfence_rate_take SET taken_at = {back} WHERE name = %s".encode(), [seconds, name])
    admin.execute(
        b"UPDATE pgfence_rate_limit SET newest = newest - make_interval(secs => %s) WHERE name = %s", [seconds, name]
    )


@pytest.mark.every_driver
async def test_a_window_holds_at_most_the_limit(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Takes are allowed up to the limit, and then one for each that is older than the period."""
    one = rate(world, world.engine(), name)
    assert [await world.call(one.try_take) for _ in range(4)] == [True, True, True, False]
    age(admin, name, 59)
    assert not await world.call(one.try_take)
    age(admin, name, 1)
    assert [await world.call(one.try_take) for _ in range(4)] == [True, True, True, False]


async def test_units_are_taken_together_or_not_at_all(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A take of n needs n free units; a rejected one uses none."""
    one = rate(world, world.engine(), name)
    assert await world.call(one.try_take, 2)
    assert not await world.call(one.try_take, 2)
    assert await world.call(one.try_take)
    age(admin, name, 60)
    assert await world.call(one.try_take, 3)
    assert not await world.call(one.try_take)


async def test_a_burst_leaves_no_room_for_a_second_one(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A full burst just before the end of one minute and another just after it would be two in one window."""
    one = rate(world, world.engine(), name)
    await world.call(one.try_take)
    age(admin, name, 30)
    assert await world.call(one.try_take, 2)
    age(admin, name, 30)
    assert [await world.call(one.try_take) for _ in range(2)] == [True, False]


async def test_waiting_ends_when_the_oldest_take_leaves_the_window(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """wait() returns once the units are allowed, and each wait takes its own: no window holds a third take."""
    one = rate(world, world.engine(), name, limit=2, per=0.2)
    moments = []
    for _ in range(6):
        await world.call(one.wait, timeout=30)
        newest = admin.execute("SELECT newest FROM pgfence_rate_limit WHERE name = %s", [name]).fetchone()
        assert newest is not None
        moments.append(newest[0])
    gaps = [later - earlier for earlier, later in zip(moments, moments[2:], strict=False)]
    assert min(gaps) >= timedelta(seconds=0.2)


async def test_a_locked_row_is_waited_for(world: World, name: str, dsn: str) -> None:
    """While another session has the row locked, nothing is taken: a try is not allowed, a wait goes on."""
    one = rate(world, world.engine(), name)
    assert await world.call(one.try_take)
    with psycopg.connect(dsn) as locking:
        locking.execute("SELECT FROM pgfence_rate_limit WHERE name = %s FOR UPDATE", [name])
        assert not await world.call(one.try_take)
        waiting = asyncio.create_task(world.call(one.wait, timeout=30))
        await asyncio.sleep(0)
    await waiting


async def test_a_wait_that_cannot_succeed_fails_at_once(world: World, name: str) -> None:
    """The error says when the units may be allowed, and nothing was taken."""
    one = rate(world, world.engine(), name, limit=1, per=3600)
    await world.call(one.wait, timeout=0)
    with pytest.raises(LockTimeoutError, match="could not take 1 of the 1 units per 3600 s") as caught:
        await world.call(one.wait, timeout=30)
    assert 3500 < (caught.value.retry_after or 0) <= 3600


async def test_processes_agree_on_the_limit(world: World, name: str) -> None:
    """Another limit or period than the stored one raises; change() stores it for everyone."""
    engine = world.engine()
    await world.call(rate(world, engine, name).try_take)
    with pytest.raises(ValueError, match="is 3 per 60 s, not 4 per 60 s"):
        await world.call(rate(world, engine, name, limit=4).try_take)
    one = rate(world, engine, name)
    await world.call(one.change, limit=2)
    assert [await world.call(one.try_take) for _ in range(2)] == [True, False]
    await world.call(one.change, limit=5, per=30)
    assert [await world.call(one.try_take) for _ in range(4)] == [True, True, True, False]
    with pytest.raises(ValueError, match="is 5 per 30 s"):
        await world.call(rate(world, engine, name).try_take)


async def test_a_clock_that_is_set_back_blocks_for_one_period(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Stored takes that are ahead of the clock move back with it, so they block for one period at most."""
    one = rate(world, world.engine(), name, limit=2, per=60)
    assert await world.call(one.try_take, 2)
    age(admin, name, -3600)
    with pytest.raises(LockTimeoutError) as caught:
        await world.call(one.wait, timeout=0)
    assert 50 < (caught.value.retry_after or 0) <= 60
    age(admin, name, 60)
    assert await world.call(one.try_take, 2)


async def test_concurrent_takes_do_not_exceed_the_limit(world: World, name: str) -> None:
    """Of many takes at the same moment exactly as many succeed as the limit allows."""
    engine = world.engine()
    contenders = [world.other() for _ in range(8)]
    one = rate(world, engine, name, limit=5, per=3600)
    taken = await asyncio.gather(
        *(each.call(rate(world, engine, name, limit=5, per=3600).try_take) for each in contenders)
    )
    assert sum(taken) == 5
    assert not await world.call(one.try_take)


async def test_missing_rights_name_the_tables(world: World, name: str, role: Callable[..., str]) -> None:
    """The GRANT that the error proposes includes the tables of rate limits."""
    one = rate(world, world.engine(dsn=role()), name)
    for action in (one.try_take, one.change):
        with pytest.raises(SchemaError) as caught:
            await world.call(action)
        assert '"pgfence_rate_take"' in (caught.value.command or "")


async def test_older_tables_are_named(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Tables of an earlier version raise SchemaError, which says what to run."""
    from pgfence.config import configure
    from support.installations import TableNames, build_creation

    place = TableNames(f"old_{name[-12:]}")
    for statement in build_creation(place, 4):
        admin.execute(statement.encode())
    engine = world.engine()
    configure(engine, schema=place.schema)
    try:
        with pytest.raises(SchemaError, match=r"have version 4, but version 5 is needed: run `pgfence install"):
            await world.call(rate(world, engine, name).try_take)
    finally:
        admin.execute(f"DROP SCHEMA {place.schema} CASCADE".encode())


def test_a_session_is_rejected_with_the_reason_of_a_rate_limit() -> None:
    """The error does not propose the methods of a lease."""
    with pytest.raises(TypeError, match="units are taken in a separate transaction"):
        RateLimit(Session(), "x", limit=3, per=60)  # type: ignore[arg-type]


@every_row(
    ("what", "arguments", "n", "error", "message"),
    [
        ("limit 0", {"limit": 0}, 1, ValueError, "limit must be between 1 and 100000"),
        ("negative", {"limit": -1}, 1, ValueError, "limit must be between"),
        ("too high", {"limit": 100_001}, 1, ValueError, "limit must be between"),
        ("a float", {"limit": 1.5}, 1, TypeError, "limit must be an int"),
        ("no period", {"per": 0}, 1, ValueError, "per must be between"),
        ("too long", {"per": 10**9}, 1, ValueError, "per must be between"),
        ("no units", {}, 0, ValueError, "n must be 1 or more"),
        ("above the limit", {}, 4, ValueError, "n=4 is more than limit=3"),
        ("units as text", {}, "1", TypeError, "n must be an int"),
    ],
)
def test_wrong_arguments_say_what_to_do(what: str, arguments: Any, n: Any, error: Any, message: str) -> None:
    """An unusable argument is rejected before a statement is sent."""
    with pytest.raises(error, match=message):
        RateLimit(lambda: None, "x", **{"limit": 3, "per": 60, **arguments}).try_take(n)  # type: ignore[arg-type, return-value]
