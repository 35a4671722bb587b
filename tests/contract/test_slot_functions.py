"""The SQL functions of slots: grant, completion, repeated attempts."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence import schema
from support.lease_functions import install_with_clock
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.servers import OwnServer

pytestmark = pytest.mark.usefixtures("tables")

NOW = datetime.now(UTC)
SLOT = NOW.replace(minute=0, second=0, microsecond=0)
NEXT = SLOT + timedelta(hours=2)
FOREVER = datetime.max.replace(tzinfo=UTC)
GRANT = "SELECT outcome, token, attempt, remaining, kind FROM {}acquire_slot_v2(%s, %s, %s, %s, %s, NULL, %s, 'here', 1, '', NULL, %s, %s, (SELECT done FROM {}slot WHERE name = %s))"


class Caller:
    """A caller that requests slots of one name, on a separate connection."""

    def __init__(self, dsn: str, name: str, place: str = "pgfence_") -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.name = name
        self.place = place
        self.remaining = 0.0
        self.lease = str(uuid4())
        self.token = 0

    def acquire(
        self,
        slot: datetime = SLOT,
        until: datetime | None = NEXT,
        ttl: float = 60,
        *,
        rules: tuple[str | None, int | None] = (None, None),
    ) -> tuple[str, int]:
        """Return the outcome and the number of the attempt."""
        grant = GRANT.format(self.place, self.place).encode()
        row = self.connection.execute(
            grant, [self.name, slot, until, self.lease, ttl, "me", *rules, self.name]
        ).fetchone()
        assert row is not None
        self.token, self.remaining = row[1], row[3]
        assert row[4] in (None, "slot")
        return row[0], row[2]

    def finish(self, slot: datetime = SLOT, *, done: bool = True) -> str:
        """Return the server's result."""
        row = self.connection.execute(
            f"SELECT {self.place}finish_slot_v1(%s, %s, %s, %s, %s)".encode(),
            [self.name, self.lease, self.token, slot, done],
        ).fetchone()
        assert row is not None
        return str(row[0])


@pytest.fixture
def one(dsn: str, name: str) -> Iterator[Caller]:
    """A caller that requests the slots of this test."""
    caller = Caller(dsn, name)
    yield caller
    caller.connection.close()


@pytest.fixture
def other(dsn: str, name: str) -> Iterator[Caller]:
    """A second caller that requests the slots of this test."""
    caller = Caller(dsn, name)
    yield caller
    caller.connection.close()


def row_of(admin: psycopg.Connection[Any], name: str) -> Any:
    return (
        admin.cursor(row_factory=psycopg.rows.namedtuple_row)
        .execute("SELECT * FROM pgfence_slot WHERE name = %s", [name])
        .fetchone()
    )


def test_a_slot_is_granted_once_and_then_done(one: Caller, other: Caller, admin: psycopg.Connection[Any]) -> None:
    """C087: other callers get "busy" while the slot's job runs, and "done" afterwards."""
    assert one.acquire() == ("granted", 1)
    assert other.acquire()[0] == "busy"
    assert one.finish() == "released"
    assert other.acquire()[0] == "done"
    assert one.acquire()[0] == "done"
    assert row_of(admin, one.name).done == SLOT


def test_an_earlier_slot_than_the_one_done_is_over(one: Caller) -> None:
    """A slot earlier than the newest one done is not granted, for example to a host with an old schedule."""
    one.acquire()
    one.finish()
    assert one.acquire(SLOT - timedelta(days=1), None)[0] == "done"
    assert one.acquire(NEXT, None)[0] == "granted"


def test_a_failed_attempt_leaves_the_slot_to_the_next(one: Caller, other: Caller) -> None:
    """A slot that is released undone is free at once, and the next attempt has a larger token and number 2."""
    assert one.acquire() == ("granted", 1)
    assert one.finish(done=False) == "released"
    assert other.acquire() == ("granted", 2)
    assert other.token > one.token


def test_an_attempt_that_died_is_seen(one: Caller, other: Caller) -> None:
    """After the TTL of an attempt that was not released, the next one is granted and marked as resuming."""
    one.acquire(ttl=0.2)
    while (found := other.acquire()) == ("busy", 1):
        pass
    assert found == ("granted", 2)
    assert one.finish() == "superseded"
    assert other.finish() == "released"


