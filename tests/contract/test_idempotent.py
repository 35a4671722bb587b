"""`idempotent` does the work once per key in the caller's transaction; callers wait, replay or raise."""

from __future__ import annotations

import asyncio
import os
import random
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgfence import schema
from pgfence.config import configure
from pgfence.effects import IdempotentEffect
from pgfence.errors import (
    DeadlockError,
    IdempotencyInProgressError,
    IdempotencyKeyReusedError,
    IdempotencyMisuseError,
    SchemaError,
    TransactionStateError,
)
from pgfence.idempotency import idempotent
from support.keyed import Desk, Receipt
from support.waiting import FAR
from support.worlds import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 100 if os.environ.get("PGFENCE_TEST_FAULTS") else 2
CALLERS = 20
pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def desk(world: World, admin: psycopg.Connection[Any]) -> Iterator[Desk]:
    """Sessions of a world, and effects."""
    here = Desk(world, admin, pool_size=CALLERS)
    yield here
    here.close()


class Declined(Exception):
    """A result that is an error."""

    def __init__(self, amount: int) -> None:
        super().__init__(amount)
        self.amount = amount


# ---------------------------------------------------------------- one effect


@pytest.mark.every_driver
async def test_the_work_runs_once_and_every_caller_gets_its_result(desk: Desk) -> None:
    """C105: a second call does nothing and returns a result that is equal and of the same type."""
    first = await desk.pay("k")
    again = await desk.pay("k")
    assert again == first == Receipt("k")
    assert type(again.amount) is type(first.amount)
    assert desk.effects() == 1


@pytest.mark.every_driver
async def test_it_adds_two_statements_and_a_replay_is_one(desk: Desk) -> None:
    """The claim and the result are one round trip each; a replay is the claim alone."""
    await desk.pay("k")
    desk.sent.clear()
    await desk.pay("other")
    assert [statement.split()[0] for statement in desk.sent] == ["SELECT", "INSERT", "SELECT"]
    desk.sent.clear()
    await desk.pay("other")
    assert [statement.split()[0] for statement in desk.sent] == ["SELECT"]


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("fails", [False, True], ids=["all is well", "the winner fails at random"])
async def test_of_twenty_callers_one_does_the_work(desk: Desk, fails: bool) -> None:
    """C095: however many call at once and whichever fails, one effect is committed and all results are equal."""
    callers = [desk.world.contender() for _ in range(CALLERS)]

    async def call(who: Any, key: str) -> Any:
        def work(session: Any) -> Receipt:
            answer = desk.charge(key)(session)
            if fails and random.random() < 0.4:
                raise ConnectionError(key)
            return answer

        while True:
            try:
                return await desk.pay(key, work=work, who=who)
            except ConnectionError:
                continue

    for number in range(ROUNDS):
        key = f"round {number}"
        answers = await asyncio.gather(*(call(who, key) for who in callers))
        assert set(answers) == {Receipt(key)}
        assert desk.effects(key) == 1


async def test_another_scope_and_another_namespace_are_other_keys(desk: Desk) -> None:
    """C102: the same key of another tenant or operation is a different key, and its caller gets no stored result."""
    await desk.pay("k", payload={"a": 1})
    await desk.pay("k", payload={"a": 2}, scope=desk.scope + ":refund")
    other = Desk(desk.world, desk.admin)
    configure(other.engine, namespace="tenant 2")
    try:
        await other.pay("k", payload={"a": 3}, scope=desk.scope)
        assert (desk.effects(), other.effects()) == (2, 1)
    finally:
        other.close()


async def test_scoped_sessions_are_taken_too(desk: Desk) -> None:
    """A scoped_session is the session of the current thread or task, sync and async."""
    if desk.world.is_async:
        registry: Any = async_scoped_session(async_sessionmaker(desk.engine), asyncio.current_task)
    else:
        registry = scoped_session(sessionmaker(desk.engine))
    for _ in range(2):
        answer = await desk.world.call(desk.key(registry, "k").run, _body(desk, registry))
        await desk.world.call(registry.commit)
        assert answer == Receipt("k")
    await desk.world.call(registry.remove)
    assert desk.effects() == 1


