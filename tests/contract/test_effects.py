"""`IdempotentEffect` runs one effect outside the database per key, and every caller gets its result."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.orm import Session

from pgfence import schema
from pgfence.config import configure
from pgfence.effects import AsyncIdempotentEffect, IdempotentEffect
from pgfence.errors import (
    AttemptLostError,
    IdempotencyInProgressError,
    IdempotencyKeyReusedError,
    IdempotencyMisuseError,
    LockTimeoutError,
    PgfenceError,
    SchemaError,
)
from pgfence.monitoring import free_key
from support.effects import Gate, Shop
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.worlds import World

ROUNDS = 100 if os.environ.get("PGFENCE_TEST_FAULTS") else 1
CALLERS = 20
pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@dataclass(frozen=True)
class Receipt:
    """A result with a type that JSON does not have."""

    key: str
    amount: Decimal = Decimal("1.10")


class Declined(Exception):
    """A result that is an error."""

    def __init__(self, amount: int) -> None:
        super().__init__(amount)
        self.amount = amount


@pytest.fixture
def shop(world: World, admin: psycopg.Connection[Any]) -> Shop:
    """Effects of a world, and a provider that counts them."""
    return Shop(world, admin)


@pytest.mark.every_driver
async def test_the_work_runs_once_and_every_caller_gets_its_result(shop: Shop) -> None:
    """C105: a second call does nothing and returns an equal result."""
    first = await shop.run("k")
    assert await shop.run("k") == first == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 1}
    row = shop.row("k")
    assert (row.status, row.attempt, row.result) == ("done", 1, "receipt of k:charge")
    assert 86000 < row.record_left <= 86400


async def test_a_second_caller_raises_in_progress_at_once(shop: Shop) -> None:
    """Without a timeout the second caller does not wait; the error says when to retry, or that the claim is no longer renewed."""
    gate = Gate()

    async def slow(attempt: Any) -> str:
        await gate.wait()
        return await shop.charge(attempt)

    winner = asyncio.create_task(shop.run("k", slow, who=shop.world.other(), ttl=30))
    await gate.reached()
    with pytest.raises(IdempotencyInProgressError, match="attempt 1 at .* is running") as told:
        await shop.run("k", ttl=30)
    assert told.value.retry_after == 1
    shop.set("k", "locked_at = locked_at - interval '20 s', locked_until = locked_until - interval '20 s'")
    with pytest.raises(IdempotencyInProgressError) as told:
        await shop.run("k", ttl=30)
    assert 9 < (told.value.retry_after or 0) <= 10
    gate.open()
    assert await winner == await shop.run("k")
    assert shop.provider.done == 1


async def test_of_many_concurrent_calls_one_runs_and_all_results_are_equal(shop: Shop) -> None:
    """C095: of twenty callers that wait for one key, one executes the work, and all get equal results."""
    for n in range(ROUNDS):
        callers = [shop.run(f"k{n}", who=shop.world.other(), timeout=30) for _ in range(CALLERS)]
        answers = await asyncio.gather(*callers)
        assert set(answers) == {f"receipt of k{n}:charge"}
        assert shop.provider.asked[f"k{n}:charge"] == 1


async def test_a_winner_that_fails_at_random_is_followed_until_one_succeeds(shop: Shop) -> None:
    """C095: if failed attempts are known to have had no effect, exactly one attempt succeeds."""
    chance = random.Random(1)

    async def work(attempt: Any) -> str:
        if chance.random() < 0.5:
            raise ConnectionRefusedError
        return await shop.charge(attempt)

    async def execute_with_retry(key: str) -> str:
        who = shop.world.other()
        for _ in range(100):
            try:
                receipt: str = await shop.run(key, work, who=who, timeout=30, free=[ConnectionRefusedError])
            except ConnectionRefusedError:
                continue
            return receipt
        raise AssertionError(key)

    for n in range(ROUNDS):
        answers = await asyncio.gather(*(execute_with_retry(f"k{n}") for _ in range(CALLERS)))
        assert set(answers) == {f"receipt of k{n}:charge"}
        assert shop.provider.asked[f"k{n}:charge"] == 1


@pytest.mark.every_driver
async def test_what_comes_back_is_equal_and_of_the_same_type(shop: Shop) -> None:
    """C105: a dataclass with a Decimal, as the result and as what a step returned."""

    async def work(attempt: Any) -> Receipt:
        receipt: Receipt = await shop.step(attempt, "charge", Receipt)
        assert receipt.amount == Decimal("1.10")
        return receipt

    first = await shop.run("k", work, result=Receipt)
    assert await shop.run("k", work, result=Receipt) == first == Receipt("k:charge")


# ---------------------------------------------------------------- how an attempt ends


@pytest.mark.every_driver
async def test_an_unknown_failure_keeps_the_claim_until_its_time_is_over(shop: Shop) -> None:
    """C101: no attempt runs before the claim has expired; the next one has the steps that were saved."""

    async def work(attempt: Any) -> str:
        receipt = await shop.charge(attempt)
        if attempt.number == 1:
            raise ZeroDivisionError
        return f"{receipt}, {attempt.number}"

    with pytest.raises(ZeroDivisionError):
        await shop.run("k", work, ttl=0.5)
    with pytest.raises(IdempotencyInProgressError):
        await shop.run("k", work)
    assert await shop.run("k", work, timeout=5) == "receipt of k:charge, 2"
    assert shop.provider.asked == {"k:charge": 1}


async def test_a_failure_that_did_nothing_frees_the_key_at_once(shop: Shop) -> None:
    """C101: the next caller runs as another attempt, with the steps of the one before."""

    async def work(attempt: Any) -> str:
        await shop.charge(attempt)
        if attempt.number < 3:
            raise ConnectionRefusedError(attempt.number)
        return "sent"

    for number in (1, 2):
        with pytest.raises(ConnectionRefusedError) as told:
            await shop.run("k", work, free=[OSError])
        assert told.value.args == (number,)
        assert (shop.row("k").status, shop.row("k").claim_left) == ("free", None)
    assert await shop.run("k", work, free=[OSError]) == "sent"
    assert shop.provider.asked == {"k:charge": 1}


async def test_a_recorded_error_is_raised_again_without_running(shop: Shop) -> None:
    """C101: the same type and data each time, and a note that it is a replay."""

    async def work(attempt: Any) -> str:
        await shop.charge(attempt)
        raise Declined(7)

    for asked in (1, 1):
        with pytest.raises(Declined) as told:
            await shop.run("k", work, record=[Declined], free=[Exception])
        assert told.value.amount == 7
        assert shop.provider.asked == {"k:charge": asked}
    assert "replayed" in told.value.__notes__[0]
    assert shop.row("k").status == "failed"


async def test_an_unstorable_result_type_is_rejected_before_the_work(shop: Shop) -> None:
    """C105: nothing is done and the key stays free; without an annotation the outcome is unknown, and the error says so."""

    async def annotated(attempt: Any) -> Receipt:
        return Receipt(await shop.charge(attempt))

    async def silent(attempt: Any) -> Any:
        return Receipt(await shop.charge(attempt))

    annotated.__annotations__["return"] = Receipt
    body = shop.body(annotated)
    body.__annotations__ = {"return": Receipt}
    with pytest.raises(IdempotencyMisuseError, match="was not called: it returns an instance of Receipt"):
        await shop.world.call(shop.effect("k", result=None).run, body)
    assert (shop.provider.done, shop.row("k")) == (0, None)
    with pytest.raises(IdempotencyMisuseError, match="contains an instance of Receipt") as told:
        await shop.run("k", silent, result=None)
    assert "its result could not be stored" in told.value.__notes__[0]
    assert shop.row("k").status == "in_progress"


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("options", [{"record": [Exception]}, {"free": [Exception, IdempotencyMisuseError]}])
async def test_what_was_done_and_not_saved_is_unknown_whatever_the_error(shop: Shop, options: dict[str, Any]) -> None:
    """C101: neither recorded as a result nor freed at once: a step that cannot be saved, a result that cannot be stored."""

    async def in_step(attempt: Any) -> Any:
        return await shop.step(attempt, "charge", lambda key: shop)

    async def at_end(attempt: Any) -> Any:
        return shop

    for key, work in (("step", in_step), ("end", at_end)):
        with pytest.raises(IdempotencyMisuseError, match="contains an instance of Shop"):
            await shop.run(key, work, result=None, **options)
        assert (shop.row(key).status, shop.row(key).claim_left > 50) == ("in_progress", True)


async def test_an_error_of_pgfence_is_recorded_only_if_its_class_is_named(shop: Shop) -> None:
    """C101: `record=Exception` does not store a pgfence error that a retry would resolve."""
    gate = Gate()

    async def late(attempt: Any) -> str:
        await gate.wait()
        return await shop.charge(attempt)

    async def busy(attempt: Any) -> str:
        raise LockTimeoutError("x", names=("x",))

    work = asyncio.create_task(shop.run("k", late, who=shop.world.other(), record=[PgfenceError, Exception]))
    await gate.reached()
    shop.lapse("k")
    await shop.run("k")
    gate.open()
    with pytest.raises(AttemptLostError):
        await work
    assert shop.row("k").status == "done"
    with pytest.raises(LockTimeoutError):
        await shop.run("a", busy, record=[Exception], free=[Exception])
    assert shop.row("a").status == "in_progress"
    with pytest.raises(LockTimeoutError):
        await shop.run("b", busy, free=[TimeoutError, LockTimeoutError])
    assert shop.row("b").status == "free"


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("state", ["53100", "57014", "58030", "XX000"])
async def test_a_result_that_a_server_in_trouble_rejects_is_stored_later(
    shop: Shop, admin: psycopg.Connection[Any], state: str
) -> None:
    """After a full disk or a cancelled statement the call raises, the work is not repeated, and its result is stored later."""
    named = f"trouble_{secrets.token_hex(6)}"
    admin.execute(
        f"CREATE FUNCTION {named}() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN RAISE EXCEPTION 'in trouble' USING ERRCODE = '{state}'; END $$;"
        f" CREATE TRIGGER {named} BEFORE UPDATE ON pgfence_idempotency_key FOR EACH ROW"
        f" WHEN (NEW.status = 'done' AND NEW.scope = '{shop.scope}') EXECUTE FUNCTION {named}()".encode()
    )
    try:
        with pytest.raises(Exception, match="in trouble") as caught:
            await shop.run("k")
        assert any("call again with the key" in note for note in caught.value.__notes__)
    finally:
        admin.execute(f"DROP FUNCTION {named} CASCADE".encode())
    await eventually(lambda: shop.row("k").status == "done", 10)
    assert await shop.run("k") == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 1}


async def test_a_late_attempt_is_rejected_once_a_transaction_has_the_key(shop: Shop) -> None:
    """C100: the record had expired and a transaction claimed the key as new; its result stays."""
    gate = Gate()

    async def late(attempt: Any) -> str:
        await gate.wait()
        return "late"

    work = asyncio.create_task(shop.run("k", late, who=shop.world.other()))
    await gate.reached()
    shop.lapse("k")
    shop.expire("k")
    async with shop.at_work("k"):
        pass
    gate.open()
    with pytest.raises(AttemptLostError):
        await work
    assert await shop.run("k") == "of the transaction"


@pytest.mark.every_driver
@pytest.mark.async_only
async def test_a_cancelled_attempt_has_an_unknown_outcome(shop: Shop) -> None:
    """The claim is not renewed any more, and the next attempt follows after its time."""

    async def hang(attempt: Any) -> str:
        await asyncio.sleep(30)
        return ""

    task = asyncio.create_task(shop.run("k", hang, ttl=0.5))
    await eventually(lambda: shop.row("k") is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await shop.run("k", timeout=5) == "receipt of k:charge"
    assert shop.row("k").attempt == 2


# ---------------------------------------------------------------- lost, and taken over


async def test_a_long_attempt_is_renewed(shop: Shop) -> None:
    """The heartbeat keeps extending the claim, and the record always outlives the claim by `keep`."""
    gate = Gate()

    async def slow(attempt: Any) -> str:
        await gate.wait()
        attempt.check()
        return await shop.charge(attempt)

    work = asyncio.create_task(shop.run("k", slow, who=shop.world.other(), ttl=3, keep=5))
    await gate.reached()
    first = before = shop.row("k")
    while before.locked_until < first.locked_until + timedelta(seconds=1.5):
        with pytest.raises(IdempotencyInProgressError):
            await shop.run("k", timeout=0.2)
        row = shop.row("k")  # once: it is renewed all the while
        assert row.claim_id == first.claim_id and row.locked_until >= before.locked_until
        assert 4.99 < row.record_left - row.claim_left < 5.01
        before = row
    gate.open()
    assert await work == "receipt of k:charge"
    assert shop.row("k").attempt == 1


async def test_what_a_lost_attempt_has_saved_outlives_its_claim(shop: Shop) -> None:
    """C101: with the shortest `keep` the key is not new: without takeover the error says so, with it no step is repeated."""

    async def dies(attempt: Any) -> str:
        await shop.charge(attempt)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await shop.run("k", dies, ttl=5, keep=5)
    shop.set("k", "expires_at = clock_timestamp() + (expires_at - locked_until), locked_until = clock_timestamp()")
    with pytest.raises(AttemptLostError, match="its outcome is unknown"):
        await shop.run("k", takeover=False)
    assert await shop.run("k") == "receipt of k:charge"
    assert shop.row("k").attempt == 2
    assert shop.provider.asked == {"k:charge": 1}


@pytest.mark.every_driver
async def test_a_late_attempt_is_rejected_and_the_result_of_the_newest_stays(shop: Shop) -> None:
    """C100: an attempt that was taken over can neither save a step nor finish."""
    gate = Gate()
    refused: list[Any] = []

    async def late(attempt: Any) -> str:
        await gate.wait()
        try:
            await shop.step(attempt, "late", lambda key: "too late")
        except AttemptLostError as error:
            refused.append(error)
        return "of the late one"

    work = asyncio.create_task(shop.run("k", late, who=shop.world.other()))
    await gate.reached()
    shop.lapse("k")
    assert await shop.run("k") == "receipt of k:charge"
    gate.open()
    with pytest.raises(AttemptLostError, match="attempt 2 has taken over") as told:
        await work
    for error in (told.value, refused[0]):
        assert (error.scope, error.key, error.attempt, error.newest) == (shop.scope, "k", 1, 2)
    assert await shop.run("k") == "receipt of k:charge"
    assert shop.row("k").step == {"charge": "receipt of k:charge"}


async def test_an_attempt_whose_claim_expired_raises_before_its_next_step(shop: Shop) -> None:
    """Once the heartbeat has noticed the end, `check()` and `step()` raise, and the step's work is not done."""
    gate = Gate()
    seen: list[Any] = []

    async def late(attempt: Any) -> str:
        seen.append(attempt)
        await gate.wait()
        return await shop.charge(attempt)

    def lost() -> bool:
        try:
            seen[0].check()
        except AttemptLostError:
            return True
        return False

    work = asyncio.create_task(shop.run("k", late, who=shop.world.other(), ttl=0.4))
    await gate.reached()
    shop.lapse("k")
    await eventually(lost)
    gate.open()
    with pytest.raises(AttemptLostError, match="not renewed in time"):
        await work
    assert shop.provider.done == 0


