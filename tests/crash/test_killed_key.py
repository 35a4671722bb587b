"""A process is killed while it works under an idempotency key: a waiter does the work, or gets what it committed."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from support.keyed import Desk
from support.programs import program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg

    from support.processes import Script
    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")

PHASES = ("claimed", "at work", "stored", "committed")

# The imports are dear, so each of the killed is forked from one process that has them.
WINNERS = """
from pgfence import idempotent
from {home} import {session}

def pause(now, wanted):
    if now == wanted:
        say(os.getpid())
        park()

async def main():
    engine = create_async_engine(sys.argv[1])
    async with {session}(engine) as session:
        async with idempotent(session, phase, scope=sys.argv[2], result=str) as op:
            pause("claimed", phase)
            await session.execute(text("INSERT INTO " + sys.argv[3] + " VALUES (:phase)"), {{"phase": phase}})
            pause("at work", phase)
            op.complete("winner")
        pause("stored", phase)
        await session.commit()
        pause("committed", phase)

for phase in sys.argv[4:]:
    if not (pid := os.fork()):
        asyncio.run(main())
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.fixture
def desk(world: World, admin: psycopg.Connection[Any]) -> Iterator[Desk]:
    """Sessions of a world, and effects."""
    here = Desk(world, admin)
    yield here
    here.close()


async def test_a_winner_that_is_killed_leaves_one_effect(
    desk: Desk, script: Callable[..., Script], eventually: Callable[..., Any]
) -> None:
    """C097, C099: SIGKILL between each pair of steps, beside a waiter: one effect, and the key is never stuck."""
    home, session = desk.world.pick(("sqlalchemy.orm", "Session"), ("sqlalchemy.ext.asyncio", "AsyncSession"))
    code = WINNERS.format(home=home, session=session)
    if not desk.world.is_async:
        code = code.replace("AsyncSession", "Session")
    winners = script(program(desk.world, code), desk.world.url, desk.scope, desk.table.name, *PHASES)
    for phase in PHASES:
        pid = int(winners.read_line())
        loser = desk.world.other()
        work = partial(loses, desk, phase)
        if phase == "committed":
            answer = await desk.pay(phase, who=loser, result=str, work=work)
            os.kill(pid, signal.SIGKILL)
        else:
            waiting = asyncio.create_task(desk.pay(phase, who=loser, result=str, work=work))
            await eventually(lambda: desk.waiters() == 1)
            os.kill(pid, signal.SIGKILL)
            answer = await waiting
        assert answer == ("winner" if phase == "committed" else "loser")
        assert desk.effects(phase) == 1
    assert winners.go_on() == 0


def loses(desk: Desk, phase: str, session: Any) -> str:
    desk.charge(phase)(session)
    return "loser"