def _body(desk: Desk, registry: Any) -> Callable[[], Any]:
    if not desk.world.is_async:
        return lambda: desk.charge("k")(registry)

    async def body() -> Any:
        return await registry().run_sync(desk.charge("k"))

    return body


async def test_what_is_pending_in_the_session_is_neither_flushed_nor_lost(desk: Desk) -> None:
    """C096: a replay leaves the transaction as it was: earlier rows stay, and later ones can be written."""
    await desk.pay("k")
    async with desk.world.enter(desk.session()) as session:
        await desk.on(session, desk.charge("before"))
        await desk.world.call(desk.key(session, "k").run, desk.body(session, desk.charge("k")))
        await desk.on(session, desk.charge("after"))
        await desk.world.call(session.commit)
    assert (desk.effects("before"), desk.effects("k"), desk.effects("after")) == (1, 1, 1)


async def test_a_key_is_new_again_when_its_time_is_over(desk: Desk) -> None:
    """An expired row counts as absent, also for another payload, and the new result replaces the old one."""
    await desk.pay("k", payload=1)
    desk.admin.execute("UPDATE pgfence_idempotency_key SET expires_at = now() WHERE scope = %s", [desk.scope])
    await desk.pay("k", payload=2, work=lambda _: Receipt("second"))
    assert await desk.pay("k", payload=2) == Receipt("second")
    row = desk.admin.execute(
        "SELECT count(*), min(expires_at - created_at) FROM pgfence_idempotency_key WHERE scope = %s", [desk.scope]
    ).fetchone()
    assert row
    assert (row[0], round(row[1].total_seconds())) == (1, 86400)


async def test_a_key_is_kept_from_the_end_of_the_work_on(desk: Desk) -> None:
    """A caller that waited for work that took longer than `keep` gets its result."""
    earlier = text(
        "UPDATE pgfence_idempotency_key SET created_at = created_at - interval '2 h', expires_at = expires_at - interval '2 h'"
        " WHERE key = 'k'"
    )

    def work(session: Any) -> Receipt:
        session.execute(earlier)
        return desk.charge("k")(session)

    for _ in range(2):
        await desk.pay("k", keep=3600, work=work)
    assert desk.effects("k") == 1


@pytest.mark.every_driver
async def test_a_prepared_transaction_has_the_key_until_it_is_decided(world: World, lend_server: Any) -> None:
    """C104: a prepared transaction has no backend, and another payload is still rejected at once."""
    server = lend_server(max_prepared_transactions="2")
    with psycopg.connect(server.dsn, autocommit=True) as admin:
        there = Desk(World(world.name, server.dsn), admin)
        plain = there.plain()
        schema.create_all(plain)
        with Session(plain) as session:
            assert there.key(session, "k", payload=1).run(lambda: Receipt("k")) == Receipt("k")
            session.execute(text("PREPARE TRANSACTION 'k'"))
        with pytest.raises(IdempotencyKeyReusedError):
            await there.pay("k", payload=2, timeout=0)
        with pytest.raises(IdempotencyInProgressError):
            await there.pay("k", payload=1, timeout=0)
        for payload, kind in ((2, IdempotencyKeyReusedError), (1, IdempotencyInProgressError)):
            with pytest.raises(kind):
                IdempotentEffect(plain, "k", scope=there.scope, payload=payload).run(lambda _: None)
        admin.execute("COMMIT PREPARED 'k'")
        assert await there.pay("k", payload=1) == Receipt("k")
        plain.dispose()
        there.close()
        await there.world.close()


# ---------------------------------------------------------------- while another one has the key


async def test_a_waiter_gets_the_result_of_the_first_caller(desk: Desk, eventually: Callable[..., Any]) -> None:
    """C097: the result after a wait is what the winner has committed, never nothing."""
    loser = desk.world.other()
    async with desk.at_work("k", payload=1):
        task = asyncio.create_task(desk.pay("k", who=loser, payload=1))
        await eventually(lambda: desk.waiters() == 1)
        assert not task.done()
    assert await task == Receipt("k")
    assert desk.effects() == 1