def test_the_next_slot_is_a_first_attempt_again(one: Caller) -> None:
    """Attempts are counted for each slot separately."""
    one.acquire()
    one.finish(done=False)
    assert one.acquire(NEXT, None) == ("granted", 1)


def test_a_request_with_a_lost_response_can_be_repeated(one: Caller, other: Caller) -> None:
    """C084: the same grant, requested twice, is one attempt; the same end, sent twice, is one end."""
    assert one.acquire() == ("granted", 1)
    token = one.token
    assert one.acquire() == ("granted", 1)
    assert one.token == token
    assert one.finish() == "released"
    assert one.finish() == "released"
    assert other.acquire()[0] == "done"


def test_work_finished_in_time_counts_if_the_confirmation_is_late(one: Caller, other: Caller) -> None:
    """The client decides whether it still held when it sent; the server, whether another attempt took over."""
    one.acquire(ttl=0.05)
    threading.Event().wait(0.1)
    assert one.finish() == "released"
    assert other.acquire()[0] == "done"


@pytest.mark.parametrize(
    ("slot", "until"), [(timedelta(hours=1), timedelta(hours=2)), (-timedelta(hours=1), timedelta())]
)
def test_the_server_s_clock_has_the_last_word(one: Caller, slot: timedelta, until: timedelta) -> None:
    """C086: a slot that was computed too early or too late is not granted, because another slot is current."""
    assert one.acquire(NOW + slot, NOW + until)[0] == "moved"


def test_a_slot_by_other_zone_rules_is_not_granted(one: Caller, admin: psycopg.Connection[Any]) -> None:
    """The server compares the difference to UTC at the slot, not now; a host that agrees gets it, and no trace is left before."""
    slot = datetime(2026, 6, 30, 22, tzinfo=UTC)  # midnight in Vienna, in summer
    assert one.acquire(slot, None, rules=("Europe/Vienna", 3600))[0] == "zone"
    assert row_of(admin, one.name) is None
    assert one.acquire(slot, None, rules=("Europe/Vienna", 7200)) == ("granted", 1)


def test_the_server_s_zone_database_is_asked(dsn: str) -> None:
    """Zones with the name of an abbreviation have daylight saving time, an unknown zone is NULL, and the session's zone stays."""
    with psycopg.connect(dsn, autocommit=True, options="-c TimeZone=Asia/Kolkata") as connection:
        july, january = datetime(2026, 7, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)
        asked = [(july, "MET"), (january, "MET"), (july, "America/St_Johns"), (july, "Mars/Base"), (july, "UTC")]
        ask = "SELECT pgfence_zone_offset_v1(%s, %s), current_setting('TimeZone')"
        found = [connection.execute(ask, one).fetchone() for one in asked]
    assert found == [(offset, "Asia/Kolkata") for offset in (7200, 3600, -9000, None, 0)]


class Clocked:
    """Two callers of a server whose clock the test sets.

    Attributes:
        one: the first caller, which requests the slots of this test.
        other: the second caller, which requests the same slots.
    """

    def __init__(self, one: Caller, other: Caller) -> None:
        self.one, self.other = one, other

    def set(self, now: datetime) -> None:
        """Set the server's clock."""
        for caller in (self.one, self.other):
            caller.connection.execute("SELECT set_config('slots.clock', %s, false)", [now.isoformat()])


