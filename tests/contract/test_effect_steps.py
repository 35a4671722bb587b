"""Each step of an effect runs once, and `complete()` commits the result together with the caller's rows."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgfence import schema
from pgfence.errors import (
    AttemptLostError,
    IdempotencyInProgressError,
    IdempotencyMisuseError,
    TransactionStateError,
)
from support.effects import Gate, Shop
from support.servers import database
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@dataclass
class Unreached:
    """A class that no result= names."""

    key: str


class Name(str, Enum):  # noqa: UP042  # what a program has that began before StrEnum
    """A key that is not a plain str."""

    KEY = "va"


@pytest.fixture
def shop(world: World, admin: psycopg.Connection[Any]) -> Shop:
    """Effects of a world, and a provider that counts them."""
    return Shop(world, admin)


@pytest.fixture
def payments(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of the business."""
    name = f"payment_{secrets.token_hex(6)}"
    admin.execute(f"CREATE TABLE {name} (who text)".encode())
    yield name
    admin.execute(f"DROP TABLE {name}".encode())


def rows(shop: Shop, table: str) -> list[str]:
    return [row[0] for row in shop.admin.execute(f"SELECT who FROM {table} ORDER BY who".encode())]


# ---------------------------------------------------------------- steps


async def test_each_step_runs_once_with_its_own_key(shop: Shop) -> None:
    """The provider gets the key `<key>:<step>` in each attempt, and a saved step returns its value."""

    async def work(attempt: Any) -> str:
        one = await shop.step(attempt, "reserve", shop.provider.charge)
        assert await shop.step(attempt, "reserve", shop.provider.charge) == one
        two = await shop.step(attempt, "capture", shop.provider.charge)
        if attempt.number == 1:
            raise ConnectionRefusedError
        return f"{one}, {two}"

    with pytest.raises(ConnectionRefusedError):
        await shop.run("k", work, free=[OSError])
    assert await shop.run("k", work) == "receipt of k:reserve, receipt of k:capture"
    assert shop.provider.asked == {"k:reserve": 1, "k:capture": 1}


async def test_a_step_that_was_not_saved_is_done_again_with_the_same_key(shop: Shop) -> None:
    """C100: a step that was not saved is sent again with the same key, which the provider recognizes."""

    async def work(attempt: Any) -> str:
        def charge(key: str) -> str:
            receipt = shop.provider.charge(key)
            if attempt.number == 1:
                raise ConnectionResetError
            return receipt

        receipt: str = await shop.step(attempt, "charge", charge)
        return receipt

    with pytest.raises(ConnectionResetError):
        await shop.run("k", work, free=[OSError])
    assert await shop.run("k", work) == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 2}


@pytest.mark.every_driver
async def test_values_of_steps_may_be_anything_that_results_may_be(shop: Shop) -> None:
    """None, texts that jsonb does not take, and bytes come back; what cannot be stored says that the step was done."""
    values = [None, "\x00 \ud800", b"\xff", {1: (2, 3)}]

    async def work(attempt: Any) -> Any:
        found = [await shop.step(attempt, f"s{n}", lambda key: values[int(key[-1])]) for n in range(len(values))]
        if attempt.number == 1:
            raise ConnectionRefusedError
        return found

    with pytest.raises(ConnectionRefusedError):
        await shop.run("k", work, free=[OSError], result=None)
    assert await shop.run("k", work, result=None) == values

    async def wrong(attempt: Any) -> Any:
        return await shop.step(attempt, "charge", lambda key: shop)

    with pytest.raises(IdempotencyMisuseError, match="contains an instance of Shop") as told:
        await shop.run("w", wrong, result=None)
    assert "the step 'charge' of" in told.value.__notes__[0]


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["", " ", "a:b", "a\x00", "s" * 256])
async def test_names_that_no_step_can_have_are_rejected_before_it(shop: Shop, name: str) -> None:
    """C108: names of steps follow the rules of keys, without a colon, which could make two derived keys equal."""

    async def work(attempt: Any) -> str:
        receipt: str = await shop.step(attempt, name, shop.provider.charge)
        return receipt

    with pytest.raises(ValueError, match="the name of a step must not"):
        await shop.run("k", work, free=[ValueError])
    assert shop.provider.done == 0