async def test_a_waiter_does_the_work_when_the_first_caller_rolls_back(
    desk: Desk, eventually: Callable[..., Any]
) -> None:
    """C097, C101: an exception frees the key together with its effect."""
    loser = desk.world.other()
    task = None
    with pytest.raises(ConnectionError):
        async with desk.at_work("k"):
            task = asyncio.create_task(desk.pay("k", who=loser))
            await eventually(lambda: desk.waiters() == 1)
            raise ConnectionError
    assert task
    assert await task == Receipt("k")
    assert desk.effects() == 1


@pytest.mark.every_driver
async def test_a_waiter_continues_when_the_first_caller_dies(desk: Desk, eventually: Callable[..., Any]) -> None:
    """C099: a key in progress is free when the connection of its caller ends, not when `keep` is over."""
    loser = desk.world.other()
    task = None
    with pytest.raises(DBAPIError):
        async with desk.at_work("k") as session:
            pid = (await desk.world.call(session.execute, text("SELECT pg_backend_pid()"))).scalar_one()
            task = asyncio.create_task(desk.pay("k", who=loser))
            await eventually(lambda: desk.waiters() == 1)
            desk.admin.execute("SELECT pg_terminate_backend(%s)", [pid])
    assert task
    assert await task == Receipt("k")
    assert desk.effects() == 1


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("timeout", [0, 0.3])
async def test_a_wait_has_an_end_and_leaves_the_transaction_usable(desk: Desk, timeout: float) -> None:
    """At its timeout a wait raises IdempotencyInProgressError, and the caller can commit its other changes."""
    other = desk.world.other()
    async with desk.at_work("k"), other.enter(desk.session()) as session:
        await desk.on(session, desk.charge("mine"), other)
        began = time.monotonic()
        with pytest.raises(IdempotencyInProgressError) as caught:
            await other.call(desk.key(session, "k", timeout=timeout).run, desk.body(session, desk.charge("k")))
        assert timeout <= time.monotonic() - began < FAR
        assert (caught.value.scope, caught.value.key) == (desk.scope, "k")
        assert (caught.value.http_status, caught.value.retryable) == (409, True)
        await other.call(session.commit)
    assert (desk.effects("mine"), desk.effects("k")) == (1, 1)


@pytest.mark.every_driver
async def test_another_payload_is_rejected_at_once_done_or_in_progress(desk: Desk) -> None:
    """C102, C104: a mismatch wins over "in progress", never returns the stored result, and aborts nothing."""
    other = desk.world.other()

    async def refused() -> None:
        async with other.enter(desk.session()) as session:
            await desk.on(session, desk.charge("mine"), other)
            for payload in ({"amount": 2}, None):
                with pytest.raises(IdempotencyKeyReusedError) as caught:
                    await other.call(desk.key(session, "k", payload=payload).run, desk.body(session, desk.charge("k")))
                assert (caught.value.http_status, caught.value.retryable) == (422, False)
                assert "1.10" not in str(caught.value)
            await other.call(session.commit)

    async with desk.at_work("k", payload={"amount": 1}):
        await refused()
        with pytest.raises(IdempotencyInProgressError):
            await desk.pay("k", who=other, payload={"amount": 1}, timeout=0)
    await refused()
    assert (desk.effects("mine"), desk.effects("k")) == (2, 1)


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
async def test_a_result_after_the_snapshot_raises_40001_and_aborts_nothing(desk: Desk, level: str) -> None:
    """C097: a caller that cannot see the result does not run, and gets 40001 without an aborted transaction."""
    async with desk.world.enter(desk.session()) as session:
        options = {"execution_options": {"isolation_level": level}}
        await desk.world.call(session.connection, **options)
        await desk.on(session, desk.charge("mine"))
        await desk.pay("k", who=desk.world.other())
        with pytest.raises(IdempotencyInProgressError, match="snapshot") as caught:
            await desk.world.call(desk.key(session, "k").run, desk.body(session, desk.charge("k")))
        assert caught.value.sqlstate == "40001"
        await desk.world.call(session.commit)
    async with desk.world.enter(desk.session()) as session:
        await desk.world.call(session.connection, **options)
        answer = await desk.world.call(desk.key(session, "k").run, desk.body(session, desk.charge("k")))
        assert answer == Receipt("k")
    assert (desk.effects("mine"), desk.effects("k")) == (1, 1)


