"""The tickets of a queue: numbers wrap around, a stopped owner is passed over, and a missing ticket is not an error."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence._sql import ticket_queue
from pgfence._sql.ticket_queue import (
    AWAKE,
    CHECK_TICKETS,
    LEAVE,
    SECONDS,
    build_look,
    build_wait_for_keys,
    build_wait_for_turn,
    find_queue,
)
from pgfence.keys import LockKey
from support.locking import background, elsewhere, give, has_ticket, labelled, lock, take, waits
from support.servers import database
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.worlds import World

LAST = 2**20 - 1
KEYS = (LockKey.raw(4_711),)
BASE = find_queue(KEYS)


@pytest.fixture
def held(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A session that holds the key."""
    with elsewhere(dsn, KEYS[0]) as holder:
        yield holder


class Waiter:
    """A raw session that runs the statements of a wait, one slice of 5 ms after the other."""

    def __init__(self, dsn: str) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.has_ticket = False

    def run(self, statements: tuple[str, ...]) -> bool:
        cursor = self.connection.execute("; ".join(statements))
        while cursor.nextset():
            pass
        return cursor.fetchone() is not None

    def wait_for_turn(self, milliseconds: int = 5, *, looks: bool = False) -> bool:
        statements = build_wait_for_turn(KEYS, milliseconds, has_ticket=self.has_ticket, looks=looks)
        self.has_ticket = True
        return self.run(statements)

    def check(self) -> tuple[int | None, int]:
        """Skip stopped owners, and return the first ticket whose owner waits, and the number of tickets ahead."""
        _, first, ahead = self.connection.execute(CHECK_TICKETS).fetchone()
        return None if first is None else first - BASE, ahead

    def look(self, front: int, *, gives_sign: bool = False) -> bool:
        """Look whether the queue has moved."""
        return self.connection.execute(*build_look(BASE, BASE + front, "format", gives_sign=gives_sign)).fetchone()[0]

    def setting(self, name: str) -> str:
        return self.connection.execute(f"SELECT current_setting('pgfence.{name}', true)").fetchone()[0]

    def numbers(self) -> tuple[int | None, int | None]:
        """Its own ticket and the one in front of it, counted from the base of the queue."""
        mine, ahead = (self.setting(name) for name in ("ticket", "ahead"))
        return (int(mine) - BASE if mine else None), (int(ahead) - BASE if ahead else None)


@pytest.fixture
def waiters(dsn: str) -> Iterator[list[Waiter]]:
    some = [Waiter(dsn) for _ in range(3)]
    yield some
    for waiter in some:
        waiter.connection.close()


def test_a_short_slice_waits_for_the_counter(
    dsn: str, admin: psycopg.Connection[Any], held: psycopg.Connection[Any], waiters: list[Waiter]
) -> None:
    """The first slice of a writer takes a millisecond. If another waiter takes its ticket then, the writer still gets one."""
    counter = LockKey.raw(BASE + LAST + 1)
    with elsewhere(dsn, counter) as other, ThreadPoolExecutor() as pool:
        wait = pool.submit(waiters[0].wait_for_turn, 1)
        while not waits(admin, counter)():
            assert not wait.done()
        give(other, counter)
        assert wait.result()
    assert waiters[0].numbers() == (0, None)


@pytest.mark.parametrize("oldest", [0, 1, LAST - 1, LAST, 2**19])
def test_the_numbers_go_around(
    oldest: int, dsn: str, admin: psycopg.Connection[Any], held: psycopg.Connection[Any], waiters: list[Waiter]
) -> None:
    """After the last number comes the first, and the order stays."""
    first, second, third = waiters
    with elsewhere(dsn, LockKey.raw(BASE + oldest)) as before, ThreadPoolExecutor() as pool:
        assert not first.wait_for_turn()
        assert not second.wait_for_turn()
        assert not third.wait_for_turn()
        assert first.numbers() == ((oldest + 1) & LAST, oldest)
        assert second.numbers() == ((oldest + 2) & LAST, (oldest + 1) & LAST)
        assert third.numbers() == ((oldest + 3) & LAST, (oldest + 2) & LAST)
        # Whoever is gone is looked through, from either end.
        wait = pool.submit(first.wait_for_turn, 60_000)
        while not waits(admin, LockKey.raw(BASE + oldest))():
            assert not wait.done()
        second.connection.close()
        assert not third.wait_for_turn(60_000)  # until the server has seen the session end
        assert third.numbers() == ((oldest + 3) & LAST, (oldest + 1) & LAST)
        give(before, LockKey.raw(BASE + oldest))
        assert wait.result()
        assert not third.wait_for_turn()


