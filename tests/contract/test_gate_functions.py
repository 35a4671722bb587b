"""The SQL functions of gates and of advisory locks with tokens keep the order of tokens."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from support.fences import forged
from support.installations import TableNames, build_creation, build_removal
from support.lease_functions import Caller
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("tables")

KEY = 5_000_000_002


@pytest.fixture
def one(dsn: str, name: str) -> Iterator[Caller]:
    """A writer with a token."""
    with Caller(dsn, name) as caller:
        yield caller


@pytest.fixture
def other(dsn: str, name: str) -> Iterator[Caller]:
    """A writer with another token."""
    with Caller(dsn, name) as caller:
        yield caller


def waits(admin: psycopg.Connection[Any], caller: Caller) -> bool:
    row = admin.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [caller.pid]).fetchone()
    return row is not None and row[0]


def check(caller: Caller) -> str:
    """Return the SQLSTATE with which a write to a guarded table is rejected; "" if it is not."""
    try:
        caller.one("SELECT pgfence_check_gate_v1(%s, 'accounts')", caller.name)
    except psycopg.Error as error:
        return error.sqlstate or "?"
    return ""


def refusal(caller: Caller, token: int) -> tuple[str | None, str | None]:
    """Return SQLSTATE and detail of an entry that is rejected."""
    with pytest.raises(psycopg.Error) as refused:
        caller.enter(token)
    return refused.value.sqlstate, refused.value.diag.message_detail


def test_the_gate_stores_the_newest_token_that_entered(one: Caller) -> None:
    """Without a lease of that name any token from 1 on may come, and none that is older than the newest."""
    for token in (1, 1, 7):
        one.enter(token)
        assert one.gate == token
    state, detail = refusal(one, 6)
    assert state == "PF001"
    assert detail == f'{{"resource" : "{one.name}", "token" : 6, "newest" : 7}}'
    assert one.gate == 7


def test_a_token_that_is_not_the_leases_is_rejected(one: Caller) -> None:
    """C080: neither an older one, though its holder's successor has not written yet, nor one that was never issued."""
    one.acquire()
    one.release()
    one.acquire()
    assert refusal(one, 1)[0] == "PF001"
    assert refusal(one, 3)[0] == "PF001"
    assert one.gate is None
    one.enter(2)


@pytest.mark.parametrize("token", [0, -1, None])
def test_a_token_below_one_is_an_error(one: Caller, token: Any) -> None:
    """A token that is zero, negative or NULL raises 22023, and no gate is created."""
    assert refusal(one, token)[0] == "22023"
    assert one.gate is None


@pytest.mark.parametrize("tokens", [[1], [1, 1, 1]])
def test_lists_of_different_length_are_an_error(one: Caller, tokens: list[int]) -> None:
    """A resource without a token, or a token without a resource, is an error."""
    with pytest.raises(psycopg.Error) as refused:
        one.one("SELECT pgfence_enter_gates_v1(%s::text[], %s::bigint[])", [one.name, f"{one.name} 2"], tokens)
    assert refused.value.sqlstate in {"22023", "23502"}


def test_writers_with_one_token_are_inside_together(one: Caller, other: Caller) -> None:
    """Two transactions with the same token do not wait for each other; both pass the guard of a table."""
    one.enter(3)
    with one.connection.transaction(), other.connection.transaction():
        one.enter(3)
        other.enter(3)
        assert check(one) == check(other) == ""


@pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])
def test_a_new_holder_waits_for_writers_inside_and_blocks_others(
    one: Caller, other: Caller, admin: psycopg.Connection[Any], level: str
) -> None:
    """C100: it enters after the old writer's commit; the old one's next transaction is rejected, committed or not yet."""
    one.enter(1)
    for caller in (one, other):
        caller.connection.execute(f"SET default_transaction_isolation = '{level}'")
    with ThreadPoolExecutor(1) as pool:
        with one.connection.transaction():
            one.enter(1)
            waiting = pool.submit(other.enter, 2)
            eventually(lambda: waits(admin, other))
            assert check(one) == ""
        waiting.result(5)
        with other.connection.transaction():
            other.enter(2)
            entering = pool.submit(refusal, one, 1)
            eventually(lambda: waits(admin, one) or entering.done())
        assert entering.result(5)[0] == "PF001"