@pytest.fixture
def clocked(dsn: str, name: str) -> Iterator[Clocked]:
    """Tables and functions that read the clock from a setting."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        install_with_clock(connection, "slots_by_a_set_clock", "pg_catalog.current_setting('slots.clock')::timestamptz")
    one, other = (Caller(dsn, name, "slots_by_a_set_clock.pgfence_") for _ in range(2))
    yield Clocked(one, other)
    one.connection.close()
    other.connection.close()


def test_a_slot_held_by_a_clock_that_was_ahead_is_free_one_ttl_later(clocked: Clocked) -> None:
    """Its holder died and the clock was set back by a month: the slot that counts now runs after one TTL, not in a month."""
    month, day = timedelta(days=30), timedelta(days=1)
    clocked.set(SLOT + month)
    assert clocked.one.acquire(SLOT + month, SLOT + month + day) == ("granted", 1)
    clocked.set(SLOT)
    assert clocked.other.acquire(SLOT, SLOT + day)[0] == "busy"
    assert clocked.other.remaining <= 60
    clocked.set(SLOT + timedelta(seconds=61))
    assert clocked.other.acquire(SLOT, SLOT + day) == ("granted", 1)
    assert clocked.other.finish(SLOT) == "released"


def test_a_slot_that_was_running_when_the_clock_was_set_back_is_done(clocked: Clocked) -> None:
    """The live holder finishes its slot; no other slot runs before, and none is granted ahead of the clock."""
    month, day = timedelta(days=30), timedelta(days=1)
    clocked.set(SLOT + month)
    assert clocked.one.acquire(SLOT + month, SLOT + month + day) == ("granted", 1)
    clocked.set(SLOT)
    for until in (SLOT + month + 2 * day, FOREVER):
        assert clocked.other.acquire(SLOT + month + day, until)[0] == "moved"
    assert clocked.one.finish(SLOT + month) == "released"
    assert clocked.other.acquire(SLOT, SLOT + day)[0] == "done"


def test_a_clock_that_jumps_ahead_does_not_take_a_finished_run_back(clocked: Clocked) -> None:
    """The lease has expired by the new clock; without a take-over, what its holder finished is done."""
    clocked.set(SLOT)
    assert clocked.one.acquire(SLOT, FOREVER) == ("granted", 1)
    clocked.set(SLOT + timedelta(days=30))
    assert clocked.one.finish(SLOT) == "released"
    assert clocked.other.acquire(SLOT, FOREVER)[0] == "done"


def test_an_evicted_attempt_is_not_done(one: Caller, other: Caller, admin: psycopg.Connection[Any]) -> None:
    """An evicted attempt cannot mark the slot as done, and another attempt may start at once."""
    one.acquire()
    admin.execute("SELECT pgfence_evict_lease_v2(%s, 'me', 'test', NULL)", [one.name])
    assert one.finish() == "evicted"
    assert other.acquire() == ("granted", 2)


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_of_many_at_once_one_gets_the_slot(dsn: str, name: str, level: str) -> None:
    """C087: one of eight callers gets the slot of a new name, at every isolation level."""
    barrier, outcomes = threading.Barrier(8), []

    def ask() -> None:
        caller = Caller(dsn, name)
        caller.connection.execute(f"SET default_transaction_isolation = '{level}'")
        barrier.wait(20)
        try:
            while True:
                try:
                    outcomes.append(caller.acquire()[0])
                    break
                except psycopg.errors.SerializationFailure:
                    continue
        finally:
            caller.connection.close()

    crowd = [threading.Thread(target=ask) for _ in range(8)]
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join(30)
    assert sorted(outcomes) == ["busy"] * 7 + ["granted"]


def test_a_request_during_the_finish_learns_that_the_slot_is_done(
    one: Caller, other: Caller, admin: psycopg.Connection[Any]
) -> None:
    """C088: the row is locked before it is read, so no slot can be finished between the look and the grant."""
    one.acquire()
    outcomes: list[str] = []
    asking = threading.Thread(target=lambda: outcomes.append(other.acquire()[0]))
    with one.connection.transaction():
        assert one.finish() == "released"
        asking.start()
        waits = "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        eventually(lambda: admin.execute(waits, [other.connection.info.backend_pid]).fetchone() is not None)
    asking.join(20)
    assert outcomes == ["done"]


def test_a_crash_forgets_no_slot_that_is_done(make_server: Callable[..., OwnServer], name: str) -> None:
    """With synchronous_commit off by default, an immediate stop right after the response loses neither slot nor token."""
    server = make_server(fsync=True, settings={"synchronous_commit": "off", "wal_writer_delay": "10s"})
    create(server.dsn)
    for attempt in range(1, 4):  # a few, for the log may be written by chance
        slot = SLOT + timedelta(days=attempt)
        caller = Caller(server.dsn, name)
        assert caller.acquire(slot, None) == ("granted", 1)
        token = caller.token
        assert caller.finish(slot) == "released"
        server.restart("immediate")
        with suppress(psycopg.Error):
            caller.connection.close()
        caller = Caller(server.dsn, name)
        assert caller.acquire(slot, None)[0] == "done"
        assert caller.token == token
        caller.connection.close()


def create(dsn: str) -> None:
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    schema.create_all(engine)
    engine.dispose()