@pytest.mark.every_driver
async def test_keys_in_opposite_order_are_a_deadlock_that_aborts_nothing(
    desk: Desk, eventually: Callable[..., Any]
) -> None:
    """One of the two raises DeadlockError and stays usable; when it has ended, the other one continues."""
    here, there = desk.world.other(), desk.world.other()

    async def both(who: Any, first: str, second: str, ready: asyncio.Event, go: asyncio.Event) -> str:
        async with who.enter(desk.session()) as session:
            await who.call(desk.key(session, first).run, desk.body(session, desk.charge(first)))
            ready.set()
            await go.wait()
            try:
                await who.call(desk.key(session, second, timeout=20).run, desk.body(session, desk.charge(second)))
            except DeadlockError:
                await desk.on(session, desk.charge("usable"), who)
                await who.call(session.rollback)
                return "deadlock"
            await who.call(session.commit)
            return "done"

    left, right = asyncio.Event(), asyncio.Event()
    outcomes = await asyncio.gather(both(here, "a", "b", left, right), both(there, "b", "a", right, left))
    assert sorted(outcomes) == ["deadlock", "done"]
    assert (desk.effects("a"), desk.effects("b"), desk.effects("usable")) == (1, 1, 0)


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("end", ["commits", "rolls back"])
async def test_the_settings_of_the_caller_neither_end_the_wait_nor_change(
    desk: Desk, eventually: Callable[..., Any], end: str
) -> None:
    """A statement_timeout and a lock_timeout below the wait do not cut it short, and are in force again afterwards."""
    loser = desk.world.other()

    async def patient() -> tuple[Any, Any]:
        async with loser.enter(desk.session()) as session:
            await loser.call(session.execute, text("SET LOCAL statement_timeout = '250ms'"))
            await loser.call(session.execute, text("SET LOCAL lock_timeout = '200ms'"))
            answer = await loser.call(desk.key(session, "k").run, desk.body(session, desk.charge("k")))
            settings = await loser.call(
                session.execute, text("SELECT current_setting('statement_timeout'), current_setting('lock_timeout')")
            )
            return answer, tuple(settings.one())

    task = None
    with nullcontext() if end == "commits" else pytest.raises(ConnectionError):
        async with desk.at_work("k"):
            began = time.monotonic()
            task = asyncio.create_task(patient())
            await eventually(lambda: desk.waiters() == 1 and time.monotonic() - began > 0.4)
            if end == "rolls back":
                raise ConnectionError
    assert task
    assert await task == (Receipt("k"), ("250ms", "200ms"))


async def test_an_ending_transaction_is_not_taken_for_another_request(
    desk: Desk, eventually: Callable[..., Any]
) -> None:
    """The server releases the locks of an ending transaction one by one; a remaining one alone rejects no caller."""
    lock = "(hashtextextended(%s || chr(31) || 'k', 'pgfence_idempotency_key'::regtype::oid::bigint))"
    busy = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ~ 'claim_key' AND state = 'active'"
    desk.admin.execute(f"SELECT pg_advisory_lock{lock}".encode(), [desk.scope])
    try:
        task = asyncio.create_task(desk.pay("k", who=desk.world.other()))
        await eventually(lambda: desk.admin.execute(f"{busy} AND pid <> pg_backend_pid()".encode()).fetchone() == (1,))
    finally:
        desk.admin.execute(f"SELECT pg_advisory_unlock{lock}".encode(), [desk.scope])
    assert await task == Receipt("k")


