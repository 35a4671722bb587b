"""A fenced transaction whose client is killed in the middle of a statement: how long its successor waits at the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text

from pgfence import LockTimeoutError, configure
from support.leases import lease
from support.programs import program
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script
    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")

WRITER = """
from pgfence import AsyncLease

async def main():
    engine = create_async_engine(sys.argv[1], connect_args=eval(sys.argv[3]))
    held = await AsyncLease(engine, sys.argv[2], ttl=0.5).acquire(timeout=20)
    async with held.begin(engine) as connection:
        say((await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one())
        await connection.execute(text("SELECT pg_sleep(60)"))

asyncio.run(main())
"""


def settings(world: World, **values: str) -> dict[str, Any]:
    """Return connect arguments that set something for each session."""
    if world.name == "asyncpg":
        return {"server_settings": values}
    return {"options": " ".join(f"-c {name}={value}" for name, value in values.items())}


def killed_in_a_statement(
    world: World, name: str, script: Callable[..., Script], admin: psycopg.Connection[Any], **values: str
) -> int:
    """Kill a writer whose statement runs, and return the process id of its server session."""
    writer = script(program(world, WRITER), world.url, name, repr(settings(world, **values)))
    backend = int(writer.read_line())
    sleeping = "SELECT FROM pg_stat_activity WHERE pid = %s AND query LIKE %s AND wait_event = 'PgSleep'"
    blocking(lambda: admin.execute(sleeping, [backend, "%pg_sleep%"]).rowcount == 1)
    writer.kill()
    return backend


async def enter(world: World, held: Any, engine: Any) -> None:
    """Do a fenced transaction that writes nothing."""
    async with world.enter(held.begin(engine)) as connection:
        await world.call(connection.execute, text("SELECT 1"))


async def test_a_server_that_looks_at_its_clients_lets_the_next_holder_in(
    world: World, name: str, script: Callable[..., Script], admin: psycopg.Connection[Any]
) -> None:
    """C056: with client_connection_check_interval the orphaned statement ends, and the gate is free, long before its time."""
    orphan = killed_in_a_statement(world, name, script, admin, client_connection_check_interval="250")
    engine = world.engine(connect_args=settings(world, lock_timeout="10s"))
    async with world.enter(lease(world, world.engine(), name).hold(timeout=10)) as held:
        await enter(world, held, engine)
    assert admin.execute("SELECT 1 FROM pg_stat_activity WHERE pid = %s", [orphan]).fetchall() == []


@pytest.mark.matrix
@pytest.mark.parametrize("bound", ["default_timeout", "lock_timeout"])
async def test_the_next_holders_error_names_what_blocks_it(
    world: World, name: str, script: Callable[..., Script], admin: psycopg.Connection[Any], bound: str
) -> None:
    """C056: the lease passes on in time; at the gate the next holder waits that long, and the error names session and statement."""
    orphan = killed_in_a_statement(world, name, script, admin)
    engine = world.engine(connect_args=settings(world, lock_timeout="300ms") if bound == "lock_timeout" else {})
    if bound == "default_timeout":
        configure(engine, default_timeout=0.3)
    async with world.enter(lease(world, world.engine(), name).hold(timeout=10)) as held:
        with pytest.raises(LockTimeoutError, match=r"pg_sleep\(60\)") as caught:
            await enter(world, held, engine)
        assert (caught.value.names, caught.value.timeout) == ((name,), 0.3)
        assert [holder.backend_pid for holder in caught.value.holders] == [orphan]
        admin.execute("SELECT pg_terminate_backend(%s, 10000)", [orphan])
        await enter(world, held, engine)