async def test_without_takeover_only_an_operator_frees_the_key(shop: Shop) -> None:
    """C099: the outcome of a lost attempt stays unknown for all callers, until an operator frees the key."""

    async def fail(attempt: Any) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await shop.run("k", fail, takeover=False)
    with pytest.raises(IdempotencyInProgressError):
        await shop.run("k", takeover=False)
    shop.lapse("k")
    for _ in range(2):
        with pytest.raises(AttemptLostError, match="its outcome is unknown") as told:
            await shop.run("k", takeover=False, timeout=3)
        assert (told.value.attempt, told.value.newest) == (1, 1)
    shop.set(
        "k", "locked_until = clock_timestamp() - interval '1 h', expires_at = clock_timestamp() + interval '1 min'"
    )
    await shop.world.call(free_key, shop.engine, shop.scope, "k", reason="the provider has nothing")
    assert shop.row("k").record_left > 3600, "what it has saved is over soon"
    assert await shop.run("k", takeover=False) == "receipt of k:charge"
    assert shop.row("k").attempt == 2


async def test_an_operator_ends_an_attempt_that_is_running(shop: Shop) -> None:
    """C100: its late finish is rejected, and the next caller runs at once."""
    gate = Gate()

    async def slow(attempt: Any) -> str:
        await gate.wait()
        return "late"

    work = asyncio.create_task(shop.run("k", slow, who=shop.world.other()))
    await gate.reached()
    await shop.world.call(free_key, shop.engine, shop.scope, "k", reason="it hangs")
    assert await shop.run("k") == "receipt of k:charge"
    gate.open()
    with pytest.raises(AttemptLostError):
        await work
    assert shop.row("k").result == "receipt of k:charge"


