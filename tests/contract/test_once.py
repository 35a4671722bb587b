"""Once: each slot runs once, whichever process is first and however its run ends."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql
from sqlalchemy import NullPool, create_engine

import pgfence
from pgfence.errors import LockLostError, LockNotHeldError, LockTimeoutError, SchemaError, UnreachableError
from pgfence.once import SlotClockError, SlotZoneError
from support.rows import every_row
from support.waiting import eventually
from support.zones import write_zone, zones_of_host

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]

SCALE = float(os.environ.get("PGFENCE_TEST_FAULTS", "1"))
"""How many slots the crowd runs, as a share of 100; 10 for the full count."""

YEARLY: dict[str, Any] = {"cron": "0 0 1 1 *"}  # a test that runs over New Year's Eve may fail


def once(world: World, name: str, engine: Any = None, **kwargs: Any) -> Any:
    """Return a Once of this world; slots of a year unless something else is said."""
    what = kwargs if {"every", "cron", "at"} & kwargs.keys() else kwargs | YEARLY
    return world.pick(pgfence.Once, pgfence.AsyncOnce)(engine or world.engine(), name, **what)


def row_of(admin: psycopg.Connection[Any], name: str) -> tuple[Any, ...] | None:
    return admin.execute("SELECT done, tried, attempt FROM pgfence_slot WHERE name = %s", [name]).fetchone()


def this_year() -> datetime:
    return datetime(datetime.now(UTC).year, 1, 1, tzinfo=UTC)


def counted(world: World, calls: list[Any], error: Exception | None = None) -> Any:
    """Return a function, sync or async, that records its slot and returns how often it ran."""

    def note() -> int:
        held = pgfence.current(world.pick(pgfence.Slot, pgfence.AsyncSlot))
        calls.append((held.slot, held.resumed))
        if error is not None:
            raise error
        return len(calls)

    async def anote() -> int:
        return note()

    return world.pick(note, anote)


# ---------------------------------------------------------------- one run


@pytest.mark.every_driver
async def test_a_slot_is_run_once(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C087: the first caller gets the slot with its beginning and a token; after a normal end it is done for all callers."""
    engine = world.engine()
    slot = await world.call(once(world, name, engine).try_acquire)
    assert isinstance(slot, world.pick(pgfence.Slot, pgfence.AsyncSlot))
    assert (slot.slot, slot.resumed, slot.names, slot.state, slot.token) == (this_year(), False, (name,), "held", 1)
    assert 0 < slot.remaining() <= 60
    async with world.enter(slot):
        assert await world.call(once(world, name).try_acquire) is None
        assert (await world.call(once(world, name).holders))[0].token == 1
    assert row_of(admin, name) == (this_year(), this_year(), 1)
    assert await world.call(once(world, name).try_acquire) is None
    assert await world.call(once(world, name, engine).try_acquire) is None
    assert not await world.call(once(world, name).is_held)


