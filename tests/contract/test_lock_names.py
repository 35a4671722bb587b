"""Names of locks are stored after the grant, once for each process, and only where the table exists."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, event, make_url

from pgfence import (
    AdvisoryLock,
    AsyncTransactionLock,
    KeyCollisionError,
    LockKey,
    ReadWriteLock,
    TransactionLock,
    monitoring,
    schema,
)
from pgfence.config import configure
from support.locking import elsewhere, freed, give, lock, waits
from support.servers import role
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from sqlalchemy import Engine

    from support.worlds import World

pytestmark = [pytest.mark.twins]


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    """An engine of psycopg, where the driver does not matter."""
    engine = create_engine(make_url(dsn).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


def stored(admin: psycopg.Connection[Any], *names: str, prefix: str = "pgfence_") -> list[str]:
    """Return the stored names of keys."""
    keys = [LockKey.of(name).value for name in names]
    rows = admin.execute(f"SELECT name FROM {prefix}lock_name WHERE key = ANY (%s) ORDER BY name", [keys]).fetchall()
    return [row[0] for row in rows]


def count_statements(engine: Any) -> list[str]:
    """Return a list to which each statement on the engine's connections is added."""
    seen: list[str] = []

    @event.listens_for(getattr(engine, "sync_engine", engine), "before_cursor_execute")
    def see(_connection: Any, _cursor: Any, text: str, *_: Any) -> None:
        seen.append(text)

    return seen


