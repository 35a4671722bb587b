"""Tables are upgraded and downgraded while they are in use, and each version keeps working."""

from __future__ import annotations

import inspect
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from pgfence import AdvisoryLock, IdempotentEffect, Once, idempotent, schema
from pgfence.config import configure
from pgfence.errors import SchemaError
from pgfence.lease import AsyncLease, Lease
from support import installations as tables
from support.installations import LEASES, VERSION, TableNames
from support.lease_functions import Caller
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.worlds import World


@pytest.fixture
def place(admin: psycopg.Connection[Any], name: str) -> Iterator[TableNames]:
    """A separate schema."""
    here = TableNames(f"version_{name[-12:]}")
    yield here
    admin.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(here.schema or "")))


def make(admin: psycopg.Connection[Any], statements: tuple[str, ...]) -> None:
    for statement in statements:
        admin.execute(statement.encode())


def versions(admin: psycopg.Connection[Any], place: TableNames) -> list[int]:
    rows = admin.execute(f"SELECT version FROM {place.name('schema_version')} ORDER BY 1".encode()).fetchall()
    return [version for (version,) in rows]


def there(admin: psycopg.Connection[Any], place: TableNames) -> bool:
    row = admin.execute("SELECT to_regclass(%s) IS NOT NULL", [place.name("idempotency_key")]).fetchone()
    return bool(row and row[0])