# ---------------------------------------------------------------- work that fails, and blocks that forget


@pytest.mark.every_driver
async def test_work_that_failed_cannot_be_committed(desk: Desk) -> None:
    """C101: if the caller swallows the exception and commits, the server rejects the commit, and the key is free."""
    async with desk.world.enter(desk.session()) as session:

        def work(_: Any) -> Receipt:
            desk.charge("k")(_)
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await desk.world.call(desk.key(session, "k").run, desk.body(session, work))
        with pytest.raises(IdempotencyMisuseError, match="has already claimed"):
            await desk.world.call(desk.key(session, "k").run, desk.body(session, work))
        with pytest.raises(IdempotencyMisuseError, match="must be rolled back") as caught:
            await desk.world.call(session.commit)
        assert caught.value.sqlstate == "PF004"
    assert desk.effects() == 0
    await desk.pay("k")
    assert desk.effects() == 1


@pytest.mark.every_driver
async def test_set_constraints_immediate_before_the_result_is_rejected(desk: Desk) -> None:
    """SET CONSTRAINTS ALL IMMEDIATE finds the key without a result, and the error says how to name constraints."""
    async with desk.world.enter(desk.session()) as session:
        early = desk.body(session, lambda one: one.execute(text("SET CONSTRAINTS ALL IMMEDIATE")))
        with pytest.raises(IdempotencyMisuseError, match="name the constraints in SET CONSTRAINTS"):
            await desk.world.call(desk.key(session, "k").run, early)
    assert await desk.pay("k") == Receipt("k")


async def test_a_savepoint_around_the_call_takes_failed_work_back(desk: Desk) -> None:
    """The rest of the transaction commits, and the key is free, also for the same transaction."""
    async with desk.world.enter(desk.session()) as session:
        await desk.on(session, desk.charge("mine"))

        def work(_: Any) -> Receipt:
            desk.charge("k")(_)
            raise ConnectionError

        with pytest.raises(ConnectionError):
            async with desk.world.enter(await desk.world.call(session.begin_nested)):
                await desk.world.call(desk.key(session, "k").run, desk.body(session, work))
        await desk.world.call(desk.key(session, "k").run, desk.body(session, desk.charge("k")))
        await desk.world.call(session.commit)
    assert (desk.effects("mine"), desk.effects("k")) == (1, 1)


@pytest.mark.every_driver
async def test_a_recorded_error_is_replayed(desk: Desk) -> None:
    """C101: a recorded error rolls back its effect and is raised again with its data; other errors are not recorded."""

    def decline(session: Any) -> Receipt:
        desk.charge("k")(session)
        raise Declined(7)

    for replay in (False, True):
        async with desk.world.enter(desk.session()) as session:
            await desk.on(session, desk.charge("mine"))
            key = desk.key(session, "k", record=[Declined])
            with pytest.raises(Declined) as caught:
                await desk.world.call(key.run, desk.body(session, desk.charge("k") if replay else decline))
            assert (caught.value.args, caught.value.amount) == ((7,), 7)
            assert hasattr(caught.value, "__notes__") == replay
            await desk.world.call(session.commit)
    assert (desk.effects("mine"), desk.effects("k")) == (2, 0)
    with pytest.raises(IdempotencyMisuseError, match="Declined"):
        await desk.pay("k")


async def test_an_error_of_pgfence_is_recorded_only_if_its_class_is_named(desk: Desk) -> None:
    """C101: an error that a retry would cure is not stored for a day because `record` names `Exception`."""

    def busy(session: Any) -> Receipt:
        raise IdempotencyInProgressError("an inner key", scope="s", key="inner")

    for record, recorded in (([Exception], False), ([IdempotencyInProgressError], True)):
        async with desk.world.enter(desk.session()) as session:
            key = desk.key(session, "k", record=record)
            with pytest.raises(IdempotencyInProgressError):
                await desk.world.call(key.run, desk.body(session, busy))
            if not recorded:
                with pytest.raises(IdempotencyMisuseError, match="has no result"):
                    await desk.world.call(session.commit)
            else:
                await desk.world.call(session.commit)
    with pytest.raises(IdempotencyMisuseError, match="IdempotencyInProgressError, which record= does not include"):
        await desk.pay("k")


