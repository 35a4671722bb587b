"""Election: one leader at a time, its terms, callbacks, hand-over, loss; members, observers; invalid arguments."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pgfence import AsyncElection, AsyncTerm, Election, Term, schema
from pgfence.config import configure
from pgfence.errors import LockLostError, LockTimeoutError, StaleFencingTokenError
from support.leases import lapse, lease, rival, row
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


def election(world: World, engine: Any, name: str, *, ttl: Any = 30, **kwargs: Any) -> Any:
    """Return the world's election."""
    return world.pick(Election, AsyncElection)(engine, name, ttl=ttl, **kwargs)


async def terminate(world: World, member: Any) -> None:
    """Make the members resign, even after a failed test."""
    await world.call(member.resign)


@pytest.mark.every_driver
async def test_a_member_leads_until_it_resigns(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """The member holds the lease of that name, as a term, and its resignation releases it."""
    async with world.enter(election(world, world.engine(), name).stand(owner="pod-1")) as member:
        await eventually(lambda: member.is_leader)
        term = member.term
        assert isinstance(term, world.pick(Term, AsyncTerm))
        found = row(admin, name)
        assert (found.token, found.owner, found.lease_id) == (term.token, "pod-1", term.lease_id)
        assert rival(admin, name) is None
    assert (member.is_leader, member.term, term.lost, term.loss_reason) == (False, None, True, "resigned")
    assert row(admin, name).released_at is not None
    assert rival(admin, name) == 2


async def test_the_next_candidate_follows_at_once(world: World, name: str) -> None:
    """A resignation sends a notification, so the next leader does not wait for its next poll."""
    first = await world.call(election(world, world.engine(), name).stand)
    await eventually(lambda: first.is_leader)
    async with world.enter(election(world, world.engine(), name).stand()) as second:
        await world.call(first.resign)
        await eventually(lambda: second.is_leader)
        assert second.term.token == 2
        assert not first.is_leader


async def test_callbacks_come_in_order(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """on_gained and on_lost alternate, each leader is reported once, and an exception in a callback has no effect."""
    told: list[Any] = []

    def on_gained() -> None:
        told.append("gained")
        raise ValueError("of the callback")

    def on_changed(holder: Any) -> None:
        told.append(holder and holder.token)

    one = election(world, world.engine(), name, ttl=3)
    member = await world.call(
        lambda: one.stand(on_gained=on_gained, on_lost=lambda: told.append("lost"), on_changed=on_changed)
    )
    await eventually(lambda: told == [1, "gained"])
    lapse(admin, name)
    assert rival(admin, name) == 2
    await eventually(lambda: told[-1] == 2)
    lapse(admin, name)
    await eventually(lambda: told[-1] == "gained")
    await terminate(world, member)
    assert told == [1, "gained", "lost", 2, 3, "gained", "lost"]


async def test_run_calls_the_function_in_each_term(world: World, name: str) -> None:
    """run() returns after the resignation; the term is released only when the function has ended."""
    terms: list[int] = []
    member: Any = None

    def work(term: Any) -> None:
        terms.append(term.token)
        if len(terms) == 2:
            member._candidacy.end()
            assert term.lost

    async def work_async(term: Any) -> None:
        work(term)

    member = await world.call(election(world, world.engine(), name).stand)
    await world.call(member.run, world.pick(work, work_async))
    await terminate(world, member)
    assert terms == [1, 2]


async def test_an_error_of_the_work_ends_its_term(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """run() releases the term and then raises the function's exception."""

    def work(_: Any) -> None:
        raise KeyError("of the work")

    async def work_async(term: Any) -> None:
        work(term)

    async with world.enter(election(world, world.engine(), name).stand()) as member:
        with pytest.raises(KeyError):
            await world.call(member.run, world.pick(work, work_async))
        assert not member.is_leader
    assert row(admin, name).released_at is not None


@pytest.mark.parametrize("grouped", [False, True])
async def test_an_error_about_the_loss_ends_only_the_term(world: World, name: str, *, grouped: bool) -> None:
    """check() raises in the work when the leader is asked to resign, and run() goes on with the next term.

    A TaskGroup in the work raises the error in an exception group.
    """
    terms: list[int] = []
    member: Any = None

    def begin(term: Any) -> None:
        terms.append(term.token)
        if len(terms) == 2:
            member._candidacy.end()
        else:
            term._grant.resign()

    def check(term: Any) -> None:
        try:
            term.check()
        except LockLostError as error:
            raise ExceptionGroup("tasks", [ExceptionGroup("tasks", [error])]) if grouped else error from None

    def work(term: Any) -> None:
        begin(term)
        while True:
            check(term)

    async def work_async(term: Any) -> None:
        begin(term)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            check(term)

    member = await world.call(election(world, world.engine(), name).stand)
    await world.call(member.run, world.pick(work, work_async))
    await terminate(world, member)
    assert terms == [1, 2]


async def test_a_resignation_stops_the_work_first(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """resign() marks the term lost, which ends the work, and the lease is released after that."""
    working, seen = threading.Event(), []

    def work(term: Any) -> None:
        working.set()
        while not term.lost:
            threading.Event().wait(0.01)
        seen.append(row(admin, name).released_at)

    async def work_async(term: Any) -> None:
        working.set()
        try:
            await asyncio.sleep(3600)
        finally:
            seen.append(row(admin, name).released_at)

    member = await world.call(election(world, world.engine(), name).stand)
    other = world.other()
    running = asyncio.create_task(other.call(member.run, world.pick(work, work_async)))
    await eventually(working.is_set)
    await terminate(world, member)
    await running
    assert seen == [None]
    assert row(admin, name).released_at is not None


async def test_run_returns_if_the_member_resigns_while_it_is_elected(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resignation between the grant and the start of the term ends run() without calling a callback."""
    told: list[str] = []
    member = await world.call(
        lambda: election(world, world.engine(), name).stand(
            on_gained=lambda: told.append("gained"), on_lost=lambda: told.append("lost")
        )
    )
    await eventually(lambda: member.is_leader)
    manager, _ = await world.call(lambda: member._candidacy._candidate.build(lambda _: None))
    acquire = manager.acquire

    async def acquire_and_end(*args: Any, **kwargs: Any) -> Any:
        term = await acquire(*args, **kwargs)
        member._candidacy.end()
        return term

    monkeypatch.setattr(manager, "acquire", acquire_and_end)

    async def nothing() -> None:
        pass

    await world.call(member.run, world.pick(lambda _: None, lambda _: nothing()))
    assert told == ["gained", "lost"]
    await terminate(world, member)


@pytest.mark.async_only
async def test_a_loop_that_ends_stops_the_work_before_the_release(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """When its task is cancelled, as at the end of asyncio.run(), the member calls on_lost and waits for the work."""
    told: list[Any] = []
    member = await world.call(
        lambda: AsyncElection(world.engine(), name, ttl=30).stand(on_lost=lambda: told.append("lost"))
    )

    async def work(_: Any) -> None:
        told.append("works")
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.2)
            told.append(row(admin, name).released_at)

    running = asyncio.create_task(world.call(member.run, work))
    await eventually(lambda: told == ["works"])
    await world.call(lambda: [task.cancel() for task in asyncio.all_tasks() if task.get_name() == "pgfence-member"])
    await eventually(lambda: row(admin, name).released_at is not None)
    await running
    assert told == ["works", "lost", None]


async def test_an_exit_in_a_callback_does_not_end_the_member(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """on_lost that awaits the task which it has cancelled, or calls sys.exit(), is logged, and the member leads again."""

    def leave() -> None:
        raise SystemExit

    async def leave_async() -> None:
        task = asyncio.ensure_future(asyncio.sleep(3600))
        task.cancel()
        await task

    on_lost = world.pick(leave, leave_async)
    async with world.enter(election(world, world.engine(), name).stand(on_lost=on_lost)) as member:
        await eventually(lambda: member.is_leader)
        member.term._grant.resign()
        await eventually(lambda: member.is_leader and member.term.token == 2)
    assert [each.levelname for each in caplog.records if "a callback of the election" in each.getMessage()] == [
        "ERROR"
    ] * 2


async def test_a_release_during_the_question_is_noticed(
    world: World, name: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that is notified after the server's response and before the sleep ends the sleep."""
    engine = world.engine()
    assert rival(admin, name, 3600) == 1
    member = await world.call(election(world, engine, name, ttl=3600).stand)
    candidacy = member._candidacy
    manager, request = await world.call(lambda: candidacy._candidate.build(lambda _: None))
    await eventually(lambda: manager.heartbeat.is_listening(request.place) and candidacy._sleep is not None)
    note = type(candidacy)._note_leader

    async def note_and_wake(self: Any, holder: Any) -> None:
        monkeypatch.undo()
        lapse(admin, name)
        self._wake()
        await note(self, holder)

    monkeypatch.setattr(type(candidacy), "_note_leader", note_and_wake)
    candidacy._wake()
    await eventually(lambda: member.is_leader)
    await terminate(world, member)


async def test_a_lost_term_ends_and_a_stale_leader_cannot_commit(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Once another term has begun, the writes of the former leader are rejected."""
    engine = world.engine()
    # Otherwise, the heartbeat checks the term when it begins to listen, and may notice the loss before begin().
    configure(engine, pooler="transaction")
    term = await world.call(election(world, engine, name, heartbeat="progress").campaign, timeout=5)
    lapse(admin, name)
    assert rival(admin, name) == 2
    with pytest.raises(StaleFencingTokenError):
        async with world.enter(term.begin(engine)):
            pass
    with pytest.raises(LockLostError):
        await world.call(term.release)


@pytest.mark.every_driver
async def test_a_leader_that_is_asked_resigns(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """The request is delivered and recorded, on_lost is called, and another candidate is elected."""
    from pgfence import monitoring

    engine = world.engine()
    lost = threading.Event()
    async with world.enter(election(world, engine, name, ttl=3).stand(owner="one", on_lost=lost.set)) as first:
        await eventually(lambda: first.is_leader)
        async with world.enter(election(world, world.engine(), name, ttl=3).stand(owner="two")) as second:
            asked = await world.call(monitoring.ask_to_resign, engine, name, reason="deploy", actor="me")
            assert (asked.owner, asked.token) == ("one", 1)
            await eventually(lambda: second.is_leader)
            assert lost.is_set()
    found = admin.execute("SELECT action, actor, reason FROM pgfence_audit WHERE resource = %s", [name]).fetchall()
    assert found == [("ask to resign", "me", "deploy")]


async def test_only_a_leader_can_be_asked(world: World, name: str) -> None:
    """Without a leader the result is None. A lease of that name is an error, and is not affected."""
    from pgfence import monitoring

    engine = world.engine()
    assert await world.call(monitoring.ask_to_resign, engine, name, reason="deploy") is None
    held = await world.call(lease(world, engine, name).acquire)
    with pytest.raises(ValueError, match="is held by a lease, not by the leader of an election"):
        await world.call(monitoring.ask_to_resign, engine, name, reason="deploy")
    held.check()
    await world.call(held.release)


async def test_standing_survives_missing_tables(
    world: World, name: str, caplog: pytest.LogCaptureFixture, admin: psycopg.Connection[Any]
) -> None:
    """stand() does not raise; the member logs one warning, is no leader, and leads as soon as the tables are there."""
    engine = world.engine()
    configure(engine, schema=f"later_{name[-12:]}")
    with caplog.at_level(logging.WARNING, logger="pgfence.election"):
        async with world.enter(election(world, engine, name).stand()) as member:
            await eventually(lambda: caplog.records)
            assert not member.is_leader
            await world.call(schema.create_all, engine)
            await eventually(lambda: member.is_leader)
    admin.execute(f"DROP SCHEMA later_{name[-12:]} CASCADE".encode())
    assert [record.levelname for record in caplog.records if record.name == "pgfence.election"] == ["WARNING"]


async def test_lead_holds_the_term_for_a_block(world: World, name: str) -> None:
    """lead() holds the term for a block, and reports the leader to other candidates."""
    one = election(world, world.engine(), name)
    async with world.enter(one.lead(owner="one")) as term:
        assert term.token == 1
        with pytest.raises(LockTimeoutError) as caught:
            await world.other().call(election(world, world.engine(), name).campaign, timeout=0)
        assert [holder.kind for holder in caught.value.holders] == ["term"]
    async with world.enter(one.lead()) as term:
        assert term.token == 2


async def test_observing_shows_each_leader(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """The current leader first, then each change, until nothing changes within the timeout."""
    engine = world.engine()
    seen: list[Any] = []

    def observe() -> None:
        for holder in election(world, engine, name).observe(timeout=3):
            seen.append(holder and holder.token)

    async def observe_async() -> None:
        async for holder in election(world, engine, name).observe(timeout=3):
            seen.append(holder and holder.token)

    other = world.other()
    watching = asyncio.create_task(other.call(world.pick(observe, observe_async)))
    await eventually(lambda: seen == [None])
    async with world.enter(election(world, world.engine(), name).lead()):
        await eventually(lambda: seen == [None, 1])
    await eventually(lambda: seen == [None, 1, None])
    await watching


@pytest.mark.sync_only
@pytest.mark.one_driver
def test_an_interrupted_resign_waits_again(world: World, name: str) -> None:
    """After Ctrl-C in resign(), a second call still returns only when the member has stepped down."""
    gained, go_on = threading.Event(), threading.Event()

    def step_down() -> None:
        # The first resign() has begun, and may be waiting now.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        go_on.wait(30)

    member = Election(world.engine(), name, ttl=30).stand(on_gained=gained.set, on_lost=step_down)
    assert gained.wait(30)
    with pytest.raises(KeyboardInterrupt):
        member.resign()
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    member.resign()
    assert go_on.is_set()
    timer.join()


def test_manual_renewal_is_rejected() -> None:
    """A handle of a term cannot be renewed by hand, because the member renews its term."""
    with pytest.raises(ValueError, match='must be "auto" or "progress"'):
        Election(lambda: None, "x", heartbeat="manual")  # type: ignore[arg-type, return-value]


def test_a_coroutine_function_is_rejected_by_the_sync_twin(dsn: str) -> None:
    """The sync class rejects a coroutine function, because it would never be awaited."""

    async def gained() -> None: ...

    with pytest.raises(TypeError, match="coroutine function"):
        Election(lambda: None, "x").stand(on_gained=gained)  # type: ignore[arg-type, return-value]