async def given(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("version", range(1, VERSION))
async def test_a_lease_is_held_across_a_downgrade_and_an_upgrade(
    world: World, name: str, place: TableNames, admin: psycopg.Connection[Any], version: int
) -> None:
    """The tables are downgraded and upgraded again while the lease is held: it is renewed throughout."""
    make(admin, tables.build_creation(place))
    engine = world.engine()
    configure(engine, schema=place.schema)
    lease = world.pick(Lease, AsyncLease)(engine, name, ttl=30)
    async with world.enter(lease.hold()) as held:
        make(admin, tables.build_downgrade(place, version))
        await world.call(held.renew)
        await given(schema.create_all(engine))
        await world.call(held.renew)
        assert (held.token, held.state) == (1, "held")
    async with world.enter(lease.hold()) as held:
        assert held.token == 2


@pytest.mark.parametrize("version", range(1, LEASES))
def test_a_lease_of_an_older_release_is_respected(
    dsn: str, name: str, place: TableNames, admin: psycopg.Connection[Any], version: int
) -> None:
    """What a process of an older release holds is held after the upgrade too, and the next token is above it."""
    make(admin, tables.build_creation(place, version))
    with Caller(dsn, name, f"{place.schema}.pgfence_", old=True) as older:
        assert older.acquire().granted
        engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
        configure(engine, schema=place.schema)
        lease = Lease(engine, name, ttl=30)
        with pytest.raises(
            SchemaError, match=rf"version {version}, but version {LEASES} is needed: run `pgfence install"
        ):
            lease.try_acquire()
        schema.create_all(engine)
        assert older.renew()[0] == "ok"
        assert lease.try_acquire() is None
        assert older.release() == "released"
        with lease.hold() as held:
            assert held.token == older.token + 1
        engine.dispose()


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_each_version_can_be_created_twice_upgraded_and_downgraded(
    place: TableNames, admin: psycopg.Connection[Any], version: int
) -> None:
    """Every version can be created, created again, upgraded to the newest and downgraded, and reports its version."""
    for _ in range(2):
        make(admin, tables.build_creation(place, version))
    assert versions(admin, place) == [version]
    make(admin, tables.build_creation(place))
    make(admin, tables.build_downgrade(place, version))
    assert versions(admin, place)[-1] == version
    assert there(admin, place) == (version > 1)


def test_tables_of_a_newer_release_serve_this_one(
    dsn: str, name: str, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """Another column, another function and a higher version are accepted; `create_all` of this release changes nothing."""
    make(admin, tables.build_creation(place))
    newer = VERSION + 1
    make(
        admin,
        (
            f"ALTER TABLE {place.name('lease')} ADD COLUMN colour text NOT NULL DEFAULT 'red'",
            f"CREATE FUNCTION {place.name('acquire_lease_v99')}() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            f"INSERT INTO {place.name('schema_version')} (version) VALUES ({newer})",
        ),
    )
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    configure(engine, schema=place.schema)
    schema.create_all(engine)
    assert versions(admin, place)[-1] == newer
    with Lease(engine, name, ttl=30).hold() as held, held.begin(engine):
        held.renew()
    with AdvisoryLock(engine, f"{name}!", token=True).hold() as locked:
        assert locked.token == 1
    assert Once(engine, name, every=timedelta(days=1)).wrap()(lambda: "ran")() == "ran"
    assert IdempotentEffect(engine, name, scope="s", result=str).run(lambda _: "done") == "done"
    with Session(engine) as session:
        assert idempotent(session, name, scope="t", result=int).run(lambda: 7) == 7
    engine.dispose()


def made(admin: psycopg.Connection[Any], place: TableNames) -> set[Any]:
    """Return the functions of a place with their bodies, its columns and its triggers."""
    query = (
        "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = to_regnamespace(%(s)s) UNION ALL"
        " SELECT attrelid::regclass::text, attname FROM pg_attribute JOIN pg_class AS c ON c.oid = attrelid"
        " WHERE c.relnamespace = to_regnamespace(%(s)s) AND attnum > 0 AND NOT attisdropped UNION ALL"
        " SELECT tgrelid::regclass::text, tgname FROM pg_trigger JOIN pg_class AS c ON c.oid = tgrelid"
        " WHERE c.relnamespace = to_regnamespace(%(s)s)"
    )
    return set(admin.execute(query, {"s": place.schema}).fetchall())


@pytest.mark.parametrize("version", range(1, VERSION))
def test_a_downgrade_leaves_what_the_older_version_made(
    place: TableNames, admin: psycopg.Connection[Any], version: int
) -> None:
    """New columns and functions are dropped, replaced functions have their old bodies; an old script changes no new one."""
    make(admin, tables.build_creation(place, version))
    older = made(admin, place)
    make(admin, tables.build_creation(place))
    newer = made(admin, place)
    make(admin, tables.build_creation(place, version))
    assert made(admin, place) == newer
    make(admin, tables.build_downgrade(place, version))
    assert made(admin, place) == older


@pytest.mark.parametrize("read", ["lease", "slot", "idempotency_key"])
def test_an_upgrade_behind_an_open_transaction_lets_renewals_pass(
    dsn: str, name: str, place: TableNames, admin: psycopg.Connection[Any], read: str
) -> None:
    """A transaction that has read a table blocks the upgrade, and held leases are renewed in the meantime."""
    make(admin, tables.build_creation(place, 2))
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    configure(engine, schema=place.schema)
    table = place.name(read)
    waiting = (
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass AND mode = 'AccessExclusiveLock'"
    )
    with (
        Caller(dsn, name, f"{place.schema}.pgfence_", old=True) as holder,
        psycopg.connect(dsn) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        holder.acquire()
        reader.execute(f"SELECT FROM {table}".encode())
        upgrade = pool.submit(schema.create_all, engine)
        eventually(lambda: holder.one(waiting, table)[0])
        assert holder.renew()[0] == "ok"
        assert not upgrade.done()
        reader.rollback()
        upgrade.result()
        assert holder.renew()[0] == "ok"
    engine.dispose()
    assert versions(admin, place)[-1] == VERSION


def waiting_for(session: psycopg.Connection[Any], place: TableNames, mode: str) -> bool:
    """Return whether a lock on the table of gates is being waited for."""
    asked = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = %s::regclass AND mode = %s)"
    row = session.execute(asked, [place.name("gate"), mode]).fetchone()
    return bool(row and row[0])


def test_an_upgrade_waits_for_a_transaction_that_has_raised_a_gate(
    dsn: str, name: str, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """The transaction has locked only the gate's row, which writers with the new functions would not notice."""
    make(admin, tables.build_creation(place, 3))
    with Caller(dsn, name, f"{place.schema}.pgfence_") as holder, psycopg.connect(dsn) as upgrading:
        holder.enter(1)
        with ThreadPoolExecutor(1) as pool:
            with holder.connection.transaction():
                holder.enter(2)
                upgrade = pool.submit(
                    lambda: [upgrading.execute(each.encode()) for each in tables.build_creation(place)]
                )
                eventually(lambda: waiting_for(admin, place, "ShareRowExclusiveLock"))
                assert not upgrade.done()
            upgrade.result()
        upgrading.commit()
        holder.enter(2)


def test_a_writer_inside_a_gate_can_write_after_an_upgrade(
    dsn: str, name: str, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """The upgrade does not wait for a writer inside a gate, but a newer holder does."""
    make(admin, tables.build_creation(place, 3))
    prefix = f"{place.schema}.pgfence_"
    with Caller(dsn, name, prefix) as writer, Caller(dsn, name, prefix) as newer, ThreadPoolExecutor(1) as pool:
        writer.enter(1)
        with writer.connection.transaction():
            writer.enter(1)
            make(admin, tables.build_creation(place))
            entering = pool.submit(newer.enter, 2)
            eventually(lambda: admin.execute("SELECT 1 FROM unnest(pg_blocking_pids(%s))", [newer.pid]).fetchone())
            writer.call("check_gate_v1", name, "accounts")
            assert not entering.done()
        entering.result()
        assert newer.gate == 2


def test_a_downgrade_waits_for_a_transaction_inside_a_gate(
    dsn: str, name: str, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """A newer holder that enters through the older functions would not notice the transaction's lock."""
    make(admin, tables.build_creation(place))
    with Caller(dsn, name, f"{place.schema}.pgfence_") as writer, psycopg.connect(dsn) as lowering:
        writer.enter(1)
        with ThreadPoolExecutor(1) as pool:
            with writer.connection.transaction():
                writer.enter(1)
                texts = tables.build_downgrade(place, 3)
                downgrade = pool.submit(lambda: [lowering.execute(each.encode()) for each in texts])
                eventually(lambda: waiting_for(admin, place, "AccessExclusiveLock"))
                assert not downgrade.done()
            downgrade.result()
        lowering.commit()
        writer.enter(2)


def test_an_older_version_is_not_taken_for_the_newest(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """The tables are sufficient for fences but not for leases, and the error names the version."""
    make(admin, tables.build_creation(place, 1))
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with engine.connect() as connection:
        assert tables.verify(connection, place, 1) is None
        error = tables.verify(connection, place)
        assert not tables.is_installed(connection, place)
    engine.dispose()
    assert error
    assert error.needed == VERSION
    assert f"have version 1, but version {VERSION} is needed: run `pgfence install" in str(error)