# ---------------------------------------------------------------- whose key it is


async def test_another_payload_is_rejected_first(shop: Shop) -> None:
    """C104, C102: while an attempt is running, with or without a wait, and after it was lost, failed or finished."""
    gate = Gate()

    async def slow(attempt: Any) -> str:
        await gate.wait()
        raise ConnectionRefusedError

    async def refused() -> None:
        for timeout in (0, 5):
            with pytest.raises(IdempotencyKeyReusedError) as told:
                await shop.run("k", payload={"amount": 2}, timeout=timeout)
            assert (told.value.scope, told.value.key) == (shop.scope, "k")

    options: dict[str, Any] = {"payload": {"amount": 1}, "free": [OSError]}
    work = asyncio.create_task(shop.run("k", slow, who=shop.world.other(), **options))
    await gate.reached()
    with pytest.raises(IdempotencyInProgressError):
        await shop.run("k", payload={"amount": Decimal("1.0")})
    await refused()
    gate.open()
    with pytest.raises(ConnectionRefusedError):
        await work
    await refused()
    assert await shop.run("k", **options) == "receipt of k:charge"
    await refused()
    assert await shop.run("k", scope=f"{shop.scope}:other", payload={"amount": 2}) == "receipt of k:charge"


async def test_a_record_that_is_over_is_forgotten(shop: Shop) -> None:
    """After `keep` the key counts as new, with any payload and no steps. A renewed claim never expires."""
    await shop.run("k", payload=1)
    shop.expire("k")
    assert await shop.run("k", payload=2) == "receipt of k:charge"
    assert shop.provider.asked["k:charge"] == 2
    assert (shop.row("k").attempt, shop.row("k").status) == (1, "done")


