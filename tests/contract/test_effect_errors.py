"""After an attempt ends with an error, its note, the log and the next call's error give the state of the key."""

from __future__ import annotations

import asyncio
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.errors import AttemptLostError, IdempotencyInProgressError, IdempotencyMisuseError
from support.effects import Gate, Shop
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


class Away(Exception):
    """The provider was not reached."""


@pytest.fixture
def shop(world: World, admin: psycopg.Connection[Any]) -> Shop:
    """Effects of a world, and a provider that counts them."""
    return Shop(world, admin)


async def fail(attempt: Any) -> str:
    raise Away


def age(shop: Shop, seconds: int) -> None:
    """Move a claim into the past, as if it had not been renewed for that long."""
    older = f"interval '{seconds} s'"
    shop.set("k", f"locked_at = locked_at - {older}, locked_until = locked_until - {older}")


async def refused(shop: Shop, **options: Any) -> IdempotencyInProgressError:
    """Return the error of a call that does not get the key."""
    with pytest.raises(IdempotencyInProgressError) as caught:
        await shop.run("k", **options)
    return caught.value


@pytest.mark.every_driver
async def test_an_error_of_unknown_meaning_says_when_the_key_is_free(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    """The first error has a note and a log record with the row's time; the next call says which error, and when the key is free."""
    with pytest.raises(Away) as first:
        await shop.run("k", fail, ttl=30)
    (note,) = first.value.__notes__
    assert "ended with this error" in note
    assert "the next call then runs attempt 2" in note
    assert "add its class to free=" in note
    told = re.search(r"free in [\d.]+ s, at (\S+): ", note)
    assert told is not None
    assert datetime.fromisoformat(told[1]) == shop.row("k").locked_until.replace(microsecond=0)
    logged = [one for one in caplog.records if "ended with Away" in one.getMessage()]
    assert [(one.name, one.levelname) for one in logged] == [("pgfence.idempotency", "WARNING")]

    age(shop, 10)
    for options in ({}, {"timeout": 0.05, "ttl": 1}):
        next_call = await refused(shop, **options)
        assert re.search(r"attempt 1 at .* ended with Away, .* becomes free in [\d.]+ s, at ", str(next_call))
        assert next_call.ended_with == "Away"
        assert shop.row("k").claim_left <= (next_call.retry_after or 0) <= 20


async def test_an_error_whose_meaning_is_named_says_what_becomes_of_the_key(shop: Shop) -> None:
    """With `free` the next call runs. With `record` it raises the same error, with a note that it is a replay."""
    with pytest.raises(Away) as freed:
        await shop.run("k", fail, free=[Away])
    assert re.search(r"listed in free=: the key is free. The next call runs attempt 2", freed.value.__notes__[0])
    with pytest.raises(Away) as recorded:
        await shop.run("k", fail, record=[Away], keep=70)
    assert "is stored as the result, and calls with this key raise it again for 70 s" in recorded.value.__notes__[0]
    with pytest.raises(Away) as again:
        await shop.run("k", fail, record=[Away])
    assert len(again.value.__notes__) == 1
    assert "replayed" in again.value.__notes__[0]


async def test_without_takeover_the_errors_say_what_to_do(shop: Shop) -> None:
    """Without takeover the key is not free when its claim ends; the note and the later errors say what to do."""
    with pytest.raises(Away) as first:
        await shop.run("k", fail, takeover=False)
    busy = await refused(shop, takeover=False)
    for text in (first.value.__notes__[0], str(busy)):
        assert "no other attempt follows (takeover=False)" in text
        assert "pgfence keys free" in text
    shop.lapse("k")
    with pytest.raises(
        AttemptLostError, match="ended with Away, and its outcome is unknown.*pgfence keys free"
    ) as lost:
        await shop.run("k", takeover=False)
    assert lost.value.retry_after is None


async def test_retry_after_comes_from_the_claim_not_from_the_callers_ttl(shop: Shop) -> None:
    """A claim of ten minutes that was last renewed four hundred seconds ago is free in two hundred, for any caller."""
    gate = Gate()

    async def slow(attempt: Any) -> str:
        await gate.wait()
        return await shop.charge(attempt)

    work = asyncio.create_task(shop.run("k", slow, who=shop.world.other(), ttl=600))
    await gate.reached()
    for ttl in (30, 80_000):
        running = await refused(shop, ttl=ttl, keep=80_000)
        assert (running.retry_after, running.ended_with) == (1, None)
        assert "is running" in str(running)
    age(shop, 400)
    for ttl in (30, 80_000):
        silent = await refused(shop, ttl=ttl, keep=80_000)
        assert 190 < (silent.retry_after or 0) <= 200
        assert re.search(
            r"has not renewed its claim for 4\d\d\.\d s: its process hangs, has died or cannot reach the server",
            str(silent),
        )
    gate.open()
    assert await work == "receipt of k:charge"


@pytest.mark.every_driver
@pytest.mark.async_only
async def test_a_cancelled_attempt_is_known_to_have_ended(shop: Shop) -> None:
    """A cancellation does not wait for the server, and the next caller still learns that the attempt has ended."""
    begun = asyncio.Event()

    async def hang(attempt: Any) -> str:
        begun.set()
        await asyncio.sleep(60)
        return ""

    task = asyncio.create_task(shop.run("k", hang))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await task
    assert "the next call then runs attempt 2" in cancelled.value.__notes__[0]
    await eventually(lambda: shop.row("k").result is not None)
    assert (await refused(shop)).ended_with == "CancelledError"


@pytest.mark.parametrize("option", ["none", "record", "free"])
async def test_an_error_after_the_commit_says_that_the_result_is_stored(shop: Shop, option: str) -> None:
    """The state of the key is read from its row, so a completed attempt is not waited for, whatever the error means."""
    options = {} if option == "none" else {option: [Away]}

    async def commit_and_fail(attempt: Any) -> str:
        session = shop.session()
        await shop.soon(attempt.complete(session, "paid"))
        await shop.soon(session.commit())
        await shop.soon(session.close())
        raise Away

    with pytest.raises(Away) as first:
        await shop.run("k", commit_and_fail, **options)
    assert first.value.__notes__[0].endswith("after its result was committed: the next call returns that result")
    assert await shop.run("k") == "paid"


@pytest.mark.parametrize("option", ["record", "free"])
async def test_an_error_that_rolls_a_completed_attempt_back_keeps_its_meaning(shop: Shop, option: str) -> None:
    """The transaction of `complete()` was rolled back, so an error that is listed is recorded, or frees the key."""

    async def roll_back_and_fail(attempt: Any) -> str:
        session = shop.session()
        await shop.soon(attempt.complete(session, "paid"))
        await shop.soon(session.rollback())
        await shop.soon(session.close())
        raise Away

    with pytest.raises(Away) as first:
        await shop.run("k", roll_back_and_fail, **{option: [Away]})
    assert f"which is listed in {option}=" in first.value.__notes__[0]
    assert shop.row("k").status == {"record": "failed", "free": "free"}[option]


async def test_a_result_that_was_not_committed_says_when_the_key_is_free(shop: Shop) -> None:
    """The transaction of `complete()` was rolled back: the attempt has ended, and its claim stays."""

    async def roll_back(attempt: Any) -> str:
        session = shop.session()
        await shop.soon(attempt.complete(session, "paid"))
        await shop.soon(session.rollback())
        await shop.soon(session.close())
        return "paid"

    with pytest.raises(IdempotencyMisuseError, match="was not committed") as first:
        await shop.run("k", roll_back)
    assert "the next call then runs attempt 2" in first.value.__notes__[0]
    assert (await refused(shop)).ended_with == "IdempotencyMisuseError"


async def test_an_attempt_that_was_overtaken_says_when_to_ask_for_its_result(shop: Shop) -> None:
    """The note names the attempt that has taken over, and the error of a lost attempt says when to retry."""
    for ending in ("raises", "returns"):
        shop.provider.asked.clear()
        gate = Gate()

        async def late(attempt: Any, gate: Gate = gate, ending: str = ending) -> str:
            await gate.wait()
            if ending == "raises":
                raise Away
            return "late"

        scope = f"{shop.scope}:{ending}"
        work = asyncio.create_task(shop.run("k", late, who=shop.world.other(), scope=scope))
        await gate.reached()
        shop.admin.execute("UPDATE pgfence_idempotency_key SET locked_until = locked_at WHERE scope = %s", [scope])
        await shop.run("k", scope=scope)
        gate.open()
        with pytest.raises((Away, AttemptLostError)) as ended:
            await work
        if isinstance(ended.value, AttemptLostError):
            assert ended.value.retry_after == 1
        else:
            assert "ended with this error after attempt 2 had taken over" in ended.value.__notes__[0]


async def test_a_key_of_an_effect_names_its_attempt_to_transactions(shop: Shop) -> None:
    """A transaction does not wait for attempts: the error names the attempt, its outcome, and when the key can be claimed."""
    gate = Gate()

    async def late(attempt: Any) -> str:
        await gate.wait()
        raise Away

    work = asyncio.create_task(shop.run("k", late, who=shop.world.other(), keep=70))
    await gate.reached()
    with pytest.raises(
        IdempotencyInProgressError, match="attempt 1 of an IdempotentEffect, which is running"
    ) as running:
        await shop.in_transaction("k")
    assert running.value.retry_after == 1
    gate.open()
    with pytest.raises(Away):
        await work
    for remaining, how in ((60, "ended with Away"), (0, "ended with Away")):
        with pytest.raises(IdempotencyInProgressError, match=f"which {how}.*Use separate scopes") as ended:
            await shop.in_transaction("k")
        assert 60 + remaining < (ended.value.retry_after or 0) <= 70 + remaining
        shop.set("k", "locked_until = locked_at, expires_at = expires_at - interval '60 s'")


@pytest.mark.parametrize("world", ["psycopg", "asyncpg"], indirect=True)
async def test_a_result_of_another_type_is_rejected_before_it_is_stored(shop: Shop) -> None:
    """The error names both types, whether the function returns the result or completes a transaction with it."""

    async def returns(attempt: Any) -> Any:
        return 5

    async def completes(attempt: Any) -> Any:
        session = shop.session()
        try:
            await shop.soon(attempt.complete(session, 5))
        finally:
            await shop.soon(session.close())

    for work in (returns, completes):
        with pytest.raises(IdempotencyMisuseError, match="declared as str .* but contains an int") as caught:
            await shop.run(work.__name__, work, record=[Exception], free=[Exception])
        assert "the next call then runs attempt 2" in caught.value.__notes__[-1]
        assert shop.row(work.__name__).status == "in_progress"
