"""The server crashes right after it granted a token: it never grants a token twice, for any synchronous_commit."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
from sqlalchemy import create_engine

from pgfence import schema
from support.lease_functions import Caller
from support.servers import own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.servers import OwnServer

KEY = 5_000_000_001
FORGETFUL = {"synchronous_commit": "off", "wal_writer_delay": "10000", "autovacuum": "off"}
"""What is committed is on disk only if somebody insists."""


@pytest.fixture(scope="module")
def forgetful() -> Iterator[OwnServer]:
    """A server with our tables that loses in a crash what it may lose."""
    server: OwnServer
    with own(fsync=True, settings=FORGETFUL) as server:
        engine = create_engine(server.url)
        schema.create_all(engine)
        engine.dispose()
        yield server


@pytest.fixture
def reach(forgetful: OwnServer, name: str) -> Iterator[Callable[[], Caller]]:
    """A function that returns a new caller of this test's name."""
    callers: list[Caller] = []

    def connected() -> Caller:
        callers.append(Caller(forgetful.dsn, name))
        return callers[-1]

    with Caller(forgetful.dsn, name) as settled:
        settled.connection.execute("CHECKPOINT")
    yield connected
    for caller in callers:
        caller.connection.close()


def crash(server: OwnServer) -> None:
    server.restart("immediate")


def test_this_server_loses_unsynced_commits_in_a_crash(reach: Callable[[], Caller], forgetful: OwnServer) -> None:
    """With synchronous_commit=off a plain commit is lost in a crash: otherwise the tests here would prove nothing."""
    one = reach()
    one.connection.execute("INSERT INTO pgfence_checkpoint VALUES (%s, 1, NULL, now())", [one.name])
    crash(forgetful)
    assert reach().one("SELECT FROM pgfence_checkpoint WHERE name = %s", one.name) is None


@pytest.mark.parametrize("before", [0, 3])
def test_an_acquired_token_is_not_given_again_after_a_crash(
    reach: Callable[[], Caller], forgetful: OwnServer, before: int
) -> None:
    """C080: the very first token of a name, and a later one."""
    one = reach()
    for _ in range(before):
        one.acquire()
        one.release()
    token = one.acquire().token
    crash(forgetful)
    other = reach()
    assert not other.acquire().granted
    assert other.row.token == token == before + 1
    other.forget(one.lease)
    assert other.acquire().token > token


@pytest.mark.parametrize("before", [0, 3])
def test_a_token_of_an_advisory_lock_is_not_given_again_after_a_crash(
    reach: Callable[[], Caller], forgetful: OwnServer, before: int
) -> None:
    """C080: the lock dies with the server, its token does not come back; with a wait and without one."""
    one = reach()
    for _ in range(before):
        assert one.lock(KEY)
        one.connection.execute("SELECT pg_advisory_unlock_all()")
    token = one.lock(KEY, 1000 if before else 0)
    crash(forgetful)
    assert reach().lock(KEY) == before + 2 == (token or 0) + 1


def test_an_eviction_is_not_forgotten_in_a_crash(reach: Callable[[], Caller], forgetful: OwnServer) -> None:
    """C080: row, gate and audit are there afterwards, and the next token is above the one that the eviction gave."""
    one = reach()
    one.acquire()
    one.connection.execute("CHECKPOINT")
    ended = reach().evict()
    crash(forgetful)
    other = reach()
    assert (other.row.token, other.gate) == (ended.newest, ended.newest) == (2, 2)
    assert other.one("SELECT count(*) FROM pgfence_audit WHERE resource = %s", other.name)[0] == 1
    assert other.renew(lease=one.lease, token=1) == ["lost", "evicted"]
    assert other.acquire().token == 3


def test_what_a_holder_trusts_is_not_forgotten_in_a_crash(reach: Callable[[], Caller], forgetful: OwnServer) -> None:
    """C082: a confirmed renewal or adoption survives a crash, so no other caller is granted before its end."""
    one, new = reach(), str(uuid4())
    one.acquire(5)
    one.connection.execute("CHECKPOINT")
    assert one.renew(600)[0] == "ok"
    crash(forgetful)
    other = reach()
    assert other.row.left > 500
    assert other.adopt(one.lease, 1, new).outcome == "ok"
    crash(forgetful)
    assert reach().renew(lease=new, token=1)[0] == "ok"


def test_a_release_may_be_forgotten_and_nothing_breaks(reach: Callable[[], Caller], forgetful: OwnServer) -> None:
    """C080: a crash may restore a released lease until it expires, with its token; the next grant has a larger one."""
    one = reach()
    one.acquire()
    assert one.release() == "released"
    crash(forgetful)
    other = reach()
    assert not other.acquire().granted
    assert other.release(lease=one.lease, token=1) == "released"
    assert other.acquire().token == 2