@pytest.mark.every_driver
async def test_effects_and_transactions_replay_each_others_results(shop: Shop) -> None:
    """C095: effects and transactions recognize each other's rows as in progress, done or of another payload."""
    async with shop.at_work("k", payload=1):
        with pytest.raises(IdempotencyInProgressError, match="another transaction"):
            await shop.run("k", payload=1, timeout=0.05)
        with pytest.raises(IdempotencyKeyReusedError):
            await shop.run("k", payload=2)
    assert await shop.run("k", payload=1) == "of the transaction"
    gate = Gate()

    async def slow(attempt: Any) -> str:
        await gate.wait()
        return await shop.charge(attempt)

    work = asyncio.create_task(shop.run("e", slow, who=shop.world.other(), payload=1))
    await gate.reached()
    with pytest.raises(IdempotencyInProgressError):
        await shop.in_transaction("e", payload=1)
    with pytest.raises(IdempotencyKeyReusedError):
        await shop.in_transaction("e", payload=2)
    gate.open()
    assert await work == await shop.in_transaction("e", payload=1) == "receipt of e:charge"

    async def away(attempt: Any) -> str:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        await shop.run("f", away, payload=1, free=(OSError,))
    with pytest.raises(IdempotencyKeyReusedError):
        await shop.in_transaction("f", payload=2)
    async with shop.at_work("f", payload=1):
        pass
    assert await shop.run("f", payload=1) == "of the transaction"


