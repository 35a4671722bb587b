"""PgBouncer in transaction mode: session locks are rejected with alternatives, and everything that can work works."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from pgfence import AdvisoryLock, configure
from pgfence.errors import LockTimeoutError, PoolerError
from support import transactions
from support.locking import background, elsewhere, freed, give, is_free, lock, waits
from support.poolers import Swap
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

    from support.worlds import World

SITE = {"statement_timeout": "47s", "lock_timeout": "46s", "idle_in_transaction_session_timeout": "45s"}
ASKED = (
    *SITE,
    "idle_session_timeout",
    "default_transaction_isolation",
    "tcp_user_timeout",
    "client_connection_check_interval",
)


def pooled(world: World, through: str, **kwargs: Any) -> Any:
    """Return an engine as its driver's manual wants it behind a transaction pooler."""
    arguments: dict[str, Any] = {
        "psycopg": {"connect_args": {"prepare_threshold": None}},
        "psycopg2": {},
        "psycopg_async": {"connect_args": {"prepare_threshold": None}},
        "asyncpg": {"connect_args": {"statement_cache_size": 0, "prepared_statement_cache_size": 0}},
    }[world.name]
    return world.engine(dsn=through, **arguments, **kwargs)


@contextmanager
def busy_pool(through: str) -> Iterator[None]:
    """Keep a few of the pooler's sessions in transactions of other clients."""
    others = [psycopg.connect(through, prepare_threshold=None) for _ in range(3)]
    try:
        for other in others:
            other.execute("SELECT 1")
        yield
    finally:
        for other in others:
            other.close()


async def test_a_session_lock_is_rejected_with_alternatives(
    world: World, name: str, pgbouncer: Callable[..., str], advisory_rows: Callable[[], list[Any]]
) -> None:
    """C019: undeclared, on an idle pool: proven by a second client; the message names both ways out, and nothing is left."""
    engine = pooled(world, pgbouncer("transaction"))
    one = lock(world, engine, name)
    for call in (one.try_acquire, one.acquire):
        with pytest.raises(PoolerError, match="lock_engine=.*, or use a Lease") as caught:
            await world.call(call)
        assert caught.value.mode == "transaction"
        assert 'session"' not in str(caught.value)  # session mode is disproven here
    with pytest.raises(PoolerError):
        async with world.enter(one.hold()):
            pytest.fail("entered")
    with pytest.raises(PoolerError):
        async with world.enter(one.connect()):
            pytest.fail("entered")
    async with transactions.connection(world, engine) as connection:
        with pytest.raises(PoolerError):
            await world.call(lock(world, connection, name).acquire)
    assert advisory_rows() == []


async def test_a_session_lock_is_rejected_on_a_busy_pool_too(
    world: World, name: str, pgbouncer: Callable[..., str], advisory_rows: Callable[[], list[Any]]
) -> None:
    """C019: beside clients in transactions the mode may not show; a pooler of unknown mode is rejected anyway."""
    through = pgbouncer("transaction")
    with busy_pool(through):
        with pytest.raises(PoolerError, match="lock_engine=") as caught:
            await world.call(lock(world, pooled(world, through), name).acquire)
        # Only a pooler whose mode does not show may be declared to be in session mode.
        ways = {"transaction": "or use a Lease", "unknown": 'declare it: configure(engine, pooler="session")'}
        assert ways[caught.value.mode] in str(caught.value)
    assert advisory_rows() == []


async def test_a_declared_transaction_pooler_is_rejected(
    world: World, name: str, pgbouncer: Callable[..., str], advisory_rows: Callable[[], list[Any]]
) -> None:
    """C019: configure(pooler="transaction") rejects session locks without testing a second client."""
    engine = pooled(world, pgbouncer("transaction"))
    configure(engine, pooler="transaction")
    with pytest.raises(PoolerError, match="the configuration declares it") as caught:
        await world.call(lock(world, engine, name).acquire)
    assert caught.value.mode == "transaction"
    assert advisory_rows() == []