async def test_a_step_type_that_cannot_be_saved_is_rejected_before_the_step(shop: Shop) -> None:
    """C105: with and without a result= that does not refer to it; a base class of a reachable class does not count as one."""

    def charge(key: str) -> Any:
        return shop.provider.charge(key)

    async def work(attempt: Any) -> str:
        charge.__annotations__["return"] = Unreached
        with pytest.raises(IdempotencyMisuseError, match="was not called: .*Unreached"):
            await shop.soon(attempt.step("charge", charge))
        charge.__annotations__["return"] = object
        return await shop.soon(attempt.step("charge", charge))

    for key, result in (("told", str), ("untold", None)):
        assert await shop.run(key, work, result=result) == f"receipt of {key}:charge"


async def test_a_key_is_its_plain_text(shop: Shop) -> None:
    """C108: a str enum formats itself in its own way, on each Python another; the provider gets the text that is stored."""
    assert await shop.run(Name.KEY) == "receipt of va:charge"
    assert await shop.run("va") == "receipt of va:charge"
    assert shop.provider.asked == {"va:charge": 1}


async def test_an_attempt_that_has_ended_does_nothing_more(shop: Shop) -> None:
    """An attempt that leaks out of its function is rejected before the work of its step."""
    leaked: list[Any] = []

    async def work(attempt: Any) -> str:
        leaked.append(attempt)
        return "done"

    await shop.run("k", work)
    with pytest.raises(IdempotencyMisuseError, match="has already ended"):
        leaked[0].check()
    with pytest.raises(IdempotencyMisuseError, match="has already ended"):
        await shop.world.call(leaked[0].step, "late", shop.provider.charge)
    assert shop.provider.done == 0


async def test_a_step_that_is_running_is_not_done_beside_itself(shop: Shop) -> None:
    """C100: the same name in two places of one attempt, nested or concurrent, is rejected before the second one runs."""

    async def work(attempt: Any) -> str:
        nested: list[Any] = []

        def charge(key: str) -> str:
            if not shop.world.is_async:
                with pytest.raises(IdempotencyMisuseError, match="is already running"):
                    attempt.step("charge", shop.provider.charge)
            else:
                nested.append(attempt.step("charge", charge))
            return shop.provider.charge(key)

        receipt: str = await shop.step(attempt, "charge", charge)
        if nested:
            assert await nested[0] == receipt
        return receipt

    assert await shop.run("k", work) == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 1}


@pytest.mark.async_only
async def test_steps_of_one_name_in_two_tasks_are_rejected(shop: Shop) -> None:
    """C100: a second step of the same name in another task is rejected while the first is running."""

    async def slow(key: str) -> str:
        await asyncio.sleep(0.05)
        return shop.provider.charge(key)

    async def work(attempt: Any) -> str:
        one, two = await asyncio.gather(*(attempt.step("charge", slow) for _ in range(2)), return_exceptions=True)
        assert isinstance(two, IdempotencyMisuseError)
        return str(one)

    assert await shop.run("k", work) == "receipt of k:charge"
    assert shop.provider.asked == {"k:charge": 1}