# ---------------------------------------------------------------- what it needs, and refuses


async def test_no_connection_of_the_pool_is_used(world: World, admin: psycopg.Connection[Any]) -> None:
    """Claims, steps and results use separate connections, so a request with the pool's last connection works."""
    shop = Shop(world, admin, pool_size=1, max_overflow=0, pool_timeout=0.5)
    async with world.enter(shop.engine.connect()):
        assert await shop.run("k") == "receipt of k:charge"


async def test_the_namespace_separates_keys(shop: Shop) -> None:
    """Two deployments with different namespaces do not see each other's keys."""
    configure(shop.engine, namespace="blue")
    await shop.run("k")
    assert shop.row("k") is None
    other = shop.world.engine()
    configure(other, namespace="green")
    assert await shop.run("k", engine=lambda: other) == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 2}


@pytest.mark.every_driver
async def test_a_per_cent_sign_may_be_in_the_names_of_the_tables(shop: Shop) -> None:
    """Table names with a percent sign work, also for a role with another DateStyle."""
    styled = (
        {"server_settings": {"DateStyle": "German"}}
        if shop.world.name == "asyncpg"
        else {"options": "-c DateStyle=German"}
    )
    engine = shop.world.engine(connect_args=styled)
    configure(engine, prefix="50%_")
    await shop.world.call(schema.create_all, engine)
    for _ in range(2):
        assert await shop.run("k", engine=engine) == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 1}
    await shop.world.call(schema.drop_all, engine)