async def test_release_says_that_it_is_done(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """An explicit release marks the slot as done; a second release is an error."""
    slot = await world.call(once(world, name).acquire)
    await world.call(slot.release)
    assert row_of(admin, name) == (this_year(), this_year(), 1)
    with pytest.raises(LockNotHeldError):
        await world.call(slot.release)


async def test_a_slot_is_not_handed_over(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """`hand_over` raises, because the adopter could not finish the slot; it stays held, and its release marks it as done."""
    slot = await world.call(once(world, name).acquire)
    with pytest.raises(TypeError, match="use a Lease"):
        await world.call(slot.hand_over)
    assert slot.state == "held"
    await world.call(slot.release)
    done = row_of(admin, name)
    assert done is not None and done[0] == this_year()


async def test_a_slot_that_is_done_raises_at_once(world: World, name: str) -> None:
    """acquire() does not wait for the next slot; the error says when that begins."""
    engine = world.engine()
    await world.call((await world.call(once(world, name, engine).acquire)).release)
    for timeout in (None, 30, math.inf):
        with pytest.raises(LockTimeoutError, match="is done") as told:
            await world.call(once(world, name, engine).acquire, timeout=timeout)
    assert told.value.names == (name,)
    assert told.value.holders == ()
    assert told.value.retry_after is not None
    assert 0 < told.value.retry_after <= 366 * 86400


async def test_left_by_an_exception_a_slot_is_free_for_another_attempt(world: World, name: str) -> None:
    """The caller's exception wins; the next attempt comes at once and knows that it is not the first."""
    engine = world.engine()
    with pytest.raises(ZeroDivisionError):
        async with world.enter(once(world, name, engine).hold()) as slot:
            raise ZeroDivisionError
    again = await world.call(once(world, name, engine).try_acquire)
    assert (again.slot, again.resumed) == (this_year(), True)
    assert again.token > slot.token
    await world.call(again.release)


async def test_a_waiter_learns_that_the_slot_is_done(world: World, name: str) -> None:
    """A waiter is woken by the end of the run, and notified at once instead of at its timeout."""
    first = await world.call(once(world, name).acquire)
    other = world.other()
    waiting = asyncio.ensure_future(other.call(once(world, name).acquire, timeout=60))
    await asyncio.wait([waiting], timeout=0.5)
    assert not waiting.done()
    await world.call(first.release)
    with pytest.raises(LockTimeoutError, match="is done"):
        await asyncio.wait_for(waiting, 10)


async def test_a_waiter_gets_the_attempt_after_a_failed_one(world: World, name: str) -> None:
    """If the run fails, a waiter gets the next attempt."""
    with pytest.raises(ZeroDivisionError):
        async with world.enter(once(world, name).hold()):
            other = world.other()
            waiting = asyncio.ensure_future(other.call(once(world, name).acquire, timeout=60))
            await asyncio.wait([waiting], timeout=0.5)
            raise ZeroDivisionError
    slot = await asyncio.wait_for(waiting, 10)
    assert slot.resumed
    await other.call(slot.release)


async def test_a_wait_that_is_too_short_names_the_holder(world: World, name: str) -> None:
    """A busy slot raises another error than one that is done, and names the holder."""
    engine = world.engine()
    async with world.enter(once(world, name).hold()):
        with pytest.raises(LockTimeoutError) as told:
            await world.contender().call(once(world, name, engine).acquire, timeout=0.2)
        assert [holder.token for holder in told.value.holders] == [1]


async def test_an_attempt_that_died_is_seen_and_resumed_by_one(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C045: after the TTL of a dead holder one waiter gets the slot, marked as resumed."""
    slot = await world.call(once(world, name, ttl=1).acquire)
    slot.abandon()
    again = await world.call(once(world, name).acquire, timeout=20)
    assert again.resumed
    assert row_of(admin, name) == (None, this_year(), 2)
    await world.call(again.release)


async def test_a_lost_slot_is_not_done(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """Leaving the block after a loss raises, and the slot is free for another attempt."""
    engine = world.engine()
    with pytest.raises(LockLostError) as told:
        async with world.enter(once(world, name, engine, ttl=1).hold()) as slot:
            admin.execute("SELECT pgfence_evict_lease_v2(%s, 'me', 'test', NULL)", [name])
            await world.call(slot.wait_lost, 10)
    assert told.value.reason == "evicted"
    assert row_of(admin, name) == (None, this_year(), 1)
    assert await world.call(once(world, name, engine).is_held) is False


async def test_a_run_that_ended_too_late_is_not_done(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """C083: a run that ends after its time raises, and its release does not mark the slot as done."""
    with pytest.raises(LockLostError) as told:
        async with world.enter(once(world, name, ttl=20, max_hold=1).hold()) as slot:
            await world.call(slot.wait_lost, 10)
    assert told.value.reason == "overdue"
    ended = "SELECT FROM pgfence_lease WHERE name = %s AND released_at IS NOT NULL"
    await eventually(lambda: admin.execute(ended, [name]).fetchone() is not None)
    assert row_of(admin, name) == (None, this_year(), 1)


async def test_max_hold_ends_a_run_that_hangs(world: World, name: str) -> None:
    """C083: a run that hangs is lost at max_hold, with the reason "overdue"."""
    slot = await world.call(once(world, name, ttl=1, max_hold=1).acquire)
    assert await world.call(slot.wait_lost, 10)
    assert slot.loss_reason == "overdue"


# ---------------------------------------------------------------- schedules


@pytest.mark.every_driver
async def test_the_server_s_clock_names_the_slot(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C088: a client whose clock is hours off gets the same slot, because only the server's clock is used."""
    monkeypatch.setattr("time.time", lambda: 0.0)
    slot = await world.call(once(world, name, every=timedelta(minutes=1)).try_acquire)
    assert abs(datetime.now(UTC) - slot.slot) < timedelta(minutes=2)
    await world.call(slot.release)


async def test_each_slot_comes_once(world: World, name: str) -> None:
    """C087: of several processes that keep requesting short slots, one runs each slot."""
    engine, slots, end = world.engine(), [], datetime.now(UTC) + timedelta(seconds=2)

    async def work(who: Any) -> None:
        while datetime.now(UTC) < end:
            slot = await who.call(once(world, name, engine, every=timedelta(milliseconds=250)).try_acquire)
            if slot is not None:
                slots.append(slot.slot)
                await who.call(slot.release)

    await asyncio.gather(*(work(world.other()) for _ in range(3)))
    assert len(slots) == len(set(slots))
    assert 6 <= len(slots) <= 10
    assert slots == sorted(slots)


@pytest.mark.every_driver
async def test_missed_slots_are_caught_up_if_asked_for(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """catch_up="all" runs missed slots in order, "last" only the newest, and "none" no slot after its first minute."""
    engine, calls = world.engine(), []
    await world.call(once(world, name, engine).wrap()(counted(world, calls)))
    admin.execute("UPDATE pgfence_slot SET done = done - interval '3 years' WHERE name = %s", [name])
    assert await world.call(once(world, name, engine, catch_up="none").try_acquire) is None
    with pytest.raises(LockTimeoutError, match="missed"):
        await world.call(once(world, name, engine, catch_up="none").acquire)
    calls.clear()
    assert await world.call(once(world, name, engine, catch_up="all").wrap()(counted(world, calls))) == 3
    years = [this_year().year - 2, this_year().year - 1, this_year().year]
    assert [slot.year for slot, _ in calls] == years
    admin.execute("UPDATE pgfence_slot SET done = done - interval '3 years' WHERE name = %s", [name])
    calls.clear()
    await world.call(once(world, name, engine).wrap()(counted(world, calls)))
    assert [slot for slot, _ in calls] == [this_year()]


AHEAD = "UPDATE pgfence_slot SET done = done + interval '3 years', tried = tried + interval '3 years' WHERE name = %s"


async def test_a_slot_done_by_a_wrong_clock_is_reported_and_repairable(
    world: World, name: str, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """After the server's clock was years ahead, every call raises an error with the statement that repairs the slot."""
    engine, calls = world.engine(), []
    await world.call((await world.call(once(world, name, engine).acquire)).release)
    admin.execute(AHEAD, [name])
    with pytest.raises(SlotClockError, match="the clock was ahead when the slot ran, or is behind now") as told:
        await world.call(once(world, name, engine).acquire)
    error = told.value
    assert isinstance(error, pgfence.SlotOverError)
    assert (error.names, error.slot.year, error.retryable) == ((name,), this_year().year + 3, False)
    assert error.ahead == error.slot - error.now > timedelta(days=2 * 365)
    assert error.slot.isoformat() in str(error)
    assert error.now.isoformat() in str(error)
    for catch_up in ("last", "all"):
        caplog.clear()
        assert await world.call(once(world, name, engine, catch_up=catch_up).try_acquire) is None
        assert await world.call(once(world, name, engine, catch_up=catch_up).wrap()(counted(world, calls))) is None
        said = [(record.levelname, error.repair in record.message) for record in caplog.records]
        assert said == [("WARNING", True)] * 2
    with pytest.raises(SlotClockError):
        await world.call(once(world, name, engine).wrap(busy="raise")(counted(world, calls)))
    assert calls == []
    assert str(error).endswith(error.repair)
    assert admin.execute(error.repair).rowcount == 1
    await world.call(once(world, name, engine).wrap()(counted(world, calls)))
    assert calls == [(this_year(), False)]
    assert admin.execute(error.repair).rowcount == 0


async def test_a_host_with_other_zone_rules_than_the_server_runs_nothing(
    world: World, name: str, tmp_path: Path, admin: psycopg.Connection[Any]
) -> None:
    """Zone rules that differ now or at the slot raise an error, even with busy="skip"."""
    engine, calls = world.engine(), []
    hour, year = timedelta(hours=1), this_year()
    write_zone(tmp_path, "Asia/Tokyo", 8 * hour, year, 8 * hour)
    write_zone(tmp_path, "Asia/Dubai", 3 * hour, year + timedelta(days=1), 4 * hour)
    rules = {"Asia/Tokyo": (8 * hour, 9 * hour), "Asia/Dubai": (3 * hour, 4 * hour)}
    with zones_of_host(tmp_path):
        for zone, here_and_there in rules.items():
            job = once(world, name, engine, tz=zone)
            for ask in (job.acquire, job.try_acquire, job.wrap()(counted(world, calls))):
                with pytest.raises(SlotZoneError, match=f"time zone '{zone}'.*pdate the") as told:
                    await world.call(ask)
                error = told.value
                assert (error.names, error.zone, error.retryable) == ((name,), zone, False)
                assert (error.here, error.there) == here_and_there
    assert (calls, row_of(admin, name)) == ([], None)
    await world.call(once(world, name, engine, tz="Asia/Dubai").wrap()(counted(world, calls)))
    assert [slot for slot, _ in calls] == [year - 4 * hour]


@pytest.mark.parametrize("catch_up", ["last", "all"])
@pytest.mark.parametrize("first", ["old", "new"])
def test_a_zone_unknown_to_the_server_has_one_run_per_local_date(
    dsn: str, name: str, tmp_path: Path, admin: psycopg.Connection[Any], first: str, catch_up: str
) -> None:
    """Two hosts whose rules differ run a local date once, the second raises; the next date runs with either host's rules."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}", poolclass=NullPool)
    ran, at, hour = list[str](), datetime.now(UTC), timedelta(hours=1)
    offset = timedelta(hours=12) - timedelta(hours=at.hour)  # about noon there
    for folder, ahead in (("old", offset), ("new", offset - hour)):
        write_zone(tmp_path / folder, "Mars/Base", ahead, at - 900 * hour, ahead)

    def run(host: str) -> None:
        with zones_of_host(tmp_path / host):
            job = pgfence.Once(engine, name, every=timedelta(days=1), tz="Mars/Base", catch_up=catch_up)
            job.wrap()(lambda: ran.append(host))()

    second = "new" if first == "old" else "old"
    run(first)
    # Midnight is later on the new host: compared by the instant alone, it would have another slot than the old one.
    with pytest.raises(SlotZoneError, match="the host that ran the last slot.*pip install"):
        run(second)
    run(first)
    assert ran == [first]
    admin.execute("UPDATE pgfence_slot SET done = done - interval '1 day', tried = tried - interval '1 day'")
    run(second)
    assert ran == [first, second]


@pytest.mark.parametrize("odd", ["it's", 'a "b" \\', "two  spaces", "tab\tand\nline", "\u00a0\U0001f512 %s :x"])
def test_the_statement_of_repair_names_any_job_wherever_its_table_is(
    dsn: str, name: str, admin: psycopg.Connection[Any], odd: str
) -> None:
    """Copied from a line of a log, in which white space is folded, it finds the row by its schema, prefix and name."""
    schema = f'odd "{name}"'
    url = f"postgresql+psycopg://{dsn.split('://', 1)[1]}"
    engine = create_engine(url, poolclass=NullPool)
    pgfence.configure(engine, schema=schema, prefix="o'x ", namespace=name)
    pgfence.schema.create_all(engine)
    try:
        job = pgfence.Once(engine, odd, **YEARLY)
        job.acquire().release()
        table = sql.Identifier(schema, "o'x slot")
        admin.execute(sql.SQL("UPDATE {} SET done = done + interval '1 year'").format(table))
        with pytest.raises(SlotClockError) as told:
            job.acquire()
        line = " ".join(str(told.value).split())
        assert admin.execute(line[line.index("UPDATE ") :]).rowcount == 1
        job.acquire().release()
    finally:
        admin.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))
        engine.dispose()


@pytest.mark.every_driver
async def test_a_slot_that_the_caller_names_runs_once(world: World, name: str) -> None:
    """With `at`, each slot runs once, in any order and at the same time as others."""
    engine = world.engine()
    march = await world.call(once(world, name, engine, at="2026-03-01").acquire)
    january = await world.call(once(world, name, engine, at=datetime(2026, 1, 1, tzinfo=UTC)).try_acquire)
    assert (march.slot.month, january.slot.month) == (3, 1)
    await world.call(january.release)
    await world.call(march.release)
    for at in ("2026-03-01", "2026-03-01T01:00+01:00", "2026-01-01"):
        assert await world.call(once(world, name, engine, at=at).try_acquire) is None
    february = await world.call(once(world, name, engine, at="2026-02-01").try_acquire)
    await world.call(february.release)


# ---------------------------------------------------------------- wrap


async def test_wrap_skips_what_is_done(world: World, name: str) -> None:
    """By default the wrapped function runs once in a slot, and later calls return None."""
    calls: list[Any] = []
    guarded = once(world, name).wrap()(counted(world, calls))
    assert await world.call(guarded) == 1
    assert await world.call(guarded) is None
    assert calls == [(this_year(), False)]


async def test_wrap_raises_if_asked_to(world: World, name: str) -> None:
    """busy="raise" and a callable get the error."""
    calls: list[Any] = []
    await world.call(once(world, name).wrap(busy="raise")(counted(world, calls)))
    with pytest.raises(LockTimeoutError):
        await world.call(once(world, name).wrap(busy="raise", timeout=5)(counted(world, calls)))
    with pytest.raises(KeyError):
        await world.call(once(world, name).wrap(busy=lambda _: KeyError(1))(counted(world, calls)))
    assert len(calls) == 1


async def test_wrap_leaves_a_failed_slot_free(world: World, name: str) -> None:
    """An exception of the function is the caller's, and the next call tries again."""
    calls: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        await world.call(once(world, name).wrap()(counted(world, calls, ZeroDivisionError())))
    assert await world.call(once(world, name).wrap()(counted(world, calls))) == 2
    assert calls == [(this_year(), False), (this_year(), True)]


async def test_wrap_takes_names_from_the_arguments(world: World, name: str) -> None:
    """A template of the arguments gives each tenant a separate slot."""
    calls: list[int] = []

    def note(tenant: int) -> None:
        calls.append(tenant)

    async def anote(tenant: int) -> None:
        calls.append(tenant)

    guarded = once(world, name + ":{tenant}").wrap()(world.pick(note, anote))
    for tenant in (1, 2, 1):
        await world.call(guarded, tenant)
    assert calls == [1, 2]


async def test_without_a_server_wrap_follows_on_unreachable(world: World, name: str) -> None:
    """Without a server wrap() raises, unless `unreachable=` says to skip the call or run it without protection."""
    engine = world.engine(dsn="postgresql://nobody@127.0.0.1:1/none")
    calls: list[int] = []

    def note() -> int:
        calls.append(1)
        return 7

    async def anote() -> int:
        return note()

    fn = world.pick(note, anote)
    for catch_up in ("last", "all"):
        guard = once(world, name, engine, catch_up=catch_up)
        with pytest.raises(UnreachableError):
            await world.call(guard.wrap()(fn))
        assert await world.call(guard.wrap(unreachable="skip")(fn)) is None
        assert await world.call(guard.wrap(unreachable="run")(fn)) == 7
    assert calls == [1, 1]


# ---------------------------------------------------------------- bad input, other places


@pytest.mark.every_driver
async def test_missing_tables_are_named_with_the_command(world: World, name: str) -> None:
    """SchemaError names the command that creates the missing tables."""
    engine = world.engine()
    pgfence.configure(engine, prefix="absent_")
    with pytest.raises(SchemaError, match="pgfence install --prefix absent_"):
        await world.call(once(world, name, engine).acquire)


@every_row(
    ("given", "error"),
    [
        ({"every": timedelta(days=1), "cron": "0 7 * * *"}, TypeError),
        ({"cron": "61 * * * *"}, ValueError),
        ({"ttl": 0}, ValueError),
        ({"ttl": -1}, ValueError),
        ({"ttl": 90_000}, ValueError),
        ({"ttl": "60"}, TypeError),
        ({"max_hold": 0}, ValueError),
        ({"catch_up": "some"}, ValueError),
    ],
)
async def test_unusable_arguments_are_rejected_in_the_constructor(
    world: World, name: str, given: dict[str, Any], error: type[Exception]
) -> None:
    """C100: a typed error in the constructor, in both twins."""
    with pytest.raises(error):
        once(world, name, **given)
    with pytest.raises((TypeError, ValueError)):
        once(world, "")
    with pytest.raises(TypeError):
        once(world, pgfence.LockKey.of(name))  # type: ignore[arg-type]


async def test_each_namespace_has_its_own_slots(world: World, name: str) -> None:
    """The same name in another namespace has separate slots."""
    engine = world.engine()
    for namespace in ("", "shop", "mill"):
        slot = await world.call(once(world, name, engine, namespace=namespace).try_acquire)
        assert slot.names == (f"{namespace}:{name}" if namespace else name,)
        await world.call(slot.release)


# ---------------------------------------------------------------- many processes


CROWD = """
import json, os, random, sys, time
from datetime import timedelta
from sqlalchemy import create_engine
import pgfence

url, name, length, skew = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:5])
engine = create_engine(url)
seen = []

def work():
    time.sleep(0.001)
    seen.append(pgfence.current(pgfence.Slot).slot.isoformat())

guarded = pgfence.Once(engine, name, every=timedelta(seconds=length), catch_up="all").wrap()(work)
honest = time.time
time.time = lambda: honest() + skew  # what this host takes for the time
print("ready", flush=True)
end = float(sys.stdin.readline())
while honest() < end:
    # As a crontab does: at the beginning of each slot by the host's own clock.
    time.sleep(length - time.time() % length)
    guarded()
guarded()
print(json.dumps(seen))
"""


@pytest.mark.timeout(100 + 300 * SCALE)
def test_hosts_with_skewed_clocks_run_each_slot_once(dsn: str, name: str, tmp_path: Path) -> None:
    """C088: 8 processes (20 in a long run) with clocks up to 10 minutes off run a short job once per slot."""
    path, url = tmp_path / "host.py", f"postgresql+psycopg://{dsn.split('://', 1)[1]}"
    path.write_text(CROWD)
    hosts = 8 if SCALE == 1 else 20
    length, count = 0.1, int(50 * SCALE)
    crowd = [
        subprocess.Popen(
            [sys.executable, str(path), url, name, str(length), str((2 * host / (hosts - 1) - 1) * 618.03)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in range(hosts)
    ]
    try:
        for process in crowd:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        end = time.time() + length * (count + 5)
        for process in crowd:
            assert process.stdin is not None
            process.stdin.write(f"{end}\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=100 + 2 * length * count)[0] for process in crowd]
    finally:
        for process in crowd:
            process.kill()
    assert [process.returncode for process in crowd] == [0] * hosts
    slots = sorted(datetime.fromisoformat(slot) for answer in answers for slot in json.loads(answer))
    steps = {later - slot for slot, later in itertools.pairwise(slots)}
    assert steps == {timedelta(seconds=length)}
    assert len(slots) >= count