@pytest.mark.matrix
@pytest.mark.parametrize("declared", ["auto", "transaction"])
async def test_a_rejection_changes_no_setting_of_the_pooled_sessions(
    world: World, name: str, pgbouncer: Callable[..., str], role: Callable[..., str], declared: Any
) -> None:
    """A SET through a transaction pooler would reach other clients: after the rejection all settings are unchanged."""
    through = pgbouncer("transaction", role(settings=SITE))
    before = shown(through)
    assert {key: before[key] for key in SITE} == SITE
    engine = pooled(world, through)
    configure(engine, pooler=declared)
    for _ in range(3):
        with pytest.raises(PoolerError):
            await world.call(lock(world, engine, name).acquire)
    assert shown(through) == before


def shown(through: str) -> dict[str, str]:
    """What the next client of the pooler finds."""
    with psycopg.connect(through, autocommit=True, prepare_threshold=None) as client:
        return {key: client.execute(f"SHOW {key}").fetchone()[0] for key in ASKED}


async def test_a_transaction_lock_works_through_it(
    world: World, name: str, pgbouncer: Callable[..., str], dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C019: it is held as long as its transaction, on any session; waits and timeouts work."""
    engine = pooled(world, pgbouncer("transaction"))
    async with transactions.session(world, engine) as session:
        for _ in range(3):
            await world.call(transactions.lock(session, name, f"{name}!").acquire)
            assert not is_free(admin, name)
            await world.call(session.commit)
            assert is_free(admin, name)
        with elsewhere(dsn, name) as holder:
            with pytest.raises(LockTimeoutError):
                await world.call(transactions.lock(session, name).acquire, timeout=0.3)
            other = world.other()
            async with transactions.session(world, engine, other) as second:
                async with background(other.call(transactions.lock(second, name).acquire, timeout=20)) as waiting:
                    await eventually(waits(admin, name))
                    assert give(holder, name)
                    await waiting
                assert not is_free(admin, name)
    await freed(admin, name)


@pytest.mark.twins
@pytest.mark.parametrize("declared", ["auto", "transaction"])
async def test_a_direct_lock_engine_works_beside_it(
    world: World, name: str, pgbouncer: Callable[..., str], admin: psycopg.Connection[Any], declared: Any
) -> None:
    """C019: the alternative: locks use the server directly, everything else uses the pooler."""
    through = pgbouncer("transaction")
    for direct in (world.engine(), world.engine):
        engine = pooled(world, through)
        configure(engine, lock_engine=direct, pooler=declared)
        async with world.enter(lock(world, engine, name).hold()) as held:
            held.check()
            assert not is_free(admin, name)
            assert await world.call(lock(world, engine, name).is_held)
            async with transactions.session(world, engine) as session:
                assert await transactions.value(world, session, "SELECT 1") == 1
        assert is_free(admin, name)


@pytest.fixture
def swapping(dsn: str) -> Iterator[Engine]:
    """An engine over a pooler that, unlike PgBouncer, passes the server's true process id on to the client."""
    made: list[Swap] = []

    def connect() -> Swap:
        made.append(Swap(dsn))
        return made[-1]

    engine = create_engine("postgresql+psycopg://", creator=connect, use_native_hstore=False, poolclass=NullPool)
    yield engine
    engine.dispose()
    for swap in made:
        swap.close()


@pytest.mark.parametrize("declared", ["auto", "direct", "session"])
def test_a_pooler_that_hides_well_is_seen_by_the_first_statement(
    name: str, swapping: Engine, advisory_rows: Callable[[], list[Any]], declared: Any
) -> None:
    """C019: no process id gives it away; but a try names the server process that it expects, and takes nothing on another."""
    configure(swapping, pooler=declared)
    one = AdvisoryLock(swapping, name)
    for call in (one.try_acquire, one.acquire, one.hold().__enter__, one.connect().__enter__):
        with pytest.raises(PoolerError, match="lock_engine=") as caught:
            call()
        assert caught.value.mode == "transaction"
    assert advisory_rows() == []


@pytest.mark.twins
async def test_a_wrong_value_in_the_configuration_is_rejected(
    world: World, name: str, pgbouncer: Callable[..., str], advisory_rows: Callable[[], list[Any]]
) -> None:
    """C019: declared as a session pooler, pooling by transaction in truth: a second client proves it."""
    engine = pooled(world, pgbouncer("transaction"))
    configure(engine, pooler="session")
    with pytest.raises(PoolerError) as caught:
        await world.call(lock(world, engine, name).acquire)
    assert caught.value.mode == "transaction"
    assert advisory_rows() == []