class Away(Exception):
    """The error of a provider that cannot be reached."""


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("option", ["free", "record"])
async def test_an_error_beside_a_running_step_leaves_the_outcome_unknown(shop: Shop, option: str) -> None:
    """C101: in spite of `free` and `record`, no other attempt repeats a step while the first one is still running."""
    others: list[Any] = []

    async def work(attempt: Any) -> str:
        if shop.world.is_async:
            begun, go = asyncio.Event(), asyncio.Event()

            async def slow_async(key: str) -> str:
                begun.set()
                await go.wait()
                return shop.provider.charge(key)

            others.append((go, asyncio.ensure_future(attempt.step("charge", slow_async))))
            await begun.wait()
        else:
            started, goes = threading.Event(), threading.Event()

            def slow(key: str) -> str:
                started.set()
                goes.wait(30)
                return shop.provider.charge(key)

            pool = ThreadPoolExecutor(1)
            others.append((goes, pool.submit(attempt.step, "charge", slow)))
            pool.shutdown(wait=False)
            started.wait(30)
        raise Away

    with pytest.raises(Away):
        await shop.run("k", work, **{option: (Away,)})
    with pytest.raises(IdempotencyInProgressError):
        await shop.run("k")
    ((go, step),) = others
    go.set()
    await eventually(step.done)
    assert isinstance(step.exception(), (AttemptLostError, IdempotencyMisuseError))
    assert shop.provider.asked == {"k:charge": 1}


async def test_sync_and_async_functions_are_not_mixed(shop: Shop) -> None:
    """Sync: a coroutine function is rejected before it runs. Async: a plain function has run by then, and its result counts."""

    async def asynchronous(key: str) -> str:
        return shop.provider.charge(key)

    def disguised(key: str) -> Any:
        return asynchronous(key)

    async def work(attempt: Any) -> str:
        if shop.world.is_async:
            return str(await attempt.step("charge", shop.provider.charge))
        for fn in (asynchronous, disguised):
            with pytest.raises(TypeError, match="needs an AsyncIdempotentEffect"):
                attempt.step("charge", fn)
        assert shop.provider.done == 0
        return str(attempt.step("charge", shop.provider.charge))

    assert await shop.run("k", work) == "receipt of k:charge"
    if shop.world.is_async:
        assert await shop.effect("plain").run(lambda attempt: "taken") == "taken"


# ---------------------------------------------------------------- the end inside a transaction


async def pay(shop: Shop, attempt: Any, table: str, *, commit: bool = True, then: Any = None) -> str:
    """Write a row and complete the attempt in one transaction; in the world of the attempt."""
    session = shop.session()
    insert = text(f"INSERT INTO {table} VALUES (:who)")
    try:
        await shop.soon(session.execute(insert, {"who": f"attempt {attempt.number}"}))
        await shop.soon(attempt.complete(session, f"paid by {attempt.number}"))
        if then is not None:
            await then()
        await shop.soon(session.commit() if commit else session.rollback())
    finally:
        await shop.soon(session.close())
    return "what the function returns does not count"


async def test_the_result_and_the_applications_rows_commit_together(shop: Shop, payments: str) -> None:
    """Every caller, including the first, gets the result that complete() was called with."""

    async def work(attempt: Any) -> str:
        await shop.charge(attempt)
        return await pay(shop, attempt, payments)

    assert await shop.run("k", work) == await shop.run("k", work) == "paid by 1"
    assert rows(shop, payments) == ["attempt 1"]
    assert shop.provider.asked == {"k:charge": 1}


@pytest.mark.every_driver
async def test_a_late_attempt_leaves_no_row(shop: Shop, payments: str) -> None:
    """C100: it is rejected inside its own transaction, whose rows roll back with it; the result is that of the newest."""
    gate = Gate()

    async def late(attempt: Any) -> str:
        await gate.wait()
        return await pay(shop, attempt, payments)

    async def work(attempt: Any) -> str:
        return await pay(shop, attempt, payments)

    slow = asyncio.create_task(shop.run("k", late, who=shop.world.other()))
    await gate.reached()
    shop.lapse("k")
    assert await shop.run("k", work) == "paid by 2"
    gate.open()
    with pytest.raises(AttemptLostError, match="was lost") as told:
        await slow
    assert told.value.sqlstate == "PF005"
    assert rows(shop, payments) == ["attempt 2"]
    assert shop.row("k").result == "paid by 2"


