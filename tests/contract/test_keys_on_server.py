"""Keys as PostgreSQL sees them: the SQL recipe, what pg_locks shows, the two spaces, other databases, other libraries."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import unicodedata
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import Connection, create_engine, func, make_url, select, text
from sqlalchemy.ext.asyncio import create_async_engine

from pgfence import compat
from pgfence.config import config_of, configure
from pgfence.keys import LockKey
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATA = Path(__file__).parents[1] / "data"
VECTORS = json.loads((DATA / "key_vectors.json").read_text(encoding="ascii"))["vectors"]
RECIPE = "('x' || left(encode(sha256(convert_to({ns} || chr(31) || {name}, 'UTF8')), 'hex'), 16))::bit(64)::bigint"
EDGES = [0, 1, -1, -5, 2**31, 2**32 - 1, 2**32 + 2, 2**63 - 1, -(2**63)]
PAIRS = [(0, 0), (1, 2), (-1, -5), (0, -1), (-1, 0), (2**31 - 1, -(2**31)), (-(2**31), 2**31 - 1)]
NAMES = 10_000 if os.environ.get("PGFENCE_TEST_FAULTS") else 2_000
SYNC = ("psycopg", "psycopg2")
ASYNC = ("psycopg_async", "asyncpg")

DRIVERS = (*SYNC, *ASYNC)

every_driver = pytest.mark.parametrize("driver", DRIVERS)


def run(dsn: str, driver: str, work: Callable[[Connection], Any]) -> Any:
    """Return what `work` returns on a connection of that driver; a coroutine driver runs it through run_sync()."""
    url = make_url(dsn).set(drivername=f"postgresql+{driver}")
    if driver in SYNC:
        engine = create_engine(url)
        try:
            with engine.connect() as connection:
                return work(connection)
        finally:
            engine.dispose()

    async def in_a_loop() -> Any:
        engine = create_async_engine(url)
        try:
            async with engine.connect() as connection:
                return await connection.run_sync(work)
        finally:
            await engine.dispose()

    return asyncio.run(in_a_loop())


@contextmanager
def session(dsn: str, **parts: str) -> Iterator[psycopg.Connection]:
    """Yield a separate session, in autocommit."""
    with psycopg.connect(dsn, autocommit=True, **parts) as connection:
        yield connection


def value(connection: psycopg.Connection, statement: str, *parameters: object) -> Any:
    """Return the only value that a statement returns."""
    row = connection.execute(statement, parameters).fetchone()
    assert row is not None
    return row[0]


def rows(connection: psycopg.Connection) -> list[tuple[int, int, int]]:
    """Return what pg_locks shows of the advisory locks of this very session, as it shows it: unsigned."""
    return connection.execute(
        "SELECT classid::bigint, objid::bigint, objsubid FROM pg_catalog.pg_locks"
        " WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid()"
        " AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())"
    ).fetchall()


def shown(key: LockKey) -> tuple[int, int, int]:
    """Return how pg_locks must show a key."""
    return key.value >> 32 & 0xFFFFFFFF, key.value & 0xFFFFFFFF, 1 if key.space == "bigint" else 2


def random_names(count: int) -> list[tuple[str, str]]:
    """Return namespaces and names of any assigned or unassigned code points, short and long, most of them not ASCII."""
    source = random.Random(5)

    def code_point() -> str:
        while True:
            char = chr(source.randrange(1, source.choice([0x80, 0x800, 0x10000, 0x110000])))
            if char != "\x1f" and unicodedata.category(char) != "Cs":
                return char

    def word(shortest: int) -> str:
        return "".join(code_point() for _ in range(source.randint(shortest, source.choice([1, 8, 40]))))

    return [(word(0) if source.random() < 0.5 else "", word(1)) for _ in range(count)]


@every_driver
def test_the_sql_of_random_names_gives_their_keys(dsn: str, driver: str) -> None:
    """`LockKey.sql` of any Unicode name is computed by the server to the same number as in Python, a quarter per driver."""
    mine = random_names(NAMES)[DRIVERS.index(driver) :: len(DRIVERS)]
    keys = [LockKey.of(name, namespace=namespace) for namespace, name in mine]
    # One SELECT has room for 1664 columns.
    batches = [keys[start : start + 1250] for start in range(0, len(keys), 1250)]

    def ask(connection: Connection) -> list[int]:
        asked = (connection.execute(select(*(key.sql.label(f"k{n}") for n, key in enumerate(b)))) for b in batches)
        return [number for result in asked for number in result.one()]

    assert run(dsn, driver, ask) == [key.value for key in keys]


@every_driver
def test_the_sql_of_a_ready_number_is_that_number(dsn: str, driver: str) -> None:
    """C025: raw keys and pairs at the edges of their range come back from the server unchanged, as bigint."""
    keys = [LockKey.raw(edge) for edge in EDGES] + [LockKey.pair(*pair) for pair in PAIRS]

    def ask(connection: Connection) -> list[Any]:
        return list(connection.execute(select(*(key.sql.label(f"k{n}") for n, key in enumerate(keys)))).one())

    assert run(dsn, driver, ask) == [key.value for key in keys]


@every_driver
@every_row("edge", EDGES)
def test_a_key_as_a_bound_expression_takes_the_bigint_form(dsn: str, driver: str, edge: int) -> None:
    """C025: small and large numbers lock the one-argument form on every driver, at the halves computed here."""
    key = LockKey.raw(edge)
    statement = select(text("classid::bigint, objid::bigint, objsubid")).select_from(text("pg_catalog.pg_locks"))
    mine = statement.where(text("locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid()"))

    def take(connection: Connection) -> list[Any]:
        assert connection.scalar(select(func.pg_catalog.pg_try_advisory_xact_lock(key.sql)))
        return [tuple(row) for row in connection.execute(mine)]

    assert run(dsn, driver, take) == [shown(key)]


def test_the_documented_recipe_gives_the_keys_of_10_000_random_names(dsn: str) -> None:
    """The SQL text for other languages, with bound parameters, computes what LockKey computes."""
    pairs = random_names(10_000)
    statement = f"SELECT {RECIPE.format(ns='n.ns', name='n.name')} FROM unnest(%s::text[], %s::text[]) AS n(ns, name)"
    with session(dsn) as connection:
        numbers = [
            row[0] for row in connection.execute(statement, [list(column) for column in zip(*pairs, strict=True)])
        ]
    assert numbers == [LockKey.of(name, namespace=namespace).value for namespace, name in pairs]


@pytest.mark.skipif(shutil.which("psql") is None, reason="there is no psql on PATH")
def test_the_documented_recipe_gives_the_vectors_in_psql(dsn: str) -> None:
    """C023: an operator who types the recipe into psql finds the frozen keys, quotes, controls and 10 kB included."""
    recipe = "SELECT " + RECIPE.format(ns=":'ns'", name=":'name'") + ";"
    for vector in VECTORS:
        done = subprocess.run(
            ["psql", "-XAtq", "-d", dsn, "-v", f"ns={vector['namespace']}", "-v", f"name={vector['name']}"],
            input=recipe,
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PGCLIENTENCODING": "UTF8"},
        )
        assert done.stdout.strip() == vector["value"], vector["note"]


def test_the_vectors_are_what_pg_locks_shows(dsn: str) -> None:
    """C117: a lock by the raw recipe is found under the halves in the data file and of the key computed here."""
    statement = f"SELECT pg_catalog.pg_try_advisory_lock({RECIPE.format(ns='%s::text', name='%s::text')})"
    with session(dsn) as connection:
        for vector in VECTORS:
            assert value(connection, statement, vector["namespace"], vector["name"])
            assert rows(connection) == [(vector["classid"], vector["objid"], 1)]
            assert rows(connection) == [shown(LockKey.of(vector["name"], namespace=vector["namespace"]))]
            connection.execute("SELECT pg_catalog.pg_advisory_unlock_all()")


@every_row("edge", EDGES)
def test_a_bigint_decodes_to_itself(dsn: str, edge: int) -> None:
    """C117: pg_locks shows halves unsigned; shifted and or-ed as bigint they give the signed key back."""
    key = LockKey.raw(edge)
    with session(dsn) as connection:
        assert value(connection, "SELECT pg_catalog.pg_try_advisory_lock(%s::bigint)", edge)
        assert rows(connection) == [shown(key)]
        decoded = "SELECT classid::bigint << 32 | objid::bigint FROM pg_catalog.pg_locks WHERE locktype = 'advisory'"
        assert value(connection, f"{decoded} AND pid = pg_catalog.pg_backend_pid()") == key.value


@every_row("pair", PAIRS)
def test_a_pair_decodes_to_itself(dsn: str, pair: tuple[int, int]) -> None:
    """C117: pg_locks shows both halves of a negative pair as LockKey.pair computes them, with objsubid 2."""
    key = LockKey.pair(*pair)
    with session(dsn) as connection:
        assert value(connection, "SELECT pg_catalog.pg_try_advisory_lock(%s::int, %s::int)", *pair)
        assert rows(connection) == [shown(key)]
        decoded = "SELECT classid::bigint << 32 | objid::bigint FROM pg_catalog.pg_locks WHERE locktype = 'advisory'"
        assert value(connection, f"{decoded} AND pid = pg_catalog.pg_backend_pid()") == key.value


def test_a_key_with_one_equal_half_is_another_lock(dsn: str) -> None:
    """C117: equal objid alone, equal classid alone and the pair of the same bits are three other locks, all granted."""
    key = LockKey.raw(-5)
    with session(dsn) as one, session(dsn) as two:
        assert value(one, "SELECT pg_catalog.pg_try_advisory_lock(%s::bigint)", key.value)
        assert not value(two, "SELECT pg_catalog.pg_try_advisory_lock(%s::bigint)", key.value)
        for other in (key.value + 2**32, key.value - 1):
            assert value(two, "SELECT pg_catalog.pg_try_advisory_lock(%s::bigint)", other)
        assert value(two, "SELECT pg_catalog.pg_try_advisory_lock(-1, -5)")
        assert [row for row in rows(two) if row == shown(key)] == []


def test_a_pair_and_the_bigint_of_its_bits_are_both_granted(dsn: str) -> None:
    """C028: (1, 2) and 2**32 + 2 are different locks, which only objsubid and LockKey.space distinguish."""
    pair, number = LockKey.pair(1, 2), LockKey.raw(2**32 + 2)
    assert pair.value == number.value
    assert pair != number
    with session(dsn) as one, session(dsn) as two:
        assert value(one, "SELECT pg_catalog.pg_try_advisory_lock(1, 2)")
        assert value(two, "SELECT pg_catalog.pg_try_advisory_lock(%s::bigint)", number.value)
        assert (rows(one), rows(two)) == ([(1, 2, 2)], [(1, 2, 1)])
        assert (shown(pair), shown(number)) == ((1, 2, 2), (1, 2, 1))


def test_another_database_of_the_cluster_has_other_locks(dsn: str) -> None:
    """C029: the same key is granted in two databases at once: advisory locks are per database."""
    key, name = LockKey.of(f"two databases {uuid4()}"), f"pgfence_test_other_{uuid4().hex}"
    with session(dsn) as one:
        one.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        try:
            with session(dsn, dbname=name) as two:
                assert value(one, "SELECT pg_catalog.pg_try_advisory_lock(%s::bigint)", key.value)
                assert value(two, "SELECT pg_catalog.pg_try_advisory_lock(%s::bigint)", key.value)
                assert rows(one) == rows(two) == [shown(key)]
        finally:
            one.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_another_role_and_another_address_have_the_same_locks(dsn: str, role: Callable[[], str]) -> None:
    """C029: a key excludes sessions of other roles and through other addresses of the database."""
    key, take = LockKey.of(f"two roles {uuid4()}"), "SELECT pg_catalog.pg_try_advisory_lock(%s::bigint)"
    with session(dsn) as one:
        assert value(one, take, key.value)
        with session(role()) as two:
            assert not value(two, take, key.value)
        sockets = value(one, "SHOW unix_socket_directories").split(",")[0].strip()
        for host in filter(None, ("127.0.0.1", "localhost", sockets)):
            try:
                other = psycopg.connect(dsn, host=host, hostaddr="", autocommit=True, connect_timeout=2)
            except psycopg.OperationalError:
                continue  # this server does not listen there
            with other:
                assert not same(one, other) or not value(other, take, key.value)


def same(one: psycopg.Connection, other: psycopg.Connection) -> bool:
    """Return whether two sessions are on one server and database: a container's port is not the port inside."""
    where = "SELECT system_identifier::text || current_database() FROM pg_catalog.pg_control_system()"
    return bool(value(one, where) == value(other, where))


