"""A token of one installation (schema and prefix) opens no gate of another in the same database."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
from psycopg import sql
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from pgfence import Lease, schema
from pgfence.config import configure
from pgfence.errors import FenceRequiredError
from pgfence.fence import fence
from support.fenced_models import by_book, plain
from support.leases import lease
from support.transactions import factory, session

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from sqlalchemy import Engine

    from support.worlds import World


@pytest.fixture
def tenants(admin: psycopg.Connection[Any], name: str) -> Iterator[tuple[str, str]]:
    """The names of two schemas that are dropped at the end."""
    schemas = f"tenant_a_{name[-12:]}", f"Tenant %b_{name[-12:]}"
    for each in schemas:
        admin.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(each)))
    yield schemas
    for each in schemas:
        admin.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(each)))


@pytest.fixture
def engines(tenants: tuple[str, str], dsn: str) -> Iterator[tuple[Engine, Engine]]:
    """An engine for each schema, with an installation, and tables fenced by "close" and "close:{book}"."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    mapped = tuple(engine.execution_options(schema_translate_map={None: each}) for each in tenants)
    for each, name in zip(mapped, tenants, strict=True):
        schema.create_all(each)
        with each.begin() as connection:
            connection.execute(text(f'CREATE TABLE "{name}".entry (id int)'))
            connection.execute(text(f'CREATE TABLE "{name}".line (book text)'))
        schema.add_fence(each, "entry", resource="close")
        schema.add_fence(each, "line", resource="close:{book}")
    yield mapped[0], mapped[1]
    engine.dispose()


@pytest.mark.parametrize("theirs_is_held", [True, False])
def test_a_token_of_one_installation_opens_no_fence_of_another(
    engines: tuple[Engine, Engine], tenants: tuple[str, str], theirs_is_held: bool
) -> None:
    """A write to the other installation's table raises FenceRequiredError, with a fence per table and per row."""
    (a, b), (home, other) = engines, tenants
    names = "close", "close:x"
    writes = 'INSERT INTO "{}".entry VALUES (1)', "INSERT INTO \"{}\".line VALUES ('x')"
    for name, write in zip(names, writes, strict=True):
        theirs = Lease(b, name, ttl=60).hold() if theirs_is_held else nullcontext()
        with theirs, Lease(a, name, ttl=60).hold() as mine:
            assert mine.token == 1
            with mine.begin(a) as work:
                work.execute(text(write.format(home)))
            with pytest.raises(FenceRequiredError), mine.begin(a) as work:
                work.execute(text(write.format(other)))
    with b.connect() as connection:
        assert connection.scalars(text(f'SELECT token FROM "{other}".pgfence_gate')).all() == []


def test_a_transaction_may_bring_a_token_for_each_installation(
    engines: tuple[Engine, Engine], tenants: tuple[str, str]
) -> None:
    """The same name and number entered in one gate does not stand for the other gate, and both are open once both are entered."""
    with engines[0].begin() as connection:
        for tenant in tenants:
            connection.execution_options(schema_translate_map={None: tenant})
            fence(connection, "close", 1, after_reads=True)
        for tenant in tenants:
            connection.execute(text(f'INSERT INTO "{tenant}".entry VALUES (1)'))


def test_a_savepoint_takes_back_the_claim_in_one_installation_alone(
    engines: tuple[Engine, Engine], tenants: tuple[str, str]
) -> None:
    """After a rollback to a savepoint, the gate of the other installation is still entered."""
    with engines[0].begin() as connection:
        fence(connection, "close", 1)
        nested = connection.begin_nested()
        connection.execution_options(schema_translate_map={None: tenants[1]})
        fence(connection, "close", 1, after_reads=True)
        nested.rollback()
        connection.execute(text(f'INSERT INTO "{tenants[0]}".entry VALUES (1)'))
        with pytest.raises(FenceRequiredError), connection.begin_nested():
            connection.execute(text(f'INSERT INTO "{tenants[1]}".entry VALUES (1)'))


@pytest.mark.twins
@pytest.mark.usefixtures("tables")
async def test_a_handle_enters_no_gate_of_another_installation(
    world: World, name: str, tenants: tuple[str, str]
) -> None:
    """begin(), fence() and checkpoint() raise ValueError, which names both, before anything is sent."""
    engine = world.engine()
    configure(engine, schema="public")
    mapped = engine.execution_options(schema_translate_map={"public": tenants[1]})
    async with world.enter(lease(world, engine, name).hold()) as held:
        with pytest.raises(
            ValueError, match=r'"public"\."pgfence_lease".*if you mean the gate in "Tenant %b_'
        ) as caught:
            async with world.enter(held.begin(factory(world, mapped))):
                raise AssertionError
        assert f"'{name}'" in str(caught.value)
        async with session(world, mapped) as work:
            with pytest.raises(ValueError, match="each installation"):
                await world.call(held.fence, work)
            with pytest.raises(ValueError, match="each installation"):
                await world.call(held.checkpoint, work, {})
        async with session(world, world.engine()) as work:  # by the search path, which finds the same one
            await world.call(held.fence, work)


def test_a_row_is_not_stamped_with_a_token_of_another_installation(
    engines: tuple[Engine, Engine],
) -> None:
    """In mode "row" the token comes from a lease of this thread, of this installation."""
    entry = plain("entry_of_rows", {"__fence__": "row", "__fence_resource__": staticmethod(by_book)})
    for each in engines:
        entry.metadata.create_all(each)
    with Lease(engines[0], "x", ttl=60).hold():
        with Session(engines[0]) as work:
            work.add(entry(id=1, book="x"))
            work.commit()
        with Session(engines[1]) as work, pytest.raises(FenceRequiredError):
            work.add(entry(id=1, book="x"))
            work.flush()
