"""Adding triggers to a table in use takes the locks that the docstrings name."""

from __future__ import annotations

import inspect
import re
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence import schema
from pgfence_alembic import Directives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg
    from sqlalchemy import Connection, Engine

pytestmark = pytest.mark.usefixtures("tables")

WRITERS_WAIT, ALL_WAIT = "SHARE ROW EXCLUSIVE", "ACCESS EXCLUSIVE"


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    made = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield made
    made.dispose()


@pytest.fixture
def parent(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A table with one partition, whose rows have a version."""
    name = f"locked_{secrets.token_hex(4)}"
    admin.execute(
        f"CREATE TABLE {name} (book int, version bigint NOT NULL, v bigint NOT NULL) PARTITION BY LIST (book)"
    )
    admin.execute(f"CREATE TABLE {name}_1 PARTITION OF {name} FOR VALUES IN (1)")
    yield name
    admin.execute(f"DROP TABLE {name}")


def held(connection: Connection, table: str) -> str | None:
    """Return which statements of other sessions this transaction blocks on a table: writes, all, or none."""
    rows = connection.exec_driver_sql(
        f"SELECT mode FROM pg_locks WHERE pid = pg_backend_pid() AND relation = '{table}'::regclass"
    ).scalars()
    modes = {" ".join(re.findall("[A-Z][a-z]+", mode.removesuffix("Lock"))).upper() for mode in rows}
    return next((mode for mode in (ALL_WAIT, WRITERS_WAIT) if mode in modes), None)


def test_adding_triggers_takes_the_documented_locks(engine: Engine, parent: str) -> None:
    """Table and partition get the documented locks, a repeated call takes none, and readers wait only where documented."""

    def fence(resource: str) -> Callable[[Any], None]:
        return lambda connection: schema.add_fence(connection, parent, resource=resource)

    def count(connection: Any) -> None:
        schema.add_version_trigger(connection, parent)

    told = [
        ("add_fence", fence("a"), WRITERS_WAIT),
        ("add_fence", fence("a"), None),
        ("add_fence", fence("a:{book}"), WRITERS_WAIT),
        ("drop_fence", lambda connection: schema.drop_fence(connection, parent), ALL_WAIT),
        ("add_version_trigger", count, WRITERS_WAIT),
        ("add_version_trigger", count, None),
        ("drop_version_trigger", lambda connection: schema.drop_version_trigger(connection, parent), ALL_WAIT),
    ]
    for name, work, mode in told:
        with engine.begin() as connection:
            work(connection)
            assert (name, held(connection, parent), held(connection, f"{parent}_1")) == (name, mode, mode)
        for function in (getattr(schema, name), getattr(Directives, name)):
            # Alembic writes another docstring over it where it has registered an operation.
            words = " ".join(inspect.getsource(function).split())
            assert f"locked in {mode or WRITERS_WAIT} mode" in words
            assert "`lock_timeout`" in words


def test_replacing_a_trigger_takes_the_documented_locks(
    engine: Engine, parent: str, admin: psycopg.Connection[Any]
) -> None:
    """Readers wait where one resource follows one for each row, and where a version trigger counts elsewhere or is off."""
    plain = f"{parent}_1"
    admin.execute(f"ALTER TABLE {parent} DETACH PARTITION {plain}")
    try:
        for resource, mode in (("a", WRITERS_WAIT), ("{book}", WRITERS_WAIT), ("a", ALL_WAIT)):
            with engine.begin() as connection:
                schema.add_fence(connection, plain, resource=resource)
                assert held(connection, plain) == mode
        with engine.begin() as connection:
            schema.add_version_trigger(connection, plain)
        admin.execute(f"ALTER TABLE {plain} DISABLE TRIGGER pgfence_version")
        with engine.begin() as connection:
            schema.add_version_trigger(connection, plain)
            assert held(connection, plain) == ALL_WAIT
    finally:
        admin.execute(f"DROP TABLE {plain}")
