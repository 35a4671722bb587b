"""The SQL functions of leases: grant, renewal, release, expiry, eviction."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest

from support.lease_functions import Caller
from support.rows import every_row
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("tables")

KEY = 5_000_000_003
NEXT = "SELECT pgfence_next_token_v1('no such name', %s, %s, %s)"
LEVELS = ["read committed", "repeatable read", "serializable"]


@pytest.fixture
def one(dsn: str, name: str) -> Iterator[Caller]:
    """A caller that wants the lease of this test."""
    with Caller(dsn, name) as caller:
        yield caller


@pytest.fixture
def other(dsn: str, name: str) -> Iterator[Caller]:
    """A second caller that wants the same lease."""
    with Caller(dsn, name) as caller:
        yield caller


def lapse(admin: psycopg.Connection[Any], name: str, seconds: float = 100) -> None:
    """Set every time in the row back, as if the clock had been set forward."""
    back = f"- interval '{seconds} s'"
    columns = ("acquired_at", "renewed_at", "expires_at", "free_at", "min_until", "hold_until")
    admin.execute(f"UPDATE pgfence_lease SET {', '.join(f'{c} = {c} {back}' for c in columns)} WHERE name = %s", [name])


@contextmanager
def row_locked(admin: psycopg.Connection[Any], name: str) -> Iterator[psycopg.Connection[Any]]:
    """Keep the lease's row locked; committed at the end."""
    with admin.transaction():
        admin.execute("SELECT FROM pgfence_lease WHERE name = %s FOR UPDATE", [name])
        yield admin


def blocks(admin: psycopg.Connection[Any], waiter: Caller) -> Callable[[], bool]:
    """Return a function that tells whether one session keeps another waiting."""
    return lambda: admin.info.backend_pid in value(admin, "SELECT pg_blocking_pids(%s)", waiter.pid)


def value(connection: psycopg.Connection[Any], statement: str, *args: object) -> Any:
    """Return the only value that a statement returns."""
    row = connection.execute(statement, args).fetchone()
    assert row is not None
    return row[0]


def test_a_grant_says_everything_about_itself(one: Caller) -> None:
    """The result and the row agree; the first token is 1."""
    found = one.acquire(60, max_hold=90)
    assert (found.granted, found.token, found.remaining, found.hold_remaining) == (True, 1, 60, 90)
    assert (found.owner, found.host, found.pid, found.backend_pid, found.purpose) == (
        "me",
        "here",
        7,
        one.pid,
        "a purpose",
    )
    assert found.checkpoint is None
    row = one.row
    assert (str(row.lease_id), row.metadata, row.ttl, row.released_at) == (one.lease, [1], 60, None)
    assert row.expires_at == row.free_at == found.expires_at
    assert row.acquired_at == found.since
    assert 59 < row.left <= 60


def test_a_rejected_caller_receives_the_holder_of_the_slot(one: Caller, other: Caller) -> None:
    """The row that decided is in the result, with the seconds until it is free; the row is unchanged."""
    one.acquire(60, lock_delay=5, owner="first")
    before = one.row[:-2]
    found = other.acquire()
    assert (found.granted, found.token, found.owner, found.backend_pid) == (False, 1, "first", one.pid)
    assert 64 < found.remaining <= 65
    assert one.row[:-2] == before


def test_asked_again_with_the_same_id_it_is_the_same_grant(one: Caller, other: Caller) -> None:
    """C084: after a lost response, the same request returns the same token, with its full time."""
    one.acquire(60)
    again = one.acquire(90)
    assert (again.granted, again.token, again.remaining) == (True, 1, 90)
    assert not other.acquire().granted


def test_times_count_from_the_call_not_from_the_transaction(one: Caller) -> None:
    """C074: in a transaction that is old already a lease has its whole time, and so has a renewal."""
    with one.connection.transaction():
        one.connection.execute("SELECT pg_sleep(0.3)")
        one.acquire(10)
        assert one.row.left > 9.9
        one.connection.execute("SELECT pg_sleep(0.2)")
        assert one.renew(10)[0] == "ok"
        assert one.row.left > 9.9


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("what", ["acquire", "adopt"])
def test_times_count_from_the_end_of_the_wait_for_the_row(
    one: Caller, admin: psycopg.Connection[Any], name: str, what: str, level: str
) -> None:
    """C075: a grant that waited for a locked row has its full time from the end of the wait."""
    one.acquire(10)
    one.connection.execute(f"SET default_transaction_isolation = '{level}'")
    call = {"acquire": lambda: one.acquire(10), "adopt": lambda: one.adopt(one.lease, 1)}[what]
    with ThreadPoolExecutor(1) as pool:
        with row_locked(admin, name):
            waiting = pool.submit(call)
            eventually(blocks(admin, one))
            admin.execute("SELECT pg_sleep(0.4)")
            freed = value(admin, "SELECT clock_timestamp()")
        waiting.result(5)
    assert (one.row.expires_at - freed).total_seconds() >= 10