@pytest.mark.usefixtures("tables")
@pytest.mark.every_driver
async def test_the_first_use_stores_the_name_and_later_ones_do_not(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The first use of a name in a process sends one more statement, and later uses send none."""
    engine = world.engine()
    seen = count_statements(engine)
    async with world.enter(lock(world, engine, name, f"{name}:2").hold()):
        assert stored(admin, name, f"{name}:2") == [name, f"{name}:2"]
    assert sum("note_names" in text for text in seen) == 1
    async with world.enter(lock(world, engine, name).hold()):
        (row,) = await world.call(monitoring.ps, engine, name)
    assert sum("note_names" in text for text in seen) == 1
    assert (row.label, row.holder.kind) == (name, "session")


@pytest.mark.one_driver
def test_without_the_table_nothing_is_sent(name: str, engine: Engine) -> None:
    """Without the table, a lock sends only the statements of its try and its release."""
    configure(engine, prefix="no_such_")
    AdvisoryLock(engine, f"{name}:warm").acquire().release()
    seen = count_statements(engine)
    AdvisoryLock(engine, name).acquire().release()
    assert len(seen) == 2 and not any("note_names" in text for text in seen)


@pytest.mark.one_driver
@pytest.mark.usefixtures("tables")
def test_without_privileges_nothing_is_sent_and_nothing_fails(
    name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """A role that may not write to the table takes locks as before."""
    with role(admin, dsn, {}) as login:
        engine = create_engine(make_url(login).set(drivername="postgresql+psycopg"))
        seen = count_statements(engine)
        AdvisoryLock(engine, name).acquire().release()
        engine.dispose()
    assert not any("note_names" in text for text in seen) and stored(admin, name) == []


@pytest.mark.one_driver
@pytest.mark.usefixtures("tables")
def test_a_refused_try_stores_nothing(name: str, dsn: str, engine: Engine, admin: psycopg.Connection[Any]) -> None:
    """A name is stored only after its lock was granted."""
    with elsewhere(dsn, name):
        assert AdvisoryLock(engine, name).try_acquire() is None
    assert stored(admin, name) == []


def hold_for_a_moment(engine: Engine, name: str) -> None:
    """Wait for a transaction lock, and release it at once."""
    with TransactionLock.begin(engine, name):
        pass


async def appears(admin: psycopg.Connection[Any], *names: str) -> None:
    """Wait until the background thread has stored names."""
    await eventually(lambda: stored(admin, *names) == sorted(names))


@pytest.mark.usefixtures("tables")
async def test_a_transaction_lock_that_is_held_for_a_second_has_a_name(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The caller's connection sends no statement for it, and no connection stays open."""
    engine = world.engine()
    async with world.enter(world.pick(TransactionLock, AsyncTransactionLock).begin(engine, f"{name}:short")):
        pass
    async with world.enter(world.pick(TransactionLock, AsyncTransactionLock).begin(engine, name, f"{name}:2")) as work:
        seen = count_statements(getattr(work, "sync_connection", work))
        await appears(admin, name, f"{name}:2")
        (row,) = await world.call(monitoring.ps, engine, f"{name}:2")
        assert (row.label, row.holder.kind) == (f"{name}:2", "transaction")
        assert seen == []
    assert stored(admin, f"{name}:short") == []


@pytest.mark.one_driver
@pytest.mark.usefixtures("tables")
async def test_a_lock_on_a_connection_of_the_caller_and_one_that_was_waited_for_have_names(
    name: str, dsn: str, engine: Engine, admin: psycopg.Connection[Any]
) -> None:
    """A session lock while it is held, and a transaction lock that was waited for even if it is held for a moment only."""
    with elsewhere(dsn, f"{name}:t") as other, ThreadPoolExecutor() as pool:
        waiting = pool.submit(hold_for_a_moment, engine, f"{name}:t")
        await eventually(waits(admin, f"{name}:t"))
        give(other, f"{name}:t")
        waiting.result(60)
    with engine.connect() as mine, AdvisoryLock(mine, name).hold():
        await appears(admin, name, f"{name}:t")


@pytest.mark.usefixtures("tables")
def test_a_forked_child_stores_names_and_every_process_ends_at_once(
    name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """Parent and child exit with 0 and without output, although their recorder threads are still waiting."""
    done = subprocess.run([sys.executable, "-c", FORKING, dsn, name], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert stored(admin, name, f"{name}:child", f"{name}:late") == [name, f"{name}:child"]


FORKING = """
import os, sys, time
from sqlalchemy import create_engine, text
from pgfence import TransactionLock

def hold(name, seen):
    with TransactionLock.begin(engine, name):
        with create_engine(engine.url).connect() as other:
            query = text("SELECT count(*) FROM pgfence_lock_name WHERE name = :name")
            while not other.execute(query, {"name": seen}).scalar_one():
                other.rollback()
                time.sleep(0.05)

engine = create_engine("postgresql+psycopg://" + sys.argv[1].partition("://")[2])
hold(sys.argv[2], sys.argv[2])
child = os.fork()
if not child:
    engine.dispose(close=False)
    hold(sys.argv[2] + ":child", sys.argv[2] + ":child")
else:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
hold(sys.argv[2] + ":late", sys.argv[2])
"""


@pytest.mark.one_driver
@pytest.mark.usefixtures("tables")
def test_the_next_use_of_a_transaction_lock_with_the_key_of_another_name_raises(
    name: str, engine: Engine, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The collision is noticed when the name is to be stored. The first holder cannot be interrupted."""
    admin.execute("INSERT INTO pgfence_lock_name VALUES (%s, 'other', now())", [LockKey.of(name).value])
    with TransactionLock.begin(engine, name):
        eventually(lambda: "KeyCollisionError" in caplog.text)
    with pytest.raises(KeyCollisionError, match="other"), TransactionLock.begin(engine, name):
        pass


@pytest.mark.usefixtures("tables")
async def test_a_key_of_another_name_is_a_collision(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """KeyCollisionError is raised at the first use with both names, and nothing is held afterwards."""
    admin.execute("INSERT INTO pgfence_lock_name VALUES (%s, 'other', now())", [LockKey.of(name).value])
    with pytest.raises(KeyCollisionError, match="other") as caught:
        await world.call(lock(world, world.engine(), name).acquire)
    assert set(caught.value.names) == {name, "other"}
    await freed(admin, name)


@pytest.mark.one_driver
def test_purge_forgets_names_that_are_not_used_any_more(
    name: str, engine: Engine, admin: psycopg.Connection[Any]
) -> None:
    """After 30 days without a process that has started to use them; names of reader/writer locks are stored too."""
    configure(engine, prefix="names_")
    schema.create_all(engine)
    try:
        for each in (name, f"{name}:old"):
            ReadWriteLock(engine, each).write.acquire().release()
        age = "UPDATE names_lock_name SET seen_at = seen_at - interval '31 days' WHERE name = %s"
        admin.execute(age, [f"{name}:old"])
        monitoring.purge(engine)
        assert stored(admin, name, f"{name}:old", prefix="names_") == [name]
    finally:
        schema.drop_all(engine)