def test_a_queue_without_tickets_begins_with_the_first(held: psycopg.Connection[Any], waiters: list[Waiter]) -> None:
    """The waiter that takes it has its turn, and gets the lock when it is free; the ticket ends then."""
    (waiter, *_) = waiters
    assert waiter.wait_for_turn()
    assert waiter.numbers() == (0, None)
    assert not waiter.run(build_wait_for_keys(KEYS, 5))
    give(held, KEYS[0])
    assert waiter.run(build_wait_for_keys(KEYS, 5))
    assert waiter.numbers() == (None, None)
    assert waiter.connection.execute(LEAVE).fetchone() == (None, "", "", None, "", None, "")


def test_a_ticket_taken_by_another_key_is_not_an_error(
    dsn: str, held: psycopg.Connection[Any], waiters: list[Waiter], advisory_rows: Any
) -> None:
    """A key of an application in place of the ticket: the waiter continues without one."""
    (waiter, *_) = waiters
    with elsewhere(dsn) as other:
        other.execute(f"SELECT pg_advisory_lock_shared('{BASE}'::bigint)")
        assert waiter.wait_for_turn()
        assert waiter.setting("ticket") == "none"
        give(held, KEYS[0])
        assert waiter.run(build_wait_for_keys(KEYS, 5))
        assert waiter.setting("ticket") == ""


def test_a_lost_ticket_is_noticed(held: psycopg.Connection[Any], waiters: list[Waiter]) -> None:
    """Giving back what is not there is false: the session is not fit for another wait."""
    (waiter, *_) = waiters
    assert waiter.wait_for_turn()
    waiter.connection.execute("SELECT pg_advisory_unlock_all()")
    assert waiter.connection.execute(LEAVE).fetchone()[0] is False


@pytest.mark.parametrize("oldest", [0, LAST - 2, LAST, 2**19])
def test_the_front_is_known_if_enough_owners_wait(
    oldest: int, dsn: str, admin: psycopg.Connection[Any], held: psycopg.Connection[Any]
) -> None:
    """It is the first ticket whose owner waits, also after the last number. One waiter less, and there is none."""
    ahead = [Waiter(dsn) for _ in range(AWAKE)]
    last = Waiter(dsn)
    with elsewhere(dsn, LockKey.raw(BASE + ((oldest - 1) & LAST))), ThreadPoolExecutor() as pool:
        for waiter in (*ahead, last):
            assert not waiter.wait_for_turn()
        assert ahead[0].numbers()[0] == oldest
        waits_of = [pool.submit(waiter.wait_for_turn, 60_000) for waiter in ahead]
        while not all(waits(admin, LockKey.raw(BASE + (oldest - 1 + n & LAST)))() for n in range(AWAKE)):
            assert not any(wait.done() for wait in waits_of)
        # The session with the first ticket waits for nothing.
        assert last.check() == (oldest, AWAKE)
        ahead[-1].connection.cancel()
        with pytest.raises(psycopg.errors.QueryCanceled):
            waits_of[-1].result(20)
        assert last.check() == (None, AWAKE - 1)
        for waiter in ahead[:-1]:
            waiter.connection.cancel()
    for waiter in (*ahead, last):
        waiter.connection.close()


def test_tickets_of_another_database_are_not_counted(
    dsn: str, held: psycopg.Connection[Any], waiters: list[Waiter]
) -> None:
    """The same queue there has the same numbers."""
    ahead, last = waiters[:2]
    first = LockKey.raw(BASE)
    with database(dsn, "queue") as url, elsewhere(url, first), elsewhere(dsn, first):
        other = Waiter(url)
        for waiter in (other, ahead, last):
            assert not waiter.wait_for_turn()
        for waiter in (other, ahead):
            waiter.look(LAST, gives_sign=True)
        assert (other.numbers(), ahead.numbers(), last.numbers()) == ((1, 0), (1, 0), (2, 1))
        assert last.check() == (None, 1)
        other.connection.close()