@pytest.mark.every_driver
async def test_a_late_attempt_that_swallows_its_rejection_commits_nothing(shop: Shop, payments: str) -> None:
    """C100: PostgreSQL has aborted its transaction. A late attempt with no successor may still commit."""
    gates = {"followed": Gate(), "alone": Gate()}

    async def late(attempt: Any, key: str) -> str:
        await gates[key].wait()
        session = shop.session()
        try:
            await shop.soon(session.execute(text(f"INSERT INTO {payments} VALUES (:key)"), {"key": key}))
            with suppress(AttemptLostError):
                await shop.soon(attempt.complete(session, key))
            with suppress(DBAPIError):
                await shop.soon(session.commit())
        finally:
            await shop.soon(session.close())
        return key

    tasks = {
        key: asyncio.create_task(
            shop.run(key, lambda attempt, key=key: late(attempt, key), who=shop.world.other(), ttl=0.4)
        )
        for key in gates
    }
    for gate in gates.values():
        await gate.reached()
    for key in gates:
        shop.lapse(key)
    await shop.run("followed")
    await eventually(lambda: shop.row("alone").claim_left < -1.2)
    for gate in gates.values():
        gate.open()
    with pytest.raises(AttemptLostError):
        await tasks["followed"]
    assert await tasks["alone"] == "alone"
    assert rows(shop, payments) == ["alone"]


@pytest.mark.every_driver
async def test_what_is_complete_is_not_completed_again(shop: Shop, payments: str) -> None:
    """C100: repeated after a COMMIT without a response, the transaction is rejected, and its rows with it."""

    async def work(attempt: Any) -> str:
        await pay(shop, attempt, payments)
        with pytest.raises(IdempotencyMisuseError, match="is already complete"):
            await pay(shop, attempt, payments)
        return ""

    assert await shop.run("k", work) == await shop.run("k", work) == "paid by 1"
    assert rows(shop, payments) == ["attempt 1"]


@pytest.mark.every_driver
async def test_connections_that_die_after_the_commit_do_not_hide_it(shop: Shop, payments: str) -> None:
    """C042: run() queries on another connection whether the transaction was committed."""

    async def work(attempt: Any) -> str:
        await pay(shop, attempt, payments)
        shop.admin.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name NOT IN ('admin', 'monitor')"
        )
        return ""

    assert await shop.run("k", work) == "paid by 1"


async def test_a_session_of_the_other_half_is_rejected(shop: Shop) -> None:
    """A sync session in an async attempt, or the reverse, is a clear TypeError, and nothing is stored."""

    async def work(attempt: Any) -> str:
        for wrong in (shop.world.pick(AsyncSession, Session)(), shop.world.engine(), None):
            with pytest.raises(TypeError, match=r"Attempt.complete\(\) needs an? (Async)?Session, not "):
                await shop.soon(attempt.complete(wrong, "x"))
        return "done"

    assert await shop.run("k", work) == "done"


async def test_no_attempt_takes_over_between_complete_and_commit(shop: Shop, payments: str) -> None:
    """C100: while complete() has the key's row locked, the next caller waits after the claim's end, and gets the result."""
    gate = Gate()

    async def work(attempt: Any) -> str:
        return await pay(shop, attempt, payments, then=gate.wait)

    first = asyncio.create_task(shop.run("k", work, who=shop.world.other(), ttl=0.4))
    await gate.reached()
    second = asyncio.create_task(shop.run("k", work, who=shop.world.other(), timeout=20))
    await eventually(lambda: shop.row("k").claim_left < -0.1)
    assert not second.done()
    gate.open()
    assert await second == await first == "paid by 1"
    assert rows(shop, payments) == ["attempt 1"]


