"""The server's clock is set back or forward while a lease is held, expired or free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine

from pgfence import AdvisoryLock, IdempotencyInProgressError, IdempotentEffect, Lease, LockLostError
from pgfence.config import configure
from support.lease_functions import Caller, install_with_clock
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

HOUR = 3600.0
TTL = 30.0


class Clock:
    """The clock of one installation, which a test can set."""

    def __init__(self, admin: psycopg.Connection[Any], schema: str) -> None:
        self._admin = admin
        self._table = sql.Identifier(schema, "ahead")

    def set(self, ahead: float) -> None:
        """Set the clock a number of seconds ahead of the real time."""
        self._admin.execute(sql.SQL("UPDATE {} SET seconds = {}").format(self._table, ahead))


@pytest.fixture
def schema(admin: psycopg.Connection[Any], name: str) -> Iterator[str]:
    """Tables and functions in a separate schema that read the clock of the test."""
    schema = f"clock_{name[-12:]}"
    admin.execute(f"CREATE SCHEMA {schema}".encode())
    admin.execute(f"CREATE TABLE {schema}.ahead AS SELECT 0::float8 AS seconds".encode())
    admin.execute(
        f"CREATE FUNCTION {schema}.clock() RETURNS timestamptz LANGUAGE sql VOLATILE AS"
        f" $$ SELECT clock_timestamp() + make_interval(secs => seconds) FROM {schema}.ahead $$".encode()
    )
    install_with_clock(admin, schema, f"{schema}.clock()")
    yield schema
    admin.execute(f"DROP SCHEMA {schema} CASCADE".encode())


@pytest.fixture
def clock(admin: psycopg.Connection[Any], schema: str) -> Clock:
    """The clock of that installation."""
    return Clock(admin, schema)


@pytest.fixture
def rival(dsn: str, name: str, schema: str) -> Iterator[Caller]:
    """Another process that wants the lease of this test, by the server functions alone."""
    with Caller(dsn, name, f"{schema}.pgfence_") as caller:
        yield caller


@pytest.fixture
def engine(dsn: str, schema: str) -> Iterator[Engine]:
    """An engine on that installation."""
    made = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    configure(made, schema=schema)
    yield made
    made.dispose()


@pytest.mark.parametrize("kind", ["lease", "session lock"])
def test_a_dead_holder_blocks_for_one_ttl_after_the_clock_was_set_back(
    engine: Engine, clock: Clock, rival: Caller, name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C073: granted by a clock that was an hour ahead, a lease whose holder died is free one TTL after the first question."""
    wanted = Lease(engine, name, ttl=TTL) if kind == "lease" else AdvisoryLock(engine, name, token=True)
    clock.set(HOUR)
    rival.acquire(TTL, lock_delay=5)
    clock.set(0)
    assert wanted.try_acquire() is None
    assert 0 < rival.row.blocked <= TTL + 5
    if kind == "lease":
        assert "set back by 3600 s or more while the lease" in caplog.text
    clock.set(TTL - 1)
    assert wanted.try_acquire() is None
    clock.set(TTL + 6)
    with wanted.hold(timeout=0) as held:
        assert held.token == 2


def test_a_lease_released_between_two_steps_back_is_free(engine: Engine, clock: Clock, name: str) -> None:
    """Acquired by a clock two hours ahead and released by one an hour ahead, it does not block the name for an hour."""
    clock.set(2 * HOUR)
    held = Lease(engine, name, ttl=TTL).acquire()
    clock.set(HOUR)
    held.release()
    clock.set(0)
    with Lease(engine, name, ttl=TTL).hold(timeout=0) as again:
        assert again.token == 2


def test_a_holder_keeps_its_lease_when_the_clock_is_set_back(
    engine: Engine, clock: Clock, rival: Caller, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease is renewed and kept, the log mentions the clock, and max_hold and min_hold end when expected."""
    clock.set(HOUR)
    lease = Lease(engine, name, ttl=TTL, max_hold=100, min_hold=20)
    held = lease.acquire()
    clock.set(0)
    assert not rival.acquire().granted
    held.renew()
    assert (held.state, rival.acquire().granted) == ("held", False)
    assert f"set back by 3600 s or more while the lease {name!r} was held" in caplog.text
    assert (rival.row.hold_until - rival.row.renewed_at).total_seconds() <= 100
    held.release()
    assert 0 < rival.row.blocked <= 20
    clock.set(20)
    assert rival.acquire().granted


def test_a_released_lease_is_free_when_the_clock_is_set_back(
    engine: Engine, clock: Clock, rival: Caller, name: str
) -> None:
    """A release by a clock that was ahead counts at once, and a min_hold lasts as long as was left of it."""
    lease = Lease(engine, name, ttl=TTL)
    clock.set(HOUR)
    lease.acquire().release()
    clock.set(0)
    lease.acquire(timeout=0).release()
    clock.set(HOUR)
    assert rival.acquire(TTL, min_hold=10).granted
    assert rival.release() == "released"
    clock.set(0)
    assert lease.try_acquire() is None
    clock.set(11)
    lease.acquire(timeout=0).release()


@pytest.mark.parametrize("call", ["renew", "release"])
def test_a_holder_is_notified_when_the_clock_is_set_forward(
    engine: Engine, clock: Clock, name: str, call: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server's clock has ended the lease; the holder, whose own clock has not, loses it and logs the reason."""
    held = Lease(engine, name, ttl=TTL).acquire()
    clock.set(HOUR)
    with pytest.raises(LockLostError) as caught:
        getattr(held, call)()
    assert caught.value.reason == "expired"
    eventually(lambda: "the server's clock was set forward" in caplog.text)


def test_an_effect_is_taken_over_one_ttl_after_the_clock_was_set_back(
    engine: Engine, clock: Clock, rival: Caller, name: str
) -> None:
    """Claimed by a clock that was an hour ahead, a key whose attempt died is free one TTL after the first question."""
    claim = "SELECT outcome, remaining FROM {}claim_effect_v1(%s, %s, NULL, %s, 30, 60, true, 'me', 'here', 7)"
    effect = IdempotentEffect(engine, name, scope="test", ttl=TTL)
    clock.set(HOUR)
    assert rival.one(claim.format(rival.place), "test", name, rival.lease).outcome == "granted"
    clock.set(0)
    with pytest.raises(IdempotencyInProgressError):
        effect.run(lambda attempt: 1)
    clock.set(TTL + 1)
    assert effect.run(lambda attempt: 2) == 2
