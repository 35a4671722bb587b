"""Effects whose process, connection or server dies: each step is done once as far as it was saved, and nothing hangs for a day."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence import schema
from pgfence._leases import manager, statements
from pgfence.effects import IdempotentEffect, _running
from pgfence.errors import IdempotencyInProgressError, UnreachableError
from pgfence.testing._processes import pause
from support.effects import Gate, Shop
from support.programs import program
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pgfence.testing._proxy import Proxy
    from support.processes import Script
    from support.servers import OwnServer
    from support.worlds import World

MOMENTS = 6
# A child for each moment at which it kills itself, all from one process that has loaded everything.
MORTALS = """
from pgfence.effects import AsyncIdempotentEffect

url, scope, notes, moments, ttl = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
log = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

async def life(number):
    left = [number]

    def moment():
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    async def ask(key):
        os.write(log, (key + chr(10)).encode())
        moment()
        return key.upper()

    async def work(attempt):
        moment()
        one = await attempt.step("reserve", ask)
        moment()
        two = await attempt.step("capture", ask)
        moment()
        return f"{one} {two} {attempt.number}"

    engine = create_async_engine(url)
    await AsyncIdempotentEffect(engine, f"k{number}", scope=scope, result=str, ttl=ttl).run(work)
    moment()

create_async_engine(url)  # loads the driver, once for all
crew = []
for number in range(moments):
    pid = os.fork()
    if pid == 0:
        asyncio.run(life(number))
        os._exit(1)
    crew.append(pid)
say(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in crew))
park()
"""
SLOW = """
from pgfence.effects import AsyncIdempotentEffect

async def work(attempt):
    say("at work")
    park()
    return "late"

async def main():
    engine = create_async_engine(sys.argv[1])
    try:
        await AsyncIdempotentEffect(engine, "k", scope=sys.argv[2], result=str, ttl=0.6).run(work)
    except AttemptLostError as error:
        say(type(error).__name__, error.attempt, error.newest)