def test_a_look_sees_whether_a_ticket_was_returned_and_leaves_nothing(
    held: psycopg.Connection[Any], waiters: list[Waiter], advisory_rows: Any
) -> None:
    """The ticket that it asks for is free again at once, and the last sign is returned with the waiter's own ticket."""
    first, second, third = waiters
    for waiter in waiters:
        waiter.wait_for_turn()
    before = len(advisory_rows())
    assert not third.look(0)
    assert len(advisory_rows()) == before
    for _ in range(3):
        assert not third.look(0, gives_sign=True)
        assert len(advisory_rows()) == before + 1
    first.connection.execute(LEAVE)
    assert third.look(0) and third.look(0, gives_sign=True)
    assert not third.look(1)
    second.connection.execute(LEAVE)
    assert third.look(2)
    third.connection.execute(LEAVE)
    assert [row.pid for row in advisory_rows()] == [held.info.backend_pid]


@pytest.mark.parametrize(("age", "is_alive"), [(0, True), (4, True), (20, False), (SECONDS - 5, False)])
def test_an_owner_that_gave_a_sign_lately_is_not_passed_over(
    age: int, is_alive: bool, dsn: str, held: psycopg.Connection[Any], waiters: list[Waiter]
) -> None:
    """One that sleeps waits for nothing, but its last sign is not long ago."""
    (waiter, *_) = waiters
    with elsewhere(dsn, LockKey.raw(BASE)) as ahead:
        second = f"mod(extract(epoch FROM clock_timestamp())::bigint - {age}, {SECONDS})"
        ahead.execute(f"SELECT pg_advisory_lock_shared({BASE} + {2**20 + 2**19} + {second})")
        assert not waiter.wait_for_turn()
        assert waiter.check() == (None, is_alive)
        assert waiter.numbers() == (1, 0 if is_alive else None)


def test_an_owner_between_two_slices_is_not_passed_over(
    admin: psycopg.Connection[Any],
    held: psycopg.Connection[Any],
    waiters: list[Waiter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If it does not wait when the waiter behind it looks, the waiter looks again a moment later."""
    first, second, third = waiters
    monkeypatch.setattr(ticket_queue, "BETWEEN_SLICES_MS", 3_000)
    for waiter in waiters:
        waiter.wait_for_turn()
    query = (  # longer than its slice of 5 ms
        "SELECT FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        " AND xact_start < clock_timestamp() - interval '0.3 s'"
    )
    with ThreadPoolExecutor() as pool:
        look = pool.submit(third.wait_for_turn, looks=True)
        while not admin.execute(query, [third.connection.info.backend_pid]).fetchall():
            assert not look.done()
        wait = pool.submit(second.wait_for_turn, 60_000)
        assert not look.result()
        assert third.numbers() == (2, 1)
        first.connection.close()
        assert wait.result()


@pytest.mark.twins
async def test_an_owner_that_stands_still_is_passed_over(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """A ticket in front whose session waits for nothing, as that of a stopped process: who is behind it waits for the lock itself."""
    other, ticket = world.other(), LockKey.raw(find_queue((LockKey.of(name),)))
    with elsewhere(dsn, name) as holder, elsewhere(dsn, ticket) as stopped:
        async with background(other.call(lock(world, labelled(world, name), name).acquire, timeout=60)) as task:
            await eventually(has_ticket(admin, name, name))
            await eventually(waits(admin, name))  # the lock is held all the time
            give(holder, name)
            held = await task
        assert give(stopped, ticket)
    await other.call(held.release)


@pytest.mark.twins
async def test_an_owner_that_waits_is_not_passed_over(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """A ticket in front whose session waits keeps its place, though the lock is free at that moment."""
    other, ticket = world.other(), LockKey.raw(find_queue((LockKey.of(name),)))
    with elsewhere(dsn, name, f"{name}:else") as holder, elsewhere(dsn, ticket) as ahead:
        wait = asyncio.create_task(asyncio.to_thread(take, ahead, f"{name}:else"))
        async with background(other.call(lock(world, labelled(world, name), name).acquire, timeout=60)) as task:
            await eventually(has_ticket(admin, name, name))
            give(holder, name)
            begun: set[Any] = set()
            query = "SELECT xact_start FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
            await eventually(lambda: begun.update(admin.execute(query, [name]).fetchall()) or len(begun) > 5)
            assert not task.done()
            give(holder, f"{name}:else")
            await wait
            give(ahead, ticket)
            await other.call((await task).release)