@pytest.mark.every_driver
async def test_missing_tables_are_reported_before_the_work(world: World, admin: psycopg.Connection[Any]) -> None:
    """A SchemaError names the command that creates the tables, and the work does not run."""
    shop = Shop(world, admin)
    configure(shop.engine, schema="nowhere")
    with pytest.raises(SchemaError, match="pgfence install --schema nowhere"):
        await shop.run("k")
    assert shop.provider.done == 0


@pytest.mark.every_driver
async def test_a_role_needs_the_rights_that_its_error_names(
    world: World, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """Without the privileges in the error nothing is done, and with them everything works."""
    shop = Shop(world, admin, dsn=role())
    with pytest.raises(SchemaError, match="permission denied on pgfence's tables") as told:
        await shop.run("k")
    assert told.value.command is not None
    user = shop.engine.url.username
    admin.execute(told.value.command.replace("<role>", user).encode())
    assert await shop.run("k") == await shop.run("k") == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": ""}, "the key must not be empty"),
        ({"key": "k" * 256}, "not be longer than 255"),
        ({"key": "a\x1fb"}, "control characters"),
        ({"scope": "  "}, "the scope must not be blank"),
        ({"ttl": 0.1}, "ttl must be at least 0.3 s"),
        ({"keep": 30}, "keep=30 is shorter than ttl=60"),
        ({"ttl": timedelta(days=2)}, "keep=86400 is shorter than ttl=172800"),
        ({"timeout": -1}, "timeout must be 0 or more"),
        ({"payload": float("nan")}, "its numbers must be finite"),
    ],
)
def test_arguments_that_cannot_be_used_are_rejected(options: dict[str, Any], message: str) -> None:
    """C108, C110: the constructor rejects them, before anything is sent."""
    given: dict[str, Any] = {"key": "k", "scope": "s"} | options
    kinds: list[Any] = [IdempotentEffect, AsyncIdempotentEffect]
    for kind in kinds:
        with pytest.raises(ValueError, match=message):
            kind(object, **given)


def test_types_that_cannot_be_used_are_rejected() -> None:
    """C105: a class whose instances cannot be stored, `record` without exception classes, a coroutine function, another engine."""
    kind: Any = IdempotentEffect
    for options in ({"result": Gate}, {"record": ["x"]}, {"free": [int]}, {"takeover": None}):
        with pytest.raises(TypeError):
            kind(object, "k", scope="s", **options)
    with pytest.raises(TypeError, match="claimed in a separate transaction"):
        kind(Session(), "k", scope="s")

    async def work(attempt: Any) -> None: ...

    def generator(attempt: Any) -> Any:
        yield

    class Caller:
        async def __call__(self, attempt: Any) -> None: ...

    for fn in (work, Caller()):
        with pytest.raises(TypeError, match="needs an AsyncIdempotentEffect"):
            kind(object, "k", scope="s").run(fn)
    with pytest.raises(TypeError, match="generator function"):
        kind(object, "k", scope="s").run(generator)