asyncio.run(main())
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits for a server that does not respond cut to one second."""
    for module in (manager, statements):
        monkeypatch.setattr(module, "RELEASE_BUDGET", 1.0)
    monkeypatch.setattr(_running, "LONGEST_PATIENCE", 1.0)


@pytest.mark.twins
@pytest.mark.usefixtures("tables")
async def test_killed_between_any_two_steps_it_continues_where_it_stopped(
    world: World, admin: psycopg.Connection[Any], script: Callable[..., Script], tmp_path: Path
) -> None:
    """C099: after the ttl, not after a day, attempt 2 runs; what was saved is not asked for again, the rest by the same key."""
    shop, notes = Shop(world, admin), tmp_path / "notes"
    code = program(world, MORTALS)
    if not world.is_async:
        code = code.replace("asyncio.run(life(number))", "life(number)")
    crew = script(code, world.url, shop.scope, str(notes), str(MOMENTS), "1.2")
    assert crew.read_line() == " ".join(["-9"] * MOMENTS)
    before = Counter(notes.read_text().split())

    def ask(key: str) -> str:
        shop.provider.charge(key)
        return key.upper()

    async def work(attempt: Any) -> str:
        one, two = await shop.step(attempt, "reserve", ask), await shop.step(attempt, "capture", ask)
        return f"{one} {two} {attempt.number}"

    with pytest.raises(IdempotencyInProgressError):
        await shop.run("k0", work)
    again: list[list[str]] = []
    for number in range(MOMENTS):
        shop.provider.asked.clear()
        attempt = 1 if number == MOMENTS - 1 else 2
        answer = await shop.run(f"k{number}", work, timeout=10)
        assert answer == f"K{number}:RESERVE K{number}:CAPTURE {attempt}"
        again.append([key.partition(":")[2] for key in shop.provider.asked])
    assert again == [["reserve", "capture"], ["reserve", "capture"], ["capture"], ["capture"], [], []]
    assert [before[f"k{n}:reserve"] for n in range(MOMENTS)] == [0, 1, 1, 1, 1, 1]
    assert [before[f"k{n}:capture"] for n in range(MOMENTS)] == [0, 0, 0, 1, 1, 1]
    assert shop.row("k0").record_left > 86000


@pytest.mark.twins
@pytest.mark.usefixtures("tables")
async def test_a_stopped_process_cannot_finish(
    world: World, admin: psycopg.Connection[Any], script: Callable[..., Script]
) -> None:
    """C100: stopped for longer than its ttl it is taken over, and rejected when it wakes up."""
    shop = Shop(world, admin)
    slow = script(program(world, SLOW), world.url, shop.scope)
    slow.wait_for("at work")
    with pause(slow.pid):
        assert await shop.run("k", timeout=10) == "receipt of k:charge"
    assert slow.go_on() == 0
    assert slow.read_line() == "AttemptLostError 1 2"
    assert shop.row("k").result == "receipt of k:charge"


@pytest.mark.twins
@pytest.mark.usefixtures("tables")
async def test_connections_that_are_cut_cost_an_effect_nothing(
    world: World, admin: psycopg.Connection[Any], proxy: Proxy
) -> None:
    """C042: cut before the claim, before a step is saved and before the result is stored, it continues with other ones."""
    shop = Shop(world, admin, dsn=proxy.dsn)
    await shop.run("warm")
    proxy.cut()

    async def work(attempt: Any) -> str:
        receipt: str = await shop.step(attempt, "charge", lambda key: (shop.provider.charge(key), proxy.cut())[0])
        proxy.cut()
        return receipt

    answer = None
    for _ in range(3):  # a claim on a connection that was cut is an error that says so, and the next one works
        try:
            answer = await shop.run("k", work, timeout=5)
            break
        except UnreachableError:
            continue
    assert answer == "receipt of k:charge"
    assert shop.provider.asked["k:charge"] == 1
    assert (shop.row("k").status, shop.row("k").attempt) == ("done", 1)


@pytest.mark.twins
@pytest.mark.usefixtures("tables", "impatient", "short_statements")
async def test_a_server_that_hangs_leaves_the_outcome_unknown(
    world: World, admin: psycopg.Connection[Any], proxy: Proxy
) -> None:
    """A claim without a response is ended, a step is requested with the same key, a result is stored when the server is back."""
    shop, direct, gate = Shop(world, admin, dsn=proxy.dsn), Shop(world, admin), Gate()
    direct.scope, direct.provider = shop.scope, shop.provider
    second = Gate()

    async def in_step(attempt: Any) -> str:
        await gate.wait()
        return await shop.charge(attempt)

    async def at_end(attempt: Any) -> str:
        receipt = await shop.charge(attempt)
        await second.wait()
        return receipt

    step = asyncio.create_task(shop.run("step", in_step, who=world.other(), ttl=4))
    end = asyncio.create_task(shop.run("end", at_end, who=world.other(), ttl=30))
    await gate.reached()
    await second.reached()
    proxy.black_hole()
    claim = asyncio.create_task(shop.run("claim", ttl=60))
    await asyncio.sleep(0)  # first, so that it has a connection that is open already
    gate.open()
    second.open()
    with pytest.raises(UnreachableError, match="no response from the server for the claim of|cannot connect to"):
        await claim
    with pytest.raises(UnreachableError):
        await step
    with pytest.raises(UnreachableError, match="retried in the background"):
        await end
    assert shop.provider.asked == {"step:charge": 1, "end:charge": 1}
    proxy.heal()
    await eventually(lambda: shop.row("end").status == "done", deadline=15)
    for key, attempts in (("end", [1]), ("step", [2]), ("claim", [1, 2])):
        assert await direct.run(key, timeout=20) == f"receipt of {key}:charge"
        assert shop.row(key).attempt in attempts
    assert shop.provider.asked["claim:charge"] == shop.provider.asked["end:charge"] == 1


def test_a_claim_survives_a_crash_of_the_server(private_server: OwnServer) -> None:
    """It is on disk before the work begins, for any synchronous_commit; the attempt continues, and its result is stored."""
    url = f"postgresql+psycopg://{private_server.dsn.split('://', 1)[1]}"
    engine = create_engine(url, connect_args={"options": "-c synchronous_commit=off"})
    schema.create_all(engine)
    effect = IdempotentEffect(engine, "k", scope="crash", result=int, ttl=30)

    def work(attempt: Any) -> int:
        private_server.stop("immediate")
        private_server.start()
        with pytest.raises(IdempotencyInProgressError, match="attempt 1"):
            effect.run(lambda _: 7)
        return attempt.step("after", lambda _: 1)

    assert effect.run(work) == effect.run(lambda _: 2) == 1
    with psycopg.connect(private_server.dsn) as connection:
        found = connection.execute("SELECT attempt, step FROM pgfence_idempotency_key WHERE scope = 'crash'").fetchone()
    assert found == (1, {"after": 1})
    engine.dispose()
    schema.drop_all(engine)
    engine.dispose()
