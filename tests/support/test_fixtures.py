"""The fixtures themselves: what the other tests stand on."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import text

from support.rows import every_row
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World


async def _backend(engine: Any, world: World) -> int:
    if world.is_async:
        async with engine.connect() as connection:
            return await connection.scalar(text("SELECT pg_backend_pid()"))
    with engine.connect() as connection:
        return connection.scalar(text("SELECT pg_backend_pid()"))


async def test_world_engine_reaches_the_test_database(world: World) -> None:
    """Each world's engine connects."""
    assert await _backend(world.engine(), world) > 0


def test_a_role_has_its_hostile_settings(role: Callable[..., str]) -> None:
    """A role made with settings logs in with them and is no superuser."""
    with psycopg.connect(
        role(settings={"statement_timeout": "50ms", "default_transaction_isolation": "serializable"})
    ) as connection:
        assert connection.execute("SHOW statement_timeout").fetchone() == ("50ms",)
        assert connection.execute("SHOW is_superuser").fetchone() == ("off",)


def test_advisory_rows_shows_a_lock(dsn: str, advisory_rows: Callable[[], list[Any]]) -> None:
    """A session lock is seen with its mode and backend."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(42)")
        (row,) = advisory_rows()
        assert (row.pid, row.objid, row.granted) == (connection.info.backend_pid, 42, True)


async def test_other_is_one_separate_contender(world: World) -> None:
    """Its calls run on one thread or task that is not the test's; errors come back; a cancelled call leaves it usable."""
    other = world.other()

    def who() -> int:
        return id(asyncio.current_task()) if world.is_async else threading.get_ident()

    first = await other.call(who)
    assert first == await other.call(who)
    assert first != who()
    with pytest.raises(ZeroDivisionError):
        await other.call(lambda: 1 / 0)
    begun, go_on = threading.Event(), threading.Event()

    async def wait_for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def wait() -> None:
        begun.set()
        go_on.wait()

    call = asyncio.create_task(other.call(world.pick(wait, wait_for_ever)))
    await eventually(begun.is_set)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    go_on.set()
    assert await other.call(lambda: "usable") == "usable"


def test_eventually_says_what_did_not_come_true() -> None:
    """The deadline ends the wait with an assertion."""
    with pytest.raises(AssertionError, match=r"not true within 0\.05 s"):
        eventually(lambda: False, deadline=0.05)


def test_a_test_over_a_table_lists_every_row_that_failed() -> None:
    """All rows run, and the failure names those that failed, whatever they failed by."""

    @every_row("number", [1, 2, 3, 4])
    def check(number: int) -> None:
        assert number != 2
        with pytest.raises(ZeroDivisionError):
            1 / (number - 3)

    with pytest.raises(AssertionError, match=r"(?s)3 of 4 rows failed\nnumber=1.*number=2.*number=4"):
        check()
    with pytest.raises(ValueError, match="plain ones"):
        every_row("number", [pytest.param(1)])


@pytest.mark.every_driver
@pytest.mark.matrix
@pytest.mark.parametrize("row", ["one", "two"])
@pytest.mark.parametrize("column", ["left", "right"])
def test_a_cell_of_a_matrix(world: World, row: str, column: str) -> None:
    """A test for the one below."""
    assert world.name == "psycopg" or (row, column) == ("one", "left")


def test_a_matrix_runs_in_full_on_psycopg_and_once_on_each_other_driver(request: pytest.FixtureRequest) -> None:
    """Four cells on the first driver, the first cell on the other three."""
    cells = [item.callspec for item in request.node.parent.collect() if item.name.startswith("test_a_cell_of_a_matrix")]
    drivers = [cell.params["world"] for cell in cells]
    assert sorted(drivers) == ["asyncpg", *["psycopg"] * 4, "psycopg2", "psycopg_async"]
