"""An unreachable server, a wrong password, an unknown host or database: the error of each kind of lock on every driver."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import AsyncTransactionLock, TransactionLock, idempotent, insert_once, run_transaction
from pgfence.errors import UnreachableError
from support.leases import lease, rival
from support.locking import lock, run
from support.transactions import connection, factory

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World


class Base(DeclarativeBase):
    """What is mapped here."""


class Note(Base):
    """A row that is never written."""

    __tablename__ = "note_without_a_server"
    id: Mapped[int] = mapped_column(primary_key=True)


NOWHERE = "postgresql://ann:s3cret@127.0.0.1:1/d"


@pytest.mark.matrix
@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    "entrance",
    ["lease.begin", "TransactionLock.begin", "TransactionLock", "idempotent", "insert_once", "run_transaction"],
)
async def test_a_transaction_without_a_server_is_unreachable(world: World, name: str, entrance: str) -> None:
    """UnreachableError and 503 from each, whatever the driver raises and SQLAlchemy wraps; nothing was committed."""
    engine = world.engine(dsn=NOWHERE)
    with pytest.raises(
        UnreachableError, match=r"cannot connect to 127\.0\.0\.1:1/d: .*Nothing was committed"
    ) as caught:
        await entered(world, name, entrance, engine)
    assert (caught.value.retryable, caught.value.http_status) == (True, 503)
    assert "s3cret" not in str(caught.value)


@pytest.mark.matrix
async def test_the_message_of_a_failed_wait_has_whole_sentences(world: World, name: str) -> None:
    """Whether the driver's text ends with a question or a full stop, the next sentence comes after exactly one mark."""
    waiting = lock(world, world.engine(dsn=NOWHERE), name)
    with pytest.raises(UnreachableError, match=r"[^?.][?.] Waited 0\.2 s for .*: the server could not be reached"):
        await world.call(waiting.acquire, timeout=0.2)


async def test_an_error_of_the_callers_own_network_is_left_alone(world: World, dsn: str) -> None:
    """A ConnectionRefusedError that the function raises itself is not from the database."""

    def work(session: Any) -> None:
        raise ConnectionRefusedError("another service")

    async def work_async(session: Any) -> None:
        raise ConnectionRefusedError("another service")

    with pytest.raises(ConnectionRefusedError, match="another service"):
        await world.call(run_transaction, factory(world, world.engine()), world.pick(work, work_async))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"password": "wrong-s3cret"}, "password authentication failed"),
        ({"user": "nobody_of_that_name"}, "nobody_of_that_name"),
        ({"dbname": "no_such_database"}, "no_such_database"),
        ({"host": "no-such-host.invalid"}, "no-such-host.invalid"),
    ],
)
async def test_a_mistake_in_the_configuration_is_not_retried(
    world: World, name: str, dsn: str, admin: psycopg.Connection[Any], change: dict[str, str], said: str
) -> None:
    """A rejected login raises at once, is not retryable, and the message says what to check."""
    engine = world.engine(dsn=changed(dsn, change))
    for call in (
        lambda: world.call(lock(world, engine, name).acquire, timeout=60),
        lambda: world.call(lease(world, engine, name).acquire, timeout=60),
        lambda: entered(world, name, "TransactionLock", engine),
    ):
        with pytest.raises(UnreachableError, match=f"cannot connect to .*{said}.*Check host, user, password") as caught:
            await call()
        assert (caught.value.retryable, caught.value.http_status) == (False, 500)
        assert "s3cret" not in str(caught.value)


async def test_a_mistake_in_the_configuration_runs_nothing_unprotected(world: World, name: str, dsn: str) -> None:
    """`unreachable=` applies to outages only, because a wrong database name would disable the lock permanently."""
    engine = world.engine(dsn=changed(dsn, {"dbname": "no_such_database"}))
    ran: list[bool] = []

    async def work() -> None:
        ran.append(True)

    for options in ({"unreachable": "run"}, {"busy": "skip", "unreachable": "skip"}):
        guarded = lock(world, engine, name).wrap(**options)(world.pick(lambda: ran.append(True), work))
        with pytest.raises(UnreachableError, match="no_such_database"):
            await world.call(guarded)
    assert not ran


