"""Look-alikes: equal numbers in another key space, database or half, and queries that take more than they return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from pgfence import LockKey
from pgfence.errors import LockTimeoutError
from support import servers
from support.locking import elsewhere, give, is_free, labelled, lock
from support.transactions import statements
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from support.worlds import World

pytestmark = pytest.mark.twins


@pytest.fixture(scope="module")
def second_database(dsn: str) -> Iterator[str]:
    """Another database on the same server."""
    with servers.database(dsn, "second") as name:
        yield name


async def test_pairs_and_whole_numbers_never_meet(
    world: World, dsn: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """C028: the same 64 bits as two integers and as one: both granted, and each is rejected where its own kind is held."""
    whole, pair = LockKey.raw(2**32 + 2), LockKey.pair(1, 2)
    engine = world.engine()
    async with (
        world.enter(lock(world, engine, whole).hold(timeout=20)),
        world.enter(lock(world, engine, pair).hold(timeout=20)),
    ):
        assert sorted((row.classid, row.objid, row.objsubid) for row in advisory_rows()) == [(1, 2, 1), (1, 2, 2)]
        assert not is_free(admin, whole)
        assert not is_free(admin, pair)
    for held, other in ((whole, pair), (pair, whole)):
        with elsewhere(dsn, held):
            assert await world.call(lock(world, engine, held).try_acquire) is None
            async with world.enter(lock(world, engine, other).hold(timeout=20)):
                pass


async def test_the_documented_sql_meets_our_key(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C028: a key that psql locks with the documented expression excludes pgfence's, and vice versa."""
    key = "('x' || left(encode(sha256(convert_to(%s || chr(31) || %s, 'UTF8')), 'hex'), 16))::bit(64)::bigint"
    one = lock(world, world.engine(), name)
    async with world.enter(one.hold()):
        assert admin.execute(f"SELECT pg_try_advisory_lock({key})", ["", name]).fetchone() == (False,)
    assert admin.execute(f"SELECT pg_try_advisory_lock({key})", ["", name]).fetchone() == (True,)
    assert await world.call(one.try_acquire) is None
    assert give(admin, name)


async def test_each_database_has_its_own_lock(
    world: World, name: str, second_database: str, admin: psycopg.Connection[Any]
) -> None:
    """C029: the same name in two databases of one server: both granted, and looking shows each only its own holder."""
    here = lock(world, labelled(world, f"here {name}"), name)
    there = lock(world, labelled(world, f"there {name}", dsn=second_database), name)
    async with world.enter(here.hold(timeout=20)):
        assert not await world.call(there.is_held)
        async with world.enter(there.hold(timeout=20)):
            assert [h.application_name[:5] for h in await world.call(here.holders)] == ["here "]
            assert [h.application_name[:5] for h in await world.call(there.holders)] == ["there"]
        assert not is_free(admin, name)


async def test_however_a_database_is_addressed_its_lock_is_one(
    world: World, name: str, dsn: str, role: Callable[..., str]
) -> None:
    """C029: by number, by name of the host, as another role: exclusion holds."""
    place = urlsplit(dsn)
    if place.hostname != "127.0.0.1":
        pytest.skip("the server of this run is not on this machine's loopback")
    by_name = urlunsplit(place._replace(netloc=place.netloc.replace("127.0.0.1", "localhost")))
    async with world.enter(lock(world, world.engine(), name).hold()):
        for other in (by_name, role()):
            assert await world.call(lock(world, world.engine(dsn=other), name).try_acquire) is None


async def test_a_lock_takes_its_own_keys_and_no_more(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], advisory_rows: Callable[[], list[Any]]
) -> None:
    """C034: of five names with one busy in the middle the try keeps none, the wait none, the grant exactly five."""
    names = [f"{name}:{number}" for number in range(5)]
    one = lock(world, world.engine(), *names)
    for busy in names:
        with elsewhere(dsn, busy):
            # The session that had the name before may still be ending.
            await eventually(lambda: len(advisory_rows()) == 1)
            assert await world.call(one.try_acquire) is None
            assert len(advisory_rows()) == 1
            with pytest.raises(LockTimeoutError):
                await world.call(one.acquire, timeout=0.15)
            assert len(advisory_rows()) == 1
    async with world.enter(one.hold(timeout=5)):
        assert len(advisory_rows()) == 5
    assert all(is_free(admin, each) for each in names)


@pytest.mark.every_driver
async def test_no_statement_calls_a_lock_function_in_a_predicate(world: World, name: str, dsn: str) -> None:
    """C034: a planner evaluates predicates as often as it likes: of all that is sent, no WHERE takes a lock."""
    engine = world.engine()
    with statements(engine) as sent:
        for names in ((name,), (name, f"{name}!"), (LockKey.pair(1, 2), name)):
            one = lock(world, engine, *names)
            async with world.enter(one.hold(timeout=5)):
                await world.call(one.holders)
            with elsewhere(dsn, name), pytest.raises(LockTimeoutError):
                await world.call(one.acquire, timeout=0.7)
    taking = [statement for statement in sent if "advisory" in statement and "pg_locks" not in statement]
    assert len(taking) >= 9
    for statement in taking:
        assert "LIMIT" not in statement.upper()
        assert not any("advisory" in predicate for predicate in predicates(statement)), statement


def predicates(statement: str) -> list[str]:
    """Return the text after each WHERE, up to the end of its query."""
    found = []
    for rest in statement.split("WHERE ")[1:]:
        depth, end = 0, len(rest)
        for place, letter in enumerate(rest):
            depth += {"(": 1, ")": -1}.get(letter, 0)
            if depth < 0:
                end = place
                break
        found.append(rest[:end])
    return found
