"""pgbench's tables: its own and ours are the same, and never land among those of the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence._demo import load
from pgfence._demo.bank import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from sqlalchemy import Engine

COLUMNS = """
    SELECT table_name, column_name, data_type, character_maximum_length, datetime_precision
    FROM information_schema.columns WHERE table_schema = %s ORDER BY table_name, column_name
"""
KEYS = "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = %s ORDER BY tablename, indexname"


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    engine = create_engine(dsn)
    yield engine
    engine.dispose()


def shape(admin: psycopg.Connection[Any]) -> list[Any]:
    """Return what there is: columns, keys, and how many rows."""
    names = [row[0] for row in admin.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [SCHEMA])]
    counts = [(name, admin.execute(f"SELECT count(*) FROM {SCHEMA}.{name}").fetchone()) for name in sorted(names)]
    return [counts, admin.execute(COLUMNS, [SCHEMA]).fetchall(), admin.execute(KEYS, [SCHEMA]).fetchall()]


def test_the_tables_by_sql_are_those_of_pgbench(
    engine: Engine, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same tables, columns, keys and numbers of rows."""
    if load.find_program("pgbench") is None:
        pytest.skip("there is no pgbench here")
    with load.create_tables(engine) as who:
        assert who.startswith("pgbench ")
        by_pgbench = shape(admin)
    monkeypatch.setattr(load, "find_program", lambda _: None)
    with load.create_tables(engine) as who:
        assert who == "SQL"
        assert shape(admin) == by_pgbench
    assert shape(admin)[1:] == [[], []]


def test_pgbench_is_kept_out_where_its_tables_would_land_elsewhere(
    engine: Engine, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session whose search path is not what was asked for, as behind some poolers, must not be given to pgbench."""
    monkeypatch.setattr(load, "_add_search_path", lambda url: url)
    with load.create_tables(engine) as who:
        assert who == "SQL"
        strays = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename LIKE 'pgbench%'"
        assert admin.execute(strays).fetchall() == []


def test_the_password_is_not_an_argument_of_pgbench(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody on the machine reads arguments: the password goes by the environment, and a URL that hides one goes nowhere."""
    seen: list[Any] = []

    def run(words: list[str], **kwargs: Any) -> Any:
        seen.append((" ".join(words), kwargs["env"]))
        raise OSError

    monkeypatch.setattr(load.subprocess, "run", run)
    url = engine.url.set(password="s3cr3t")
    assert not load._run_pgbench(load.Path("pgbench"), url)
    (words, environment) = seen.pop()
    assert "s3cr3t" not in words and environment["PGPASSWORD"] == "s3cr3t"
    assert not load._run_pgbench(load.Path("pgbench"), url.update_query_dict({"password": "s3cr3t"}))
    assert seen == []


def test_a_failed_block_drops_even_tables_to_be_kept(engine: Engine, admin: psycopg.Connection[Any]) -> None:
    """What is kept is a demo that was played."""
    with pytest.raises(RuntimeError, match="half way"), load.create_tables(engine, keep=True):
        raise RuntimeError("half way")
    assert shape(admin) == [[], [], []]