async def test_recorded_classes_of_one_name_are_distinguished(desk: Desk) -> None:
    """C102: `except` catches it in a later call, as it did in the first."""

    def declined(module: str) -> type[Declined]:
        return type("Declined", (Declined,), {"__module__": module, "__qualname__": "Declined"})

    one, other = declined("one"), declined("other")

    def fail(session: Any) -> Receipt:
        raise other(7)

    for _ in range(2):
        async with desk.world.enter(desk.session()) as session:
            key = desk.key(session, "k", record=[one, other])
            with pytest.raises(other):
                await desk.world.call(key.run, desk.body(session, fail))
            await desk.world.call(session.commit)


async def test_with_record_the_work_is_kept_when_it_does_not_fail(desk: Desk) -> None:
    """With `record=` the savepoint of successful work is released, and an error of another class frees the key."""

    def lost(_: Any) -> Receipt:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await desk.pay("k", record=[Declined], work=lost)
    assert await desk.pay("k", record=[Declined]) == Receipt("k")
    assert desk.effects() == 1


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("forgets", ["to complete", "to look"])
async def test_a_block_without_its_complete_or_result_is_rejected(desk: Desk, forgets: str) -> None:
    """A fresh block without `complete()`, or a replayed one without `result`, raises at its end, and nothing stays."""
    if forgets == "to look":
        await desk.pay("k", work=lambda _: Receipt("k"))
    with pytest.raises(IdempotencyMisuseError, match="complete" if forgets == "to complete" else "second time"):
        async with desk.world.enter(desk.session()) as session:
            async with desk.world.enter(desk.key(session, "k")):
                await desk.on(session, desk.charge("k"))
            await desk.world.call(session.commit)
    assert desk.effects() == 0


async def test_a_block_says_whether_it_is_a_replay(desk: Desk) -> None:
    """`replayed`, `result` and `complete` of a fresh and of a replayed block, each asked at the wrong time too."""
    for replayed in (False, True):
        async with desk.world.enter(desk.session()) as session:
            key = desk.key(session, "k", result=int)
            async with desk.world.enter(key) as op:
                assert op.replayed == replayed
                if not replayed:
                    with pytest.raises(IdempotencyMisuseError, match="no result yet"):
                        _ = op.result
                    op.complete(7)
                assert op.result == 7
                with pytest.raises(IdempotencyMisuseError, match="replayed" if replayed else "already"):
                    op.complete(8)
            with pytest.raises(IdempotencyMisuseError, match="entered before"):
                async with desk.world.enter(key):
                    pass
            await desk.world.call(session.commit)


async def test_a_commit_inside_the_block_is_rejected(desk: Desk) -> None:
    """A claim without a result cannot be committed, by any caller."""
    with pytest.raises(IdempotencyMisuseError, match="must be rolled back"):
        await desk.pay("k", work=lambda session: (desk.charge("k")(session), session.commit()))
    assert desk.effects() == 0


@pytest.mark.every_driver
async def test_a_result_that_cannot_be_stored_takes_the_effect_with_it(desk: Desk) -> None:
    """C105: the first call fails, not the replay; the key is free."""
    for result in (object(), Receipt("\0" * 1_500_000)):
        with pytest.raises(IdempotencyMisuseError):
            await desk.pay("k", work=lambda session, result=result: (desk.charge("k")(session), result)[1])
    assert desk.effects() == 0
    await desk.pay("k")
    assert desk.effects() == 1


# ---------------------------------------------------------------- what is refused