async def test_an_uncommitted_transaction_leaves_the_outcome_unknown(shop: Shop, payments: str) -> None:
    """C101: complete() alone stores nothing, and a function that forgot its commit raises an error that says so."""

    async def work(attempt: Any) -> str:
        with pytest.raises(IdempotencyMisuseError, match="contains a Shop"):
            await shop.soon(attempt.complete(shop.session(), shop))
        await pay(shop, attempt, payments, commit=False)
        with pytest.raises(IdempotencyMisuseError, match="steps must come before complete"):
            await shop.charge(attempt)
        return ""

    with pytest.raises(IdempotencyMisuseError, match="was not committed"):
        await shop.run("k", work)
    assert rows(shop, payments) == []
    assert shop.row("k").status == "in_progress"
    assert shop.row("k").claim_left > 0
    with pytest.raises(IdempotencyInProgressError):
        await shop.run("k", work)


async def test_a_transaction_left_open_is_reported_at_once(shop: Shop, payments: str) -> None:
    """C101: only the open transaction locks the key's row, so one query is enough to report it."""
    sessions: list[Any] = []

    async def work(attempt: Any) -> str:
        sessions.append(shop.session())
        await shop.soon(attempt.complete(sessions[0], "x"))
        other = shop.session()
        with pytest.raises(IdempotencyMisuseError, match="in another transaction that is still open"):
            await shop.soon(attempt.complete(other, "y"))
        await shop.soon(other.close())
        return ""

    began = time.monotonic()
    with pytest.raises(IdempotencyMisuseError, match="was not committed"):
        await shop.run("k", work)
    assert time.monotonic() - began < FAR
    await shop.world.call(sessions[0].close)


async def test_a_transaction_that_is_done_again_finds_its_steps(shop: Shop, payments: str) -> None:
    """Rolled back after complete(), the body of a retry may ask for what was saved, and complete again."""

    async def work(attempt: Any) -> str:
        for commit in (False, True):
            await shop.charge(attempt)
            await pay(shop, attempt, payments, commit=commit)
        return ""

    assert await shop.run("k", work) == "paid by 1"
    assert rows(shop, payments) == ["attempt 1"]


@pytest.mark.every_driver
async def test_the_session_may_use_another_driver_but_not_another_database(shop: Shop, payments: str, dsn: str) -> None:
    """`complete()` is sent in the style of the session's driver; a database without the key does not lose the attempt."""
    others = {"psycopg": "psycopg2", "psycopg2": "psycopg", "psycopg_async": "asyncpg", "asyncpg": "psycopg"}
    scheme = f"postgresql+{others[shop.world.name]}"
    make = shop.world.pick(create_engine, create_async_engine)
    with database(dsn, "other") as elsewhere, psycopg.connect(elsewhere, autocommit=True) as admin:
        admin.execute(schema.sql().encode())
        other, wrong = (make(f"{scheme}://{where.split('://', 1)[1]}") for where in (dsn, elsewhere))
        right = shop.engine

        async def work(attempt: Any) -> str:
            session = shop.world.pick(Session, AsyncSession)(wrong)
            with pytest.raises(IdempotencyMisuseError, match="not in the database of this session"):
                await shop.soon(attempt.complete(session, "x"))
            await shop.soon(session.close())
            attempt.check()
            shop.engine = other
            return await pay(shop, attempt, payments)

        assert await shop.run("k", work, engine=right) == "paid by 1"
        for engine in (other, wrong):
            await shop.world.call(engine.dispose)
    assert rows(shop, payments) == ["attempt 1"]


@pytest.mark.every_driver
async def test_autocommit_is_rejected(shop: Shop) -> None:
    """Autocommit is rejected, because the result would be stored even if the rows are rolled back."""

    async def work(attempt: Any) -> str:
        session = shop.session()
        try:
            await shop.soon(session.connection(execution_options={"isolation_level": "AUTOCOMMIT"}))
            await shop.soon(attempt.complete(session, "x"))
        finally:
            await shop.soon(session.close())
        return ""

    with pytest.raises(TransactionStateError):
        await shop.run("k", work)