def test_two_that_wait_together_and_are_too_late_are_both_rejected(
    one: Caller, other: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """C077: the gate was raised above both while they waited with one token: no deadlock between the two."""
    one.enter(1)
    with ThreadPoolExecutor(2) as pool:
        with admin.transaction():
            admin.execute("UPDATE pgfence_gate SET token = 2 WHERE resource = %s", [name])
            late = [pool.submit(refusal, caller, 1) for caller in (one, other)]
            eventually(lambda: waits(admin, one) and waits(admin, other))
        assert [entering.result(5)[0] for entering in late] == ["PF001", "PF001"]


def test_a_waiter_at_the_gate_sees_a_newer_lease(one: Caller, other: Caller, admin: psycopg.Connection[Any]) -> None:
    """C077: while it waited a newer holder got the lease: it is rejected, although the newer one has not entered."""
    one.enter(1)
    one.acquire()
    assert one.token == 2
    with ThreadPoolExecutor(1) as pool:
        with other.connection.transaction():
            other.one("SELECT FROM pgfence_gate WHERE resource = %s FOR UPDATE", other.name)
            entering = pool.submit(refusal, one, 2)
            eventually(lambda: waits(admin, one))
            admin.execute("UPDATE pgfence_lease SET token = 3 WHERE name = %s", [one.name])
        assert entering.result(5)[0] == "PF001"


def test_a_writer_in_the_gate_may_finish_after_the_lease_moved_on(one: Caller, other: Caller) -> None:
    """The next holder has a token and waits at the gate; what was entered before may be finished."""
    one.acquire()
    with one.connection.transaction():
        one.enter(1)
        other.acquire(lease=one.lease)
        other.release(lease=one.lease)
        other.acquire()
        assert other.token == 2
        assert check(one) == ""
    assert refusal(one, 1)[0] == "PF001"


def test_a_fenced_table_rejects_a_write_without_a_token(one: Caller) -> None:
    """PF002 outside of a transaction that entered, after it, and after a savepoint that took the entry with it."""
    assert check(one) == "PF002"
    with one.connection.transaction():
        one.enter(1)
        assert check(one) == ""
    assert check(one) == "PF002"
    with one.connection.transaction(), pytest.raises(psycopg.Error) as refused:
        with one.connection.transaction(force_rollback=True):
            one.enter(1)
        one.one("SELECT pgfence_check_gate_v1(%s, 'accounts')", one.name)
    assert refused.value.sqlstate == "PF002"


@pytest.mark.parametrize(("token", "state"), [("1", "PF001"), ("2", ""), ("3", "PF001"), ("x", "22P02"), ("", "PF002")])
def test_a_forged_setting_proves_nothing(one: Caller, token: str, state: str) -> None:
    """A forged setting is checked like the token of a gate that was entered."""
    for _ in range(2):
        one.acquire()
        one.release()
    one.enter(2)
    one.one(f"SELECT {forged(one.name, token, stays=True)}")
    assert check(one) == state


def test_the_settings_of_a_session_do_not_grow_with_its_gates(one: Caller) -> None:
    """PostgreSQL forgets no setting's name: after 2,000 gates there are at most 256, and none of them lists a past claim."""
    gates = [f"{one.name}:{number}" for number in range(2_000)]
    for few in (gates[:1_000], gates[1_000:]):
        one.call("enter_gates_v1", few, [1] * len(few))
    names = "SELECT count(current_setting('pgfence.f' || left(md5('pgfence_gate'::regclass::oid::text || ' ' || g), {}), true)) FROM unnest(%s::text[]) AS g"
    assert one.one(names.format(32), gates).count == 0
    values = (
        "SELECT count(value) > 0 AS some, COALESCE(max(value), '') AS most FROM generate_series(0, 255) AS n,"
        " current_setting('pgfence.f' || lpad(to_hex(n), 2, '0'), true) AS value"
    )
    assert one.one(values) == (True, "")


def test_claims_that_share_a_setting_are_distinguished(one: Caller, other: Caller) -> None:
    """Each of three gates that share a setting is checked by its own token, also after a rollback to a savepoint."""
    gate = one.one("SELECT 'pgfence_gate'::regclass::oid AS oid").oid
    alike = [one.name, *(f"{one.name}:{n}" for n in range(2_000))]
    numbers = [hashlib.md5(f"{gate} {name}".encode(), usedforsecurity=False).hexdigest()[:2] for name in alike]
    names = [name for name, number in zip(alike, numbers, strict=True) if number == numbers[0]][:3]
    with one.connection.transaction():
        for name, token in zip(names[:2], (1, 2), strict=True):
            one.call("enter_gate_v1", name, token)
        with one.connection.transaction(force_rollback=True):
            one.call("enter_gate_v1", names[2], 3)
            one.call("enter_gate_v1", names[0], 1)
            for name in names:
                one.call("check_gate_v1", name, "accounts")
        for name in names[:2]:
            one.call("check_gate_v1", name, "accounts")
        with pytest.raises(psycopg.Error) as refused, one.connection.transaction():
            one.call("check_gate_v1", names[2], "accounts")
        assert refused.value.sqlstate == "PF002"
        assert [other.one("SELECT token FROM pgfence_gate WHERE resource = %s", name) for name in names] == [None] * 3
    assert [one.one("SELECT max(token) FROM pgfence_gate WHERE resource = %s", name).max for name in names] == [
        1,
        2,
        None,
    ]


def test_a_checkpoint_needs_the_newest_token_and_is_the_next_holders(one: Caller, other: Caller) -> None:
    """C100: the data of a stale holder is rejected; the row of the lease is not locked for it."""
    one.acquire()
    with one.connection.transaction():
        one.call("save_checkpoint_v1", one.name, 1, '{"page": 7}')
        assert other.renew(lease=one.lease, token=1)[0] == "ok"
    one.release()
    assert other.acquire().checkpoint == '{"page": 7}'
    with pytest.raises(psycopg.Error) as refused:
        one.call("save_checkpoint_v1", one.name, 1, '{"page": 8}')
    assert refused.value.sqlstate == "PF001"
    other.release()
    assert one.acquire().checkpoint == '{"page": 7}'


@pytest.mark.parametrize("wait", [0, 2000])
def test_a_lock_is_held_exactly_if_a_token_is_returned(one: Caller, other: Caller, wait: int) -> None:
    """If the lock is held elsewhere, no token is used and no lock is kept; otherwise the session holds it."""
    assert one.lock(KEY, wait) == 1
    assert other.lock(KEY, min(wait, 50)) is None
    assert other.one("SELECT count(*) FROM pg_locks WHERE pid = %s AND locktype = 'advisory'", other.pid)[0] == 0
    assert one.row.token == 1
    assert one.one("SELECT pg_advisory_unlock(%s)", KEY)[0]
    assert other.lock(KEY, wait) == 2
    assert other.one("SELECT pg_advisory_unlock(%s)", KEY)[0]


def test_the_token_of_a_waiter_is_drawn_after_the_wait(
    one: Caller, other: Caller, admin: psycopg.Connection[Any]
) -> None:
    """The order of tokens is the order of holders: a token that others drew meanwhile is not drawn again."""
    one.lock(KEY)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.lock, KEY, 5000)
        eventually(lambda: waits(admin, other))
        admin.execute("UPDATE pgfence_lease SET token = 40 WHERE name = %s", [one.name])
        one.one("SELECT pg_advisory_unlock(%s)", KEY)
        assert waiting.result(5) == 41
    other.one("SELECT pg_advisory_unlock(%s)", KEY)


