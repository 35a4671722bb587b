"""A server without the last commits of its predecessor: a promoted standby, a restore. It issues none of its tokens again."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence import schema
from support import standby as standbys
from support.lease_functions import Caller
from support.servers import own
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.servers import OwnServer

KEY = 5_000_000_002
STEP = 1 << 32


@pytest.fixture
def primary() -> Iterator[OwnServer]:
    """A server with our tables."""
    server: OwnServer
    with own() as server:
        engine = create_engine(server.url)
        schema.create_all(engine)
        engine.dispose()
        yield server


@pytest.fixture
def caller() -> Iterator[Callable[[OwnServer, str], Caller]]:
    """A function that returns a caller of a name on a server."""
    with ExitStack() as stack:
        yield lambda server, name: stack.enter_context(Caller(server.dsn, name))


def issued(one: Caller, how: str) -> int:
    """Issue a token, and leave the name free."""
    if how == "lock":
        token = one.lock(KEY)
        assert token is not None
        one.one("SELECT pg_advisory_unlock_all()")
        return token
    if how == "evict":
        return int(one.evict().newest)
    found = one.acquire()
    assert found.granted
    assert one.release() == "released"
    return int(found.token)


def admits(one: Caller, token: int) -> bool:
    """Say whether a writer with a token may commit, without leaving a trace."""
    state = None
    with suppress(psycopg.Error), one.connection.transaction(force_rollback=True):
        try:
            one.enter(token)
        except psycopg.Error as error:
            state = error.sqlstate
            raise
    assert state in (None, "PF001")
    return state is None


HOW = ("acquire", "lock", "evict")


def test_no_token_is_issued_twice_across_an_asynchronous_failover(
    primary: OwnServer, caller: Callable[[OwnServer, str], Caller]
) -> None:
    """C080: the old primary issued tokens that were not replicated: the new one issues none of them, and its fence admits none."""
    with standbys.standby(primary) as copy:
        for how in HOW:
            assert issued(caller(primary, how), "acquire") == 1
        copy.stop_following(primary)
        lost = {how: [issued(caller(primary, how), how) for _ in range(3)] for how in HOW}
        lost["fresh"] = [issued(caller(primary, "fresh"), "acquire")]
        assert lost == {"acquire": [2, 3, 4], "lock": [2, 3, 4], "evict": [2, 3, 4], "fresh": [1]}
        primary.stop("immediate")
        copy.promote()
        for how, tokens in lost.items():
            one = caller(copy, how)
            new = issued(one, how if how in HOW else "acquire")
            assert new == STEP + (1 if how == "fresh" else 2)
            assert [admits(one, token) for token in tokens] == [False] * len(tokens)
            assert admits(one, new)
            assert issued(one, "acquire") == new + 1


def test_a_lease_that_was_replicated_is_held_across_a_failover(
    primary: OwnServer, caller: Callable[[OwnServer, str], Caller]
) -> None:
    """It is renewed under its token, asked for again it is the same grant, and only the next grant is on the new timeline."""
    with standbys.standby(primary) as copy:
        before = caller(primary, "held")
        assert before.acquire().token == 1
        copy.stop_following(primary)
        primary.stop("immediate")
        copy.promote()
        one = caller(copy, "held")
        one.lease, one.token = before.lease, before.token
        assert one.renew()[0] == "ok"
        assert (one.acquire().granted, one.token) == (True, 1)
        assert admits(one, 1)
        assert one.release() == "released"
        assert issued(one, "acquire") == STEP + 2


def test_no_token_is_issued_twice_after_a_restore(
    primary: OwnServer, caller: Callable[[OwnServer, str], Caller]
) -> None:
    """C080: restored to a point in time, a server continues above everything that was issued after that moment."""
    for how in HOW:
        assert issued(caller(primary, how), "acquire") == 1
    with standbys.restored(primary) as restored:
        lost = {how: issued(caller(primary, how), how) for how in HOW}
        with psycopg.connect(restored.dsn, autocommit=True) as connection:
            blocking(lambda: connection.execute("SELECT pg_is_in_recovery()").fetchone() == (False,), 30)
        for how, token in lost.items():
            one = caller(restored, how)
            assert issued(one, how) == STEP + 2 > token
            assert not admits(one, token)