@every_driver
@every_row("name", ["billing", "", "caf\u00e9 \U0001f418", "it's; -- %s :x", "x" * 10240])
def test_a_hashtext_key_is_the_lock_of_raw_sql(dsn: str, driver: str, name: str) -> None:
    """`hashtext_key` gives the very lock that `pg_advisory_lock(hashtext(name))` takes, negative hashes included."""
    key = run(dsn, driver, lambda connection: compat.hashtext_key(connection, name))
    assert key.space == "bigint"
    assert -(2**31) <= key.value < 2**31
    with session(dsn) as connection:
        assert value(connection, "SELECT pg_catalog.pg_try_advisory_lock(hashtext(%s))", name)
        assert rows(connection) == [shown(key)]


@pytest.mark.parametrize("driver", SYNC)
def test_hashtext_key_leaves_a_transaction_as_it_found_it(dsn: str, driver: str) -> None:
    """Outside a transaction the connection stays outside one; an open one continues with its work."""

    def work(connection: Connection) -> None:
        assert compat.hashtext_key(connection, "billing") == compat.hashtext_key(connection, "billing")
        assert not connection.in_transaction()
        connection.execute(text("SET LOCAL application_name = 'before'"))
        compat.hashtext_key(connection, "billing")
        assert connection.in_transaction()
        assert connection.scalar(text("SHOW application_name")) == "before"

    run(dsn, driver, work)


@pytest.mark.parametrize("driver", ASYNC)
def test_hashtext_key_is_awaited_on_an_async_connection(dsn: str, driver: str) -> None:
    """On an AsyncConnection the call is awaited, gives the same key and leaves no transaction behind."""
    expected = run(dsn, "psycopg", lambda connection: compat.hashtext_key(connection, "billing"))

    async def work() -> None:
        engine = create_async_engine(make_url(dsn).set(drivername=f"postgresql+{driver}"))
        async with engine.connect() as connection:
            assert await compat.hashtext_key(connection, "billing") == expected
            assert not connection.in_transaction()
            await connection.execute(text("SELECT 1"))
            await compat.hashtext_key(connection, "billing")
            assert connection.in_transaction()
        await engine.dispose()

    asyncio.run(work())


def test_settings_are_found_from_an_async_connection(dsn: str) -> None:
    """An AsyncConnection that is open leads to the settings of its engine."""

    async def work() -> str:
        engine = create_async_engine(make_url(dsn).set(drivername="postgresql+psycopg_async"))
        configure(engine, namespace="bank")
        async with engine.connect() as connection:
            found = config_of(connection).namespace
        await engine.dispose()
        return found

    assert asyncio.run(work()) == "bank"
