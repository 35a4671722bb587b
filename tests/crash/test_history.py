"""Many processes contend for one lock while its holders are killed: there are never two holders at once."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from support.locking import freed
from support.processes import alive
from support.programs import program
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from pgfence.testing import PgfenceHistory
    from support.processes import Script
    from support.worlds import World

pytestmark = pytest.mark.twins

WORKERS, KILLS = 8, 20

# Forked, not started: a process costs milliseconds that way. Whoever dies is replaced; all are one process group.
CREW = """
from pgfence.testing import PgfenceHistory

async def work():
    me = str(os.getpid())
    arguments = {"server_settings": {"application_name": me}} if "asyncpg" in sys.argv[1] else {"application_name": me}
    lock = AsyncAdvisoryLock(create_async_engine(sys.argv[1], connect_args=arguments), sys.argv[2])
    while True:
        async with lock.connect(timeout=60) as connection:
            await PgfenceHistory.enter(connection, me)
            await connection.commit()
            await asyncio.sleep(random.uniform(0, 0.02))
            await PgfenceHistory.leave(connection, me)
            await connection.commit()

def start():
    if os.fork() == 0:
        random.seed()
        asyncio.run(work())
        os._exit(1)

create_async_engine(sys.argv[1])  # loads the driver, once for all
os.setpgrp()
for _ in range(int(sys.argv[3])):
    start()
say("started")
while True:
    os.waitpid(-1, 0)
    start()
"""

HOLDER = (
    "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid) JOIN pg_database d ON d.oid = l.database"
    " WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database() AND l.mode = 'ExclusiveLock'"
)


async def test_never_two_holders_while_holders_are_killed(
    world: World,
    name: str,
    script: Callable[..., Script],
    admin: psycopg.Connection[Any],
    advisory_rows: Callable[[], list[Any]],
    pgfence_history: PgfenceHistory,
) -> None:
    """Twenty SIGKILLs of the holder, and some of waiters, at random moments: the history has no overlap, no row is left."""
    history = pgfence_history
    crew = script(program(world, CREW), world.url, name, str(WORKERS))
    killed: set[str] = set()
    try:
        crew.wait_for("started")
        for number in range(KILLS):
            soon = len(history) + random.randrange(1, 8)
            await eventually(lambda: len(history) >= soon, deadline=20)  # noqa: B023
            killed.add(await kill_a_holder(admin, killed))
            if number % 4 == 0:
                killed.add(kill_a_child(crew.pid))
        done = len(history)
        await eventually(lambda: len(history) > done + 2 * WORKERS, deadline=20)
    finally:
        os.killpg(crew.pid, signal.SIGKILL)
    await eventually(lambda: not advisory_rows())
    await freed(admin, name)
    unfinished = history.check()
    assert len(unfinished - killed) <= 1, "only who was killed, at the very end one more, may have entered and not left"


async def kill_a_holder(admin: psycopg.Connection[Any], killed: set[str]) -> str:
    """Kill the process that has the lock at this moment, and return its process id as text."""

    def another() -> str | None:
        row = admin.execute(HOLDER).fetchone()
        return row[0] if row and row[0] not in killed else None

    pid: str = await eventually(another, deadline=20)
    with suppress(ProcessLookupError):  # between the look and the kill it may have been replaced already
        os.kill(int(pid), signal.SIGKILL)
    await eventually(lambda: not alive(int(pid)))
    return pid


def kill_a_child(parent: int) -> str:
    """Kill any worker, in any state, and return its process id as text."""
    pid = random.choice(Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
    os.kill(int(pid), signal.SIGKILL)
    return pid
