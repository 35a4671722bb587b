"""Tables of one version become those of the next while they are in use; what needs the older one runs on it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine

from pgfence import schema
from pgfence._sql import tables
from pgfence._sql.storage import VERSION, Place
from pgfence.config import configure
from pgfence.lease import AsyncLease, Lease

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.worlds import World


@pytest.fixture
def place(admin: psycopg.Connection[Any], name: str) -> Iterator[Place]:
    """A schema of its own."""
    here = Place(f"version_{name[-12:]}")
    yield here
    admin.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(here.schema or "")))


def make(admin: psycopg.Connection[Any], statements: tuple[str, ...]) -> None:
    for statement in statements:
        admin.execute(statement.encode())


def versions(admin: psycopg.Connection[Any], place: Place) -> list[int]:
    rows = admin.execute(f"SELECT version FROM {place.name('schema_version')} ORDER BY 1".encode()).fetchall()
    return [version for (version,) in rows]


def there(admin: psycopg.Connection[Any], place: Place) -> bool:
    row = admin.execute("SELECT to_regclass(%s) IS NOT NULL", [place.name("idempotency_key")]).fetchone()
    return bool(row and row[0])


async def given(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


async def test_a_lease_is_held_across_the_change_from_version_1(
    world: World, name: str, place: Place, admin: psycopg.Connection[Any]
) -> None:
    """On tables of version 1 a lease is taken; `create_all` makes version 2 of them; the lease is renewed and goes on."""
    make(admin, tables.creation(place, 1))
    engine = world.engine()
    configure(engine, schema=place.schema)
    lease = world.pick(Lease, AsyncLease)(engine, name, ttl=30)
    async with world.enter(lease.hold()) as held:
        assert (held.token, there(admin, place)) == (1, False)
        await given(schema.create_all(engine))
        assert (versions(admin, place), there(admin, place)) == ([1, VERSION], True)
        await world.call(held.renew)
        assert held.state == "held"
    async with world.enter(lease.hold()) as held:
        assert held.token == 2


@pytest.mark.parametrize("version", range(1, VERSION + 1))
def test_a_version_is_made_twice_without_harm_and_lowered_again(
    place: Place, admin: psycopg.Connection[Any], version: int
) -> None:
    """Every version can be made, made again, brought to the newest, and brought back, and knows what it is."""
    for _ in range(2):
        make(admin, tables.creation(place, version))
    assert versions(admin, place) == [version]
    make(admin, tables.creation(place))
    make(admin, tables.lowering(place, version))
    assert versions(admin, place)[-1] == version
    assert there(admin, place) == (version > 1)


def test_an_older_version_is_not_taken_for_the_newest(dsn: str, place: Place, admin: psycopg.Connection[Any]) -> None:
    """What leases need is there; what this release makes is not, and that is told with its number."""
    make(admin, tables.creation(place, 1))
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with engine.connect() as connection:
        answer = tables.plainly(connection, tables.checking(place)).one()
        assert tables.judged(answer, place) is None
        error = tables.verify(connection, place)
        assert not tables.installed(connection, place)
    engine.dispose()
    assert error
    assert error.needed == VERSION
    assert "idempotency_key is missing" in str(error)