def test_a_row_that_stays_locked_is_an_error_after_two_seconds(
    one: Caller, other: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """A wait for a locked row ends with 55P03, for any limit of the session."""
    one.acquire()
    other.connection.execute("SET lock_timeout = 0")
    with row_locked(admin, name), pytest.raises(psycopg.errors.LockNotAvailable):
        other.acquire()
    assert other.one("SHOW lock_timeout")[0] == "0"


def test_an_expired_lease_goes_to_the_next_with_a_larger_token(
    one: Caller, other: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """C077, C078: the former holder can neither renew, release nor reacquire it by its id, and the row is unchanged."""
    one.acquire()
    lapse(admin, name)
    assert other.acquire(owner="me").token == 2
    before = other.row[:-2]
    assert one.renew() == ["lost", "superseded"]
    assert one.renew(token=2) == ["lost", "superseded"]
    assert one.renew(lease=other.lease) == ["lost", "superseded"]
    assert [one.release(), one.release(token=2), one.release(lease=other.lease)] == ["superseded"] * 3
    assert not one.forget()
    assert one.adopt(one.lease, 2, str(uuid4())).outcome == "superseded"
    assert other.row[:-2] == before


def test_an_expired_lease_cannot_be_renewed(one: Caller, admin: psycopg.Connection[Any], name: str) -> None:
    """C083: an expired lease is lost even if no other caller took it; its release frees it and returns that it had expired."""
    one.acquire()
    lapse(admin, name)
    assert one.renew() == ["lost", "expired"]
    assert one.adopt(one.lease, 1).outcome == "expired"
    assert one.release() == "expired"
    assert one.release() == "superseded"
    assert one.acquire().token == 2


def test_a_released_row_stays_and_its_token_counts_on(one: Caller, other: Caller) -> None:
    """C079: five times acquired and released: the sixth token is 6."""
    for token in range(1, 6):
        assert one.acquire().token == token
        assert one.release() == "released"
    assert one.row.token == 5
    assert other.acquire().token == 6


def test_a_deleted_row_starts_above_its_gate(one: Caller, admin: psycopg.Connection[Any], name: str) -> None:
    """C079, C080: after the row was deleted or set back, no token that a writer has shown is issued again."""
    for _ in range(3):
        one.acquire()
        one.release()
    one.enter(3)
    admin.execute("DELETE FROM pgfence_lease WHERE name = %s", [name])
    assert one.acquire().token == 4
    one.enter(4)
    one.release()
    admin.execute("UPDATE pgfence_lease SET token = 1 WHERE name = %s", [name])
    assert one.acquire().token == 5


def test_the_statement_of_the_page_raises_tokens_above_those_that_were_issued(
    one: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """C080: an old copy of the tables issues tokens again, unless the documented statement has raised them."""
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "leases-and-fencing.md").read_text(encoding="utf-8")
    (statement,) = re.findall(r"`(UPDATE pgfence_lease SET token [^`]*)`", page)
    issued = []
    for _ in range(3):
        issued.append(one.acquire().token)
        one.release()
    admin.execute("UPDATE pgfence_lease SET token = 1 WHERE name = %s", [name])
    admin.execute(f"{statement} WHERE name = %s", [name])
    assert one.acquire().token > max(issued)


def test_released_early_it_stays_closed_for_min_hold(
    one: Caller, other: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """C088: a short job does not run twice on skewed clocks; the clock decides when the time is over."""
    one.acquire(60, min_hold=50)
    assert one.release() == "released"
    found = other.acquire()
    assert not found.granted
    assert 49 < found.remaining <= 50
    lapse(admin, name, 50)
    assert other.acquire().token == 2


def test_a_shorter_renewal_does_not_end_before_min_hold(
    one: Caller, other: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """C088: a lease that expires after a renewal shorter than the rest of min_hold is not free before min_hold."""
    one.acquire(60, min_hold=50)
    assert one.renew(5)[0] == "ok"
    lapse(admin, name, 20)
    assert one.renew() == ["lost", "expired"]
    assert 29 < other.acquire().remaining <= 30


def test_lock_delay_counts_after_an_expiry_only(
    one: Caller, other: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """A release in time frees the name at once; after an expiry the delay applies, even to a late release."""
    one.acquire(60, lock_delay=30)
    assert one.release() == "released"
    assert other.acquire(60, lock_delay=30).granted
    lapse(admin, name, 70)
    assert other.release() == "expired"
    found = one.acquire()
    assert not found.granted
    assert 19 < found.remaining <= 20


def test_max_hold_ends_every_renewal(one: Caller, admin: psycopg.Connection[Any], name: str) -> None:
    """C083: renewed up to max_hold and not beyond; then it is overdue."""
    assert one.acquire(60, max_hold=90).hold_remaining == 90
    lapse(admin, name, 40)
    answer, _, left = one.renew(60)
    assert answer == "ok"
    assert 49 < left <= 50
    lapse(admin, name, 50)
    assert one.renew() == ["lost", "overdue"]
    assert one.adopt(one.lease, 1).outcome == "overdue"
    assert one.release() == "overdue"


def test_a_clock_set_back_does_not_keep_a_free_lease_closed(
    one: Caller, other: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """C073: a lease that was released, forgotten or evicted at a time now in the future is free."""
    for end in (one.release, one.forget, one.evict):
        assert one.acquire(lock_delay=10).granted
        assert end()
        lapse(admin, name, -3600)
        assert other.acquire().granted
        assert other.release() == "released"


def test_a_batch_of_renewals_returns_one_result_for_each(
    one: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """One that is locked, lost, unknown or listed twice does not delay or harm the others; order is kept."""
    leases = []
    for number in range(4):
        one.name = f"{name} {number}"
        one.acquire()
        leases.append((one.name, one.lease, one.token, 60.0 + number))
    lapse(admin, f"{name} 2")
    asked = [*leases, ("no such", one.lease, 1, 60.0), leases[0]]
    with row_locked(admin, f"{name} 1"):
        answers = one.renew_all(asked)
    assert [answer[0] for answer in answers] == ["ok", "busy", "lost", "ok", "lost", "ok"]
    assert (answers[2][1], answers[4][1]) == ("expired", "superseded")
    assert [round(answers[n][2]) for n in (0, 3)] == [60, 63]
    assert one.renew_all([]) == []


def test_a_grant_whose_response_is_lost_is_ended_by_its_id(one: Caller, other: Caller) -> None:
    """C084: forgetting frees the lease at once, despite min_hold; a second call or another id changes nothing."""
    one.acquire(min_hold=50)
    assert not other.forget()
    assert one.forget()
    assert not one.forget()
    assert other.acquire().token == 2


def test_a_grant_that_is_not_committed_yet_is_found_and_ended(one: Caller, other: Caller) -> None:
    """C084: the connection was cut while the server was still about to commit: forgetting waits for that."""
    one.acquire()
    one.release()
    new = str(uuid4())
    with ThreadPoolExecutor(1) as pool:
        with one.connection.transaction():
            assert one.acquire(lease=new).granted
            forgetting = pool.submit(other.forget, new)
            eventually(blocks(one.connection, other))
        assert forgetting.result(5)
    assert one.renew(lease=new) == ["lost", "superseded"]


def test_a_reference_works_once(one: Caller, other: Caller) -> None:
    """An adoption keeps the token and an owner that is not given, changes the id, and ends the previous holder's claim."""
    one.acquire(60, max_hold=300)
    found = other.adopt(one.lease, one.token)
    assert (found.outcome, found.remaining, found.ttl, found.purpose) == ("ok", 60, 60, "a purpose")
    assert 299 < found.hold_remaining <= 300
    row = other.row
    assert (str(row.lease_id), row.token, row.owner, row.host, row.pid) == (other.lease, 1, "me", "there", 8)
    assert other.adopt(one.lease, one.token).outcome == "ok", "asked again after a lost answer"
    assert other.adopt(one.lease, one.token, str(uuid4())).outcome == "superseded"
    assert one.renew() == ["lost", "superseded"]
    assert one.release() == "superseded"
    assert other.release(token=1) == "released"


def test_an_eviction_ends_the_lease_and_shuts_the_gate(one: Caller, other: Caller) -> None:
    """C045: row, gate and audit change in one transaction; the holder reads "evicted", and the next grant has a larger token."""
    assert other.evict() is None
    one.acquire()
    one.enter(1)
    assert other.evict("it hangs")[:] == (1, 2)
    assert (one.row.token, one.gate) == (2, 2)
    assert one.renew() == ["lost", "evicted"]
    assert one.adopt(one.lease, 1).outcome == one.release() == "evicted"
    with pytest.raises(psycopg.Error) as refused:
        one.enter(1)
    assert refused.value.sqlstate == "PF001"
    audit = one.one("SELECT action, actor, reason, detail FROM pgfence_audit WHERE resource = %s", one.name)
    assert audit[:] == ("evict", "an operator", "it hangs", {"ticket": 5})
    assert other.acquire().token == 3
    assert one.renew() == ["lost", "evicted"]


def test_an_eviction_is_all_or_nothing(one: Caller, other: Caller) -> None:
    """An eviction that is rolled back has raised no token, shut no gate and written no line."""
    one.acquire()
    with other.connection.transaction(force_rollback=True):
        other.evict()
    assert (one.row.token, one.gate) == (1, None)
    assert one.one("SELECT count(*) FROM pgfence_audit WHERE resource = %s", one.name)[0] == 0
    assert one.renew()[0] == "ok"


def test_every_end_is_reported_to_end_callbacks(one: Caller, other: Caller) -> None:
    """C085: release, forget and evict each notify with the name; nothing else does."""
    other.connection.execute("LISTEN pgfence_released")
    for end in (one.release, one.forget, one.evict):
        one.acquire()
        one.renew()
        end()
        told = [n.payload for n in other.connection.notifies(timeout=5, stop_after=1) if n.payload == one.name]
        assert told == [one.name]


@pytest.mark.parametrize("level", LEVELS)
def test_many_at_once_are_one_holder_with_a_new_token(dsn: str, name: str, level: str) -> None:
    """C073: in 20 rounds of 6 sessions, each round has at most one grant, and no token is issued twice."""
    callers = [Caller(dsn, name) for _ in range(6)]
    tokens: list[int] = []
    for caller in callers:
        caller.connection.execute(f"SET default_transaction_isolation = '{level}'")
    try:
        for _ in range(20):
            granted = _race(callers)
            assert len(granted) == 1
            tokens.append(granted[0].token)
            assert granted[0].release() == "released"
            for caller in callers:
                caller.lease = str(uuid4())
    finally:
        for caller in callers:
            caller.connection.close()
    assert tokens == sorted(set(tokens))


def _race(callers: list[Caller]) -> list[Caller]:
    def ask(caller: Caller) -> bool:
        for _ in range(10):
            try:
                return bool(caller.acquire().granted)
            except psycopg.errors.SerializationFailure:
                continue
        return False

    with ThreadPoolExecutor(len(callers)) as pool:
        return [caller for caller, got in zip(callers, pool.map(ask, callers), strict=True) if got]


def test_a_lease_and_a_session_lock_are_never_granted_at_once(dsn: str, name: str) -> None:
    """Six processes try both in turn: each grant is exclusive until it is released, and has a new token."""
    inside: list[int] = []
    granted: list[tuple[bool, int]] = []

    def contend(number: int) -> None:
        with Caller(dsn, name) as caller:
            for turn in range(60):
                lease, by_lease = str(uuid4()), (number + turn) % 2 == 0
                token = caller.acquire(lease=lease) if by_lease else caller.lock(KEY)
                if by_lease:
                    token = token.token if token.granted else None
                if token is None:
                    continue
                inside.append(number)
                assert inside == [number], "two hold the name"
                granted.append((by_lease, token))
                inside.remove(number)
                if by_lease:
                    assert caller.release(lease=lease, token=token) == "released"
                else:
                    caller.one("SELECT pg_advisory_unlock_all()")

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(contend, number) for number in range(6)]:
            future.result()
    tokens = [token for _, token in granted]
    assert tokens == sorted(set(tokens))
    assert {by_lease for by_lease, _ in granted} == {True, False}


STEP = 1 << 32


@every_row(("before", "here", "steps"), [(1, 1, 0), (1, 2, 1), (1, 4, 3), (3, 4, 1), (9, 9, 0), (4, 1, 1), (9, 2, 2)])
@every_row("token", [0, 7, 5 * STEP + 3])
def test_a_token_jumps_by_the_timelines_in_between(
    admin: psycopg.Connection[Any], before: int, here: int, steps: int, token: int
) -> None:
    """A token does not jump within a timeline, and by 2^32 for each newer one; a new cluster counts its own from 1."""
    assert value(admin, NEXT, token, before, here) == token + steps * STEP + 1


def test_two_million_timelines_leave_a_token_exact_in_json(admin: psycopg.Connection[Any]) -> None:
    """A client that reads numbers as doubles is exact below 2^53; a bigint lasts for every timeline that there can be."""
    last = value(admin, NEXT, STEP - 2, 1, 2**21)
    assert last == 2**53 - 1 == int(float(last))
    assert value(admin, NEXT, STEP - 2, 1, 2**31 - 1) < 2**63
