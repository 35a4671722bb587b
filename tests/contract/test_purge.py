"""`monitoring.purge` deletes expired idempotency keys in batches, and no other row."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

from pgfence import monitoring, schema
from pgfence.config import configure
from pgfence.effects import AsyncIdempotentEffect, IdempotentEffect
from pgfence.errors import AttemptLostError, SchemaError, StandbyError, UnreachableError
from pgfence.idempotency import idempotent
from support import installations as tables
from support.expired_keys import Keys
from support.installations import TableNames
from support.keyed import Desk, Receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg
    from sqlalchemy import Engine

    from support.worlds import World

WHOLE = bool(os.environ.get("PGFENCE_TEST_FAULTS"))
MANY = 100_000 if WHOLE else 20_000
pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def keys(admin: psycopg.Connection[Any], name: str) -> Iterator[Keys]:
    """Keys of this test, in a table in which no other is expired."""
    admin.execute("DELETE FROM pgfence_idempotency_key WHERE expires_at <= clock_timestamp()")
    yield Keys(admin, name)
    admin.execute("DELETE FROM pgfence_idempotency_key WHERE scope = %s", [name])


@pytest.mark.every_driver
async def test_only_expired_keys_are_deleted(world: World, keys: Keys) -> None:
    """C109: done, failed or freed, of any namespace; an unexpired key is kept, and so is a running one, even if expired."""
    for what, status in (("done", "done"), ("failed", "failed"), ("freed", "free")):
        keys.fill(what, 7, life=-10, status=status)
    keys.fill("other", 2, life=-10, scope=f"{keys.scope}\x1f{keys.scope}")
    keys.fill("lost", 1, life=-10, status="in_progress", claim=-5)
    keys.fill("working", 1, life=-10, status="in_progress", claim=30)
    keys.fill("live", 10, life=60)
    keys.fill("freed live", 1, life=60, status="free", claim=-5)
    assert await world.call(monitoring.purge, world.engine()) == 24
    assert keys.left() == {"live": 10, "working": 1, "freed live": 1}
    assert await world.call(monitoring.purge, world.engine()) == 0


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("level", ["AUTOCOMMIT", "SERIALIZABLE", None])
async def test_each_batch_is_a_separate_transaction(world: World, keys: Keys, level: str | None) -> None:
    """Of 25 keys 10, 10 and 4 are deleted, each batch with a commit; one that is renewed just before is kept."""
    engine = world.engine(**({"isolation_level": level} if level else {}))
    seen: list[int] = []
    renew = "UPDATE pgfence_idempotency_key SET expires_at = clock_timestamp() + interval '1 h' WHERE scope = %s AND key = 'old3'"

    def look(*args: Any) -> None:
        if "DELETE" not in args[2] or "lock_name" in args[2]:
            return
        if not seen:
            keys.admin.execute(renew, [keys.scope])
        seen.append(keys.left()["old"])
        if len(seen) == 6:
            raise RuntimeError

    event.listen(engine.sync_engine if world.is_async else engine, "before_cursor_execute", look)
    keys.fill("old", 25, life=-10)
    assert await world.call(monitoring.purge, engine, batch=10) == 24
    assert seen == [25, 15, 5, 1]
    keys.fill("again", 25, life=-10)
    with pytest.raises(RuntimeError):
        await world.call(monitoring.purge, engine, batch=10)
    assert keys.left() == {"old": 1, "again": 15}


async def test_a_key_that_is_claimed_again_is_not_purged(world: World, keys: Keys) -> None:
    """purge() does not wait for an expired key that a transaction has claimed, and does not delete it afterwards."""
    desk = Desk(world, keys.admin)
    desk.scope = keys.scope
    keys.fill("k", 2, life=-10)
    try:
        async with desk.at_work("k1"):
            assert await asyncio.wait_for(world.other().call(monitoring.purge, world.engine()), 10) == 1
        assert await world.call(monitoring.purge, world.engine()) == 0
        assert await desk.pay("k1") == Receipt("k1")
        assert desk.effects() == 1
    finally:
        desk.close()


async def test_the_key_of_a_running_attempt_is_kept_and_of_a_lost_one_not(world: World, keys: Keys) -> None:
    """C109, C110: an expired record with a valid claim stays; when the claim has expired too, it is deleted, and a late end is rejected."""
    engine = world.engine()
    expire = "UPDATE pgfence_idempotency_key SET expires_at = clock_timestamp() - interval '1 s' WHERE scope = %s"
    lose = expire.replace("expires_at =", "locked_until = clock_timestamp(), expires_at =")

    async def attempt() -> int:
        janitor = world.other()
        keys.admin.execute(expire, [keys.scope])
        assert await janitor.call(monitoring.purge, world.engine()) == 0
        keys.admin.execute(lose, [keys.scope])
        assert await janitor.call(monitoring.purge, world.engine()) == 1
        return 1

    loop = asyncio.get_running_loop()

    async def asynchronous(_: Any) -> int:
        return await attempt()

    def sync(_: Any) -> int:
        return asyncio.run_coroutine_threadsafe(attempt(), loop).result(20)

    effect = world.pick(IdempotentEffect, AsyncIdempotentEffect)(engine, "k", scope=keys.scope, result=int)
    with pytest.raises(AttemptLostError):
        await world.call(effect.run, world.pick(sync, asynchronous))
    assert keys.left() == {}


def purge_of(engine: Engine, longest: list[float]) -> int:
    """Purge, and note how long the longest statement took."""
    began = 0.0

    def before(*_: Any) -> None:
        nonlocal began
        began = time.monotonic()

    event.listen(engine, "before_cursor_execute", before)
    event.listen(engine, "after_cursor_execute", lambda *_: longest.append(time.monotonic() - began))
    return monitoring.purge(engine)


def test_four_at_once_beside_claims(keys: Keys, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """C109: all expired keys are deleted, each once; live, running and newly claimed ones stay; no caller waits for long."""
    engines = [create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}") for _ in range(5)]
    keys.fill("old", MANY, life=-MANY)
    keys.fill("live", 10, life=600)
    keys.fill("working", 1, life=-10, status="in_progress", claim=600)
    longest: list[float] = []
    claims: dict[str, float] = {}
    with ThreadPoolExecutor(4) as pool:
        purges = [pool.submit(purge_of, engine, longest) for engine in engines[:4]]
        # From the end, where the purges come last: these are renewed while they are still there, and new when they are gone.
        for key in (f"old{number}" for number in range(MANY, 0, -7)):
            began = time.monotonic()
            with Session(engines[4]) as session, session.begin():
                assert idempotent(session, key, scope=keys.scope, result=int).run(lambda: 1) == 1
            claims[key] = time.monotonic() - began
            if all(one.done() for one in purges):
                break
        gone = sum(one.result() for one in purges)
    for engine in engines:
        engine.dispose()
    assert keys.left() == {"live": 10, "working": 1, "old": len(claims)}
    assert MANY - len(claims) <= gone <= MANY
    query = "SELECT key FROM pgfence_idempotency_key WHERE scope = %s AND expires_at < clock_timestamp()"
    assert admin.execute(query, [keys.scope]).fetchall() == [("working1",)]
    assert max(longest) < 1
    assert max(claims.values()) < (0.2 if WHOLE else 1)


# ---------------------------------------------------------------- what is refused


@pytest.mark.every_driver
async def test_a_role_with_the_documented_rights_purges(world: World, keys: Keys, role: Callable[..., str]) -> None:
    """SELECT, UPDATE and DELETE on the table are enough; without them the error has the GRANT."""
    login = role()
    user = login.split("//")[1].split(":")[0]
    keys.fill("old", 3, life=-10)
    with pytest.raises(SchemaError, match=r"GRANT SELECT, UPDATE, DELETE ON .*idempotency_key") as caught:
        await world.call(monitoring.purge, world.engine(dsn=login))
    assert login.split("@")[0].rsplit(":", 1)[1] not in str(caught.value)
    assert keys.left() == {"old": 3}
    keys.admin.execute(f"GRANT SELECT, UPDATE, DELETE ON pgfence_idempotency_key TO {user}".encode())
    assert await world.call(monitoring.purge, world.engine(dsn=login)) == 3


async def test_missing_and_older_tables_name_the_command(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """With a prefix that is not installed, and with tables of version 1, the error has the `pgfence install` command."""
    prefix = f"old_{name[-12:]}_"
    for texts in ((), tables.build_creation(TableNames(prefix=prefix), 1)):
        for statement in texts:
            admin.execute(statement.encode())
        engine = world.engine()
        configure(engine, prefix=prefix)
        with pytest.raises(SchemaError, match=f"pgfence install --prefix {prefix}") as caught:
            await world.call(monitoring.purge, engine)
        assert caught.value.needed == 2
    dropping = create_engine(f"postgresql+psycopg://{world.dsn.split('://', 1)[1]}")
    configure(dropping, prefix=prefix)
    schema.drop_all(dropping)
    dropping.dispose()


@pytest.mark.every_driver
async def test_a_server_that_takes_no_writes_and_one_that_is_not_there(world: World, role: Callable[..., str]) -> None:
    """StandbyError and UnreachableError; neither message holds a password."""
    login = role({"default_transaction_read_only": "on"})
    with pytest.raises(StandbyError, match="primary"):
        await world.call(monitoring.purge, world.engine(dsn=login))
    with pytest.raises(UnreachableError) as caught:
        await world.call(monitoring.purge, world.engine(dsn="postgresql://nobody:secret@127.0.0.1:1/nothing"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "error"), [(0, ValueError), (100_001, ValueError), (True, TypeError), ("9", TypeError)]
)
def test_a_batch_that_is_not_a_number_of_keys_is_rejected(batch: Any, error: type[Exception]) -> None:
    """A batch that is not a number of keys is rejected before anything is sent, sync and async."""
    with pytest.raises(error, match="batch"):
        monitoring.purge(create_engine("postgresql+psycopg://"), batch=batch)
    with pytest.raises(TypeError, match="Engine"):
        monitoring.purge("postgresql://")  # type: ignore[call-overload]
