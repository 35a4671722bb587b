"""Attempts at an effect as the HTTP middlewares use them: claimed, ended, dropped, forked."""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any

import pytest

from pgfence._process.coroutines import run_sync
from pgfence.config import configure
from pgfence.effects._claim import EffectKey, Reply, StoredResult
from pgfence.effects._manager import EffectManager
from pgfence.effects._running import RunningAttempt, claim
from pgfence.errors import (
    AttemptLostError,
    IdempotencyInProgressError,
    IdempotencyMisuseError,
    UnreachableError,
)
from pgfence.lease._engines import ASYNC_ENGINES, SYNC_ENGINES
from support.effects import Shop
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def shop(world: World, admin: psycopg.Connection[Any]) -> Shop:
    """Effects of a world, and a provider that counts them."""
    return Shop(world, admin)


async def taken(shop: Shop, **options: Any) -> Any:
    """Claim the key "k" as a middleware does."""
    wanted = EffectKey(shop.scope, "k", **({"fingerprint": None, "ttl": 30.0, "keep": 60.0} | options))
    engines: Any = shop.world.pick(SYNC_ENGINES, ASYNC_ENGINES)
    return await drive(shop, claim, *engines.bind(shop.engine, "a test").find_manager(EffectManager), wanted, 0)


async def drive(shop: Shop, steps: Any, *args: Any) -> Any:
    """Run a coroutine of the runtime as a middleware does: to its end on a thread, or awaited by a task."""
    return await shop.world.call(shop.world.pick(lambda: run_sync(steps, *args), lambda: steps(*args)))


@pytest.mark.every_driver
async def test_a_reply_comes_back_byte_for_byte(shop: Shop) -> None:
    """C105: status, headers in their order and repeated ones, and a binary body."""
    reply = Reply(201, (("location", "/p/7"), ("x", "1"), ("x", "é")), bytes(range(256)))
    running = await taken(shop)
    assert (running.number, running.steps, 25 < running.remaining() <= 30) == (1, {}, True)
    await drive(shop, running.finish_reply, reply)
    assert await taken(shop) == StoredResult("done", None, reply)
    with pytest.raises(IdempotencyMisuseError, match="was used over HTTP"):
        await shop.run("k")
    with pytest.raises(IdempotencyMisuseError, match="has already ended"):
        await drive(shop, running.finish, "done", "1")


async def test_an_empty_reply_and_a_text_come_back(shop: Shop) -> None:
    """A reply without headers and body is a reply; a text is none."""
    running = await taken(shop)
    await drive(shop, running.finish_reply, Reply(204, (), b""))
    assert await taken(shop) == StoredResult("done", None, Reply(204, (), b""))
    shop.expire("k")
    running = await taken(shop)
    await drive(shop, running.save_step, "a", '{"b": 1}')
    assert running.steps == {"a": '{"b": 1}'}
    await drive(shop, running.finish, "failed", "[1]")
    assert await taken(shop) == StoredResult("failed", "[1]", None)


async def test_an_attempt_ends_once_in_each_of_its_ways(shop: Shop) -> None:
    """Freed: the next one runs at once. Lapsed, or dropped by a program that forgot it: it is renewed no more."""
    running = await taken(shop)
    await drive(shop, running.free)
    running = await taken(shop)
    assert running.number == 2
    running.let_lapse()
    running.let_lapse()
    with pytest.raises(IdempotencyMisuseError):
        running.check()
    with pytest.raises(IdempotencyInProgressError, match="attempt 2"):
        await taken(shop)
    shop.lapse("k")
    running = await taken(shop, ttl=0.5)
    number, grant = running.number, running._grant
    del running
    await shop.world.call(int)  # the contender forgets its last answer with the next
    gc.collect()
    assert number == 3
    await eventually(lambda: grant.released)
    await eventually(lambda: shop.row("k").claim_left < 0)


async def test_events_for_each_attempt(shop: Shop) -> None:
    """`on_event` gets a claim, its end and its loss, with the attempt as the token."""
    events: list[Any] = []
    configure(shop.engine, on_event=events.append)
    running = await taken(shop)
    shop.lapse("k")
    second = await taken(shop)
    with pytest.raises(AttemptLostError):
        await drive(shop, running.finish, "done", "1")
    await drive(shop, second.free)
    name = f"{shop.scope}:k"
    assert [(one.event, one.name, one.token) for one in events] == [
        ("acquired", name, 1),
        ("acquired", name, 2),
        ("lost", name, 1),
        ("released", name, 2),
    ]


def child_of(running: Any) -> int:
    """Return the exit code of a child that checks whether the attempt is its own: 0 if it is not."""
    pid = os.fork()
    if pid == 0:
        try:
            running.check()
        except IdempotencyMisuseError as error:
            os._exit(0 if "parent process of this forked child" in str(error) else 1)
        os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


async def test_a_forked_child_has_no_attempt(shop: Shop) -> None:
    """It belongs to the parent, and the end of the child ends nothing."""
    running = await taken(shop)
    assert child_of(running) == 0
    running.check()
    await drive(shop, running.free)


async def test_a_step_saved_without_a_response_is_not_run_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """C100: within the attempt its value is known."""
    save = RunningAttempt.save_step
    answers = [UnreachableError("no answer")]

    def once(running: Any, name: str, value: str) -> Any:
        if answers:
            raise answers.pop()
        return save(running, name, value)

    monkeypatch.setattr(RunningAttempt, "save_step", once)

    async def work(attempt: Any) -> str:
        with pytest.raises(UnreachableError):
            await shop.charge(attempt)
        return await shop.charge(attempt)

    assert await shop.run("k", work) == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 1}
    assert shop.row("k").step == {"charge": "receipt of k:charge"}