def test_a_lock_with_a_token_is_busy_while_a_lease_is_held(one: Caller, other: Caller) -> None:
    """Busy while a lease of that name is held, and no lock is kept; afterwards above its token, and the lease is busy."""
    one.acquire()
    assert other.lock(KEY) is None
    assert one.renew()[0] == "ok"
    one.release()
    assert other.lock(KEY) == 2
    assert not one.acquire().granted
    other.one("SELECT pg_advisory_unlock(%s)", KEY)
    assert one.acquire().token == 3


def test_a_lock_ends_an_expired_lease_for_good(
    one: Caller, other: Caller, admin: psycopg.Connection[Any], name: str
) -> None:
    """C073: the clock is set back after the lock was acquired: the former holder of the lease does not get its token."""
    one.acquire()
    admin.execute(
        "UPDATE pgfence_lease SET expires_at = now() - interval '1 s', free_at = 'epoch' WHERE name = %s", [name]
    )
    assert other.lock(KEY) == 2
    admin.execute("UPDATE pgfence_lease SET expires_at = now() + interval '1 h' WHERE name = %s", [name])
    assert one.renew() == ["lost", "superseded"]
    other.one("SELECT pg_advisory_unlock(%s)", KEY)
    assert one.acquire().token == 3


def test_another_server_process_than_the_one_named_takes_no_lock(one: Caller) -> None:
    """C021: if a pooler passes the statement to another session, the result is -1, without a lock or a row."""
    assert one.lock(KEY, backend=one.pid + 1) == -1
    assert one.row is None


@pytest.mark.parametrize("place", [TableNames('o\'x "y"', "it's_"), TableNames("100 %s $1", "a\\b_")])
def test_any_name_of_schema_and_prefix_is_quoted(one: Caller, place: TableNames) -> None:
    """With quotes, parameter markers and backslashes in the names, the functions work, and the hint can be copied."""
    for statement in build_creation(place):
        one.connection.execute(statement.encode())
    try:
        with pytest.raises(psycopg.Error) as refused:
            one.connection.execute(f"SELECT {place.name('check_gate_v1')}('r', 't')".encode())
        assert f"{place.name('enter_gate_v1')}(resource, token)" in (refused.value.diag.message_hint or "")
        one.connection.execute(f"SELECT {place.name('enter_gate_v1')}('r', 1)".encode())
    finally:
        for statement in (*build_removal(place), f"DROP SCHEMA {place.name('').rpartition('.')[0]}"):
            one.connection.execute(statement.encode())