@pytest.mark.usefixtures("tables")
async def test_a_rejected_login_raises_at_once_beside_a_known_holder(
    world: World, name: str, admin: psycopg.Connection[Any], role: Callable[..., str]
) -> None:
    """`unreachable="run"` waits for the TTL of that holder only if the server is unreachable; here no retry helps."""
    login = role()
    user = login.split("//")[1].split(":")[0]
    admin.execute(f"GRANT SELECT, INSERT, UPDATE ON pgfence_lease, pgfence_gate, pgfence_checkpoint TO {user}")
    admin.execute(f"GRANT SELECT ON pgfence_schema_version TO {user}")
    engine = world.engine(dsn=login)
    one = lease(world, engine, name, ttl=5)
    try:
        assert rival(admin, name, 5)
        assert await world.call(one.try_acquire) is None
        admin.execute(f"ALTER ROLE {user} NOLOGIN")
        admin.execute("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s", [user])
        asked: list[Any] = []
        event.listen(getattr(engine, "sync_engine", engine), "do_connect", lambda *_: asked.append(1))
        guarded = one.wrap(timeout=1, unreachable="run")(world.pick(lambda: None, one_async))
        with pytest.raises(UnreachableError, match="not permitted to log in"):
            await world.call(guarded)
        assert len(asked) < 10
    finally:
        admin.execute(f"DROP OWNED BY {user}")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("query", "environment", "place"),
    [
        ("?host=127.0.0.1:1&host=127.0.0.2:2", {}, "127.0.0.1:1,127.0.0.2:2/d"),
        ("?host=127.0.0.1,127.0.0.2&port=1,2", {}, "127.0.0.1:1,127.0.0.2:2/d"),
        ("", {"PGHOST": "127.0.0.1,127.0.0.2", "PGPORT": "1"}, "127.0.0.1:1,127.0.0.2:1/d"),
    ],
)
async def test_messages_name_the_hosts_of_a_list(
    world: World,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    query: str,
    environment: dict[str, str],
    place: str,
) -> None:
    """Hosts of the query and of PGHOST are named; several of them without connect_timeout are warned of once for an engine."""
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    engine = world.engine(dsn=f"postgresql://ann@/d{query}")
    with caplog.at_level(logging.WARNING, "pgfence"):
        for _ in range(2):
            with pytest.raises(UnreachableError, match=f"cannot connect to {place}: "):
                await world.call(lock(world, engine, name).try_acquire)
    (warning,) = [each.getMessage() for each in caplog.records if "several hosts" in each.getMessage()]
    assert place.removesuffix("/d") in warning
    assert ("HAProxy" if world.name == "asyncpg" else "connect_timeout=2") in warning


async def test_a_creator_is_not_reported_as_the_default_host(world: World, name: str) -> None:
    """Where an engine has a creator and its URL names no host, the message says so; the driver's own text names the host."""

    def create() -> Any:
        raise ConnectionRefusedError("10.0.0.5 refused")

    async def create_async() -> Any:
        create()

    key = world.pick("creator", "async_creator")
    engine = world.engine(dsn="postgresql://", **{key: world.pick(create, create_async)})
    with pytest.raises(
        UnreachableError,
        match=r"cannot connect to the host to which the engine's creator function connects: 10\.0\.0\.5 refused",
    ):
        await world.call(lock(world, engine, name).try_acquire)


async def test_a_connection_that_is_dead_already_is_unreachable(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """A session lock on a caller's connection whose server process has ended raises UnreachableError."""
    async with connection(world, world.engine()) as borrowed:
        pid = await run(world, borrowed, "SELECT pg_backend_pid()")
        await world.call(borrowed.rollback)
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        with pytest.raises(UnreachableError):
            await world.call(lock(world, borrowed, name).acquire)


@pytest.mark.twins
async def test_a_list_of_hosts_with_a_limit_is_not_warned_of(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A `connect_timeout` in `connect_args`, and asyncpg's `timeout`, are seen; so are hosts there."""
    limit = "timeout" if world.name == "asyncpg" else "connect_timeout"
    arguments = {"host": ["127.0.0.1", "127.0.0.2"], "port": [1, 1]}
    if world.name != "asyncpg":
        arguments = {"host": "127.0.0.1,127.0.0.2", "port": "1,1"}
    engine = world.engine(dsn="postgresql://ann@/d", connect_args={**arguments, limit: 2})
    with (
        caplog.at_level(logging.WARNING, "pgfence"),
        pytest.raises(UnreachableError, match="127.0.0.1:1,127.0.0.2:1/d"),
    ):
        await world.call(lock(world, engine, name).try_acquire)
    assert not [each for each in caplog.records if "several hosts" in each.getMessage()]


async def entered(world: World, name: str, entrance: str, engine: Any) -> None:
    """Begin a transaction on the engine through one of pgfence's functions."""
    sessions = factory(world, engine)
    kind = world.pick(TransactionLock, AsyncTransactionLock)
    if entrance == "lease.begin":
        async with (
            world.enter(lease(world, world.engine(), name).hold()) as held,
            world.enter(held.begin(sessions)),
        ):
            pass
    elif entrance == "TransactionLock.begin":
        async with world.enter(kind.begin(sessions, name)):
            pass
    elif entrance == "run_transaction":
        await world.call(run_transaction, sessions, world.pick(one, one_async))
    else:
        async with world.enter(sessions()) as session:
            if entrance == "TransactionLock":
                await world.call(kind(session, name).acquire)
            elif entrance == "insert_once":
                await world.call(insert_once, session, Note(id=1), ["id"])
            else:
                async with world.enter(idempotent(session, name, scope="s")):
                    pass


def one(session: Any) -> None:
    """Send the first statement of a transaction."""
    session.execute(text("SELECT 1"))


async def one_async(session: Any) -> None:
    """Send the first statement of a transaction."""
    await session.execute(text("SELECT 1"))


def changed(dsn: str, change: dict[str, str]) -> str:
    """Return a URL with other parts."""
    parts = {k: str(v) for k, v in psycopg.conninfo.conninfo_to_dict(dsn).items()} | change
    return f"postgresql://{parts['user']}:{parts.get('password', 's3cret')}@{parts['host']}:{parts['port']}/{parts['dbname']}"