@pytest.mark.every_driver
async def test_autocommit_and_missing_tables_are_rejected(desk: Desk, admin: psycopg.Connection[Any]) -> None:
    """Autocommit, missing tables and tables of version 1 raise an error before the work, with how to fix it."""
    from support import installations as tables
    from support.installations import TableNames

    autocommit = Desk(desk.world, admin, isolation_level="AUTOCOMMIT")
    with pytest.raises(TransactionStateError, match="autocommit"):
        await autocommit.pay("k")
    autocommit.close()
    schema = f"old_{desk.table.name}"
    for statements in ((), tables.build_creation(TableNames(schema), 1)):
        for statement in statements:
            admin.execute(statement.encode())
        old = Desk(desk.world, admin)
        configure(old.engine, schema=schema)
        with pytest.raises(SchemaError, match=f"pgfence install --schema {schema}") as caught:
            await old.pay("k")
        assert caught.value.needed == 2
        old.close()
    admin.execute(f"DROP SCHEMA {schema} CASCADE".encode())


async def test_a_session_with_an_engine_per_class_says_what_it_needs(desk: Desk) -> None:
    """The key's row has no mapped class, so the error has a note that names the argument."""
    async with desk.world.enter(desk.world.pick(Session, AsyncSession)(binds={object: desk.engine})) as session:
        with pytest.raises(UnboundExecutionError) as caught:
            await desk.world.call(desk.key(session, "k").run, desk.body(session, desk.charge("k")))
        assert "bind=" in caught.value.__notes__[0]


async def test_a_key_of_a_running_effect_is_reported_as_one(desk: Desk) -> None:
    """C099: transactions do not wait for it, and none is spoken of as if it had waited."""
    other = desk.plain()
    asked: list[BaseException] = []

    def ask(_: Any) -> str:
        with (
            Session(other) as session,
            pytest.raises(IdempotencyInProgressError, match="transactions do not wait") as caught,
        ):
            idempotent(session, "k", scope=desk.scope).run(lambda: "x")
        asked.append(caught.value)
        return "done"

    assert IdempotentEffect(other, "k", scope=desk.scope).run(ask) == "done"
    assert asked
    other.dispose()


def test_wrong_arguments_are_rejected_before_anything_is_sent() -> None:
    """Unusable functions, sessions, classes and payloads raise an error before anything is sent."""

    async def work() -> int:
        return 1

    with pytest.raises(TypeError, match="AsyncSession"):
        idempotent(Session(), "k", scope="s").run(work)
    for options, message in (
        ({"result": Session}, "Session cannot be stored"),
        ({"payload": object()}, "payload cannot contain"),
        ({"record": [KeyboardInterrupt]}, "exception classes"),
        ({"scope": 7}, "must be a str"),
    ):
        with pytest.raises(TypeError, match=message):
            idempotent(Session(), "k", **({"scope": "s"} | options))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="a Session"):
        idempotent("postgresql://", "k", scope="s")  # type: ignore[call-overload]
    for options in ({"keep": 0}, {"payload": float("nan")}, {"timeout": -1}, {"scope": ""}):
        with pytest.raises(ValueError):
            idempotent(Session(), "k", **({"scope": "s"} | options))


@pytest.mark.every_driver
async def test_every_key_that_is_allowed_works(desk: Desk) -> None:
    """C108: the longest key, a key of one character and an emoji are stored and replayed."""
    for key in ("k", "ä" * 255, "\U0001f600" * 255, "a b", "'\"%$1?:x"):
        scope = "\U0001f600" * 255 if len(key) == 255 else desk.scope
        assert await desk.pay(key, scope=scope) == await desk.pay(key, scope=scope) == Receipt(key)
    desk.admin.execute("DELETE FROM pgfence_idempotency_key WHERE scope = %s", ["\U0001f600" * 255])


async def test_no_table_of_effects_is_needed_for_two_in_one_transaction(desk: Desk) -> None:
    """Many keys in one transaction are each claimed, and committed together."""
    async with desk.world.enter(desk.session()) as session:
        for number in range(5):
            await desk.world.call(
                desk.key(session, f"k{number}", result=int).run, desk.body(session, lambda _, n=number: n)
            )
        await desk.world.call(session.commit)
    assert [await desk.pay(f"k{n}", result=int) for n in range(5)] == list(range(5))
