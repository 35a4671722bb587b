"""`schema.add_fence` rejects writes outside the gate, on tables, partitions and rows of every kind."""

from __future__ import annotations

import inspect
import secrets
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import Column, Integer, MetaData, Table, event
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgfence import schema
from pgfence.config import configure
from pgfence.errors import SchemaError, TransactionStateError
from support.fences import forged
from support.installations import COMMENT
from support.transactions import connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.worlds import World

STALE, NO_TOKEN = "PF001", "PF002"
ENTER = "SELECT pgfence_enter_gates_v1(%s, %s)"
COLUMNS = "book int NOT NULL, branch text, amount int NOT NULL DEFAULT 0, PRIMARY KEY (book, amount)"

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]


@pytest.fixture
def books(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A table of entries, each in a book, whose name has to be quoted."""
    name = f"Books {secrets.token_hex(4)}"
    admin.execute(f'CREATE TABLE "{name}" ({COLUMNS})')
    yield name
    admin.execute(f'DROP TABLE IF EXISTS "{name}" CASCADE')


@pytest.fixture
def partitioned(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """The same, partitioned twice: low (book 0-9) and high, which has one partition of its own."""
    name = f"books_{secrets.token_hex(4)}"
    admin.execute(f"CREATE TABLE {name} ({COLUMNS}) PARTITION BY RANGE (book)")
    admin.execute(f"CREATE TABLE {name}_low PARTITION OF {name} FOR VALUES FROM (0) TO (10)")
    admin.execute(
        f"CREATE TABLE {name}_high PARTITION OF {name} FOR VALUES FROM (10) TO (20) PARTITION BY RANGE (book)"
    )
    admin.execute(f"CREATE TABLE {name}_top PARTITION OF {name}_high FOR VALUES FROM (10) TO (20)")
    yield name
    admin.execute(f"DROP TABLE {name}")


@pytest.fixture
def resource(name: str) -> str:
    """A resource that no other test uses."""
    return f"close {name[-12:]}"


@pytest.fixture
def engine(dsn: str) -> Iterator[Any]:
    """A sync engine, for functions without an async form."""
    from sqlalchemy import create_engine

    made = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield made
    made.dispose()


@pytest.fixture
def write(dsn: str) -> Callable[..., str | None]:
    """A function that runs statements in one transaction behind gates, and returns the SQLSTATE that refused them.

    `write(statement, ..., gates={resource: token})`.
    """

    def run(*statements: str, gates: dict[str, int] | None = None) -> str | None:
        try:
            with psycopg.connect(dsn) as raw:
                if gates:
                    raw.execute(ENTER, [list(gates), list(gates.values())])
                for statement in statements:
                    raw.execute(statement.encode())
        except psycopg.Error as error:
            return error.sqlstate
        return None

    return run


async def given(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def triggers(admin: psycopg.Connection[Any], table: str) -> list[Any]:
    return admin.execute(
        "SELECT oid::int, tgname, obj_description(oid, 'pg_trigger') FROM pg_trigger"
        " WHERE tgrelid = quote_ident(%s)::regclass ORDER BY tgname",
        [table],
    ).fetchall()


EVERY = {
    "insert": 'INSERT INTO "{0}" VALUES (1, NULL, 5), (1, NULL, 6)',
    "update": 'UPDATE "{0}" SET amount = amount + 7 WHERE book = 1',
    "upsert": 'INSERT INTO "{0}" VALUES (1, NULL, 1) ON CONFLICT (book, amount) DO UPDATE SET amount = 9',
    "nothing": 'INSERT INTO "{0}" VALUES (1, NULL, 1) ON CONFLICT DO NOTHING',
    "delete": 'DELETE FROM "{0}"',
    "cte": 'WITH w AS (DELETE FROM "{0}" RETURNING 1) SELECT * FROM w',
}


@pytest.mark.every_driver
async def test_a_fenced_table_rejects_writes_outside_the_gate(
    world: World, books: str, resource: str, write: Callable[..., str | None]
) -> None:
    """Every kind of statement without a gate is PF002, TRUNCATE too; behind the gate all of them pass."""
    engine = world.engine()
    statements = [statement.format(books) for statement in (*EVERY.values(), 'TRUNCATE "{0}"')]
    assert write(f'INSERT INTO "{books}" VALUES (1)') is None
    await given(schema.add_fence(engine, books, resource=resource))
    assert [write(statement) for statement in statements] == [NO_TOKEN] * len(statements)
    assert write(*statements, gates={resource: 3}) is None
    assert write(statements[0], gates={resource: 2}) == STALE
    assert write(statements[0], gates={resource + " of others": 1}) == NO_TOKEN


async def test_a_fence_by_row_asks_for_the_gate_of_each_row(
    world: World, books: str, resource: str, write: Callable[..., str | None]
) -> None:
    """A row needs its own gate; a row that moves needs both; TRUNCATE is always rejected."""
    await given(schema.add_fence(world.engine(), books, resource=resource + ":{book}:{branch}"))
    gates = {f"{resource}:1:a": 1, f"{resource}:2:a": 1}
    for book in (1, 2):
        assert write(f"INSERT INTO \"{books}\" VALUES ({book}, 'a', {book})", gates={f"{resource}:{book}:a": 1}) is None
    move = f'UPDATE "{books}" SET book = 3 - book'
    assert write(f'DELETE FROM "{books}"', gates={f"{resource}:1:a": 1}) == NO_TOKEN
    assert write(move, gates={f"{resource}:2:a": 1}) == NO_TOKEN
    assert write(move, gates=gates) is None
    assert write(f"UPDATE \"{books}\" SET branch = 'b' WHERE book = 1", gates=gates) == NO_TOKEN
    assert write(f'UPDATE "{books}" SET branch = NULL WHERE book = 1', gates=gates) == NO_TOKEN
    assert write(f'TRUNCATE "{books}"', gates=gates) == NO_TOKEN
    assert write(f'DELETE FROM "{books}"', gates=gates) is None


@pytest.mark.parametrize("statement", [name for name in EVERY if name != "nothing"])
async def test_by_row_each_kind_of_statement_is_rejected_without_its_gate(
    engine: Any, books: str, resource: str, write: Callable[..., str | None], statement: str
) -> None:
    """The gate of another row's resource does not permit the write."""
    assert write(f'INSERT INTO "{books}" VALUES (1, NULL, 1)') is None
    schema.add_fence(engine, books, resource=resource + ":{book}")
    assert write(EVERY[statement].format(books), gates={f"{resource}:2": 1}) == NO_TOKEN
    assert write(EVERY[statement].format(books), gates={f"{resource}:1": 1}) is None


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        ("json", """'{"a": "\\u0000"}'"""),
        ("json", """'{"a": "\\ud800"}'"""),
        ("json", "'1e400000'"),
        ("bytea", "decode(repeat('ab', 100000), 'hex')"),
    ],
)
def test_what_else_is_in_a_row_does_not_matter(
    engine: Any,
    books: str,
    resource: str,
    write: Callable[..., str | None],
    admin: psycopg.Connection[Any],
    kind: str,
    odd: str,
) -> None:
    """A JSON text that jsonb cannot hold, or a large value, beside the columns of the resource: the same results."""
    admin.execute(
        f'ALTER TABLE "{books}" ADD odd {kind}; ALTER TABLE "{books}" ALTER odd SET STORAGE EXTERNAL'.encode()
    )
    schema.add_fence(engine, books, resource=resource + "'s:{book}:{branch}")
    one, two = ({f"{resource}'s:{book}:a": 1} for book in (1, 2))
    for statement in (
        f"INSERT INTO \"{books}\" VALUES (1, 'a', 1, {odd})",
        f'UPDATE "{books}" SET amount = 2',
        f'UPDATE "{books}" SET odd = odd',
        f'UPDATE "{books}" SET odd = NULL',
        f'UPDATE "{books}" SET odd = {odd}',
    ):
        assert [write(statement, gates=gates) for gates in ({}, two, one)] == [NO_TOKEN, NO_TOKEN, None]
    move = f'UPDATE "{books}" SET book = 2'
    assert [write(move, gates=gates) for gates in (one, two, one | two)] == [NO_TOKEN, NO_TOKEN, None]
    assert write(f'UPDATE "{books}" SET branch = NULL', gates=two) == NO_TOKEN
    assert [write(f'DELETE FROM "{books}"', gates=gates) for gates in (one, two)] == [NO_TOKEN, None]


def test_the_row_after_triggers_and_generated_columns_counts(
    engine: Any, books: str, resource: str, write: Callable[..., str | None], admin: psycopg.Connection[Any]
) -> None:
    """Another trigger, whatever its name, moves the row to another book; a column is computed from another one."""
    admin.execute(f'ALTER TABLE "{books}" ADD shelf int GENERATED ALWAYS AS (book / 10) STORED')
    admin.execute(
        f'CREATE FUNCTION "{books}"() RETURNS trigger LANGUAGE plpgsql AS'
        " $$ BEGIN NEW.book := NEW.book + 10; RETURN NEW; END $$;"
        f'CREATE TRIGGER zzz BEFORE INSERT ON "{books}" FOR EACH ROW EXECUTE FUNCTION "{books}"()'
    )
    schema.add_fence(engine, books, resource=resource + ":{book}:{shelf}")
    assert write(f'INSERT INTO "{books}" VALUES (5)', gates={f"{resource}:5:0": 1}) == NO_TOKEN
    assert write(f'INSERT INTO "{books}" VALUES (5)', gates={f"{resource}:15:1": 1}) is None
    admin.execute(f'DROP FUNCTION "{books}" CASCADE')


def test_copy_is_rejected_like_the_rest(engine: Any, dsn: str, books: str, resource: str) -> None:
    """COPY is rejected by both kinds of fence."""
    for one in (resource, resource + ":{book}"):
        schema.add_fence(engine, books, resource=one)
        with pytest.raises(psycopg.DatabaseError) as caught, psycopg.connect(dsn) as raw:
            with raw.cursor().copy(f'COPY "{books}" (book) FROM STDIN'.encode()) as copy:
                copy.write_row([1])
        assert caught.value.sqlstate == NO_TOKEN


@pytest.mark.parametrize("by_row", [False, True])
def test_partitions_are_fenced_by_whatever_name_they_are_written(
    engine: Any, partitioned: str, resource: str, write: Callable[..., str | None], by_row: bool
) -> None:
    """The parent, a partition, a partition of a partition, one that came later, a row that moves, TRUNCATE of each."""
    schema.add_fence(engine, partitioned, resource=resource + (":{book}" if by_row else ""))
    assert write(f"CREATE TABLE {partitioned}_later PARTITION OF {partitioned} FOR VALUES FROM (20) TO (30)") is None
    gates = {f"{resource}:{book}": 1 for book in (1, 11, 21)} if by_row else {resource: 1}
    for table, book in (("", 1), ("_low", 1), ("", 11), ("_high", 11), ("_top", 11), ("", 21), ("_later", 21)):
        insert = f"INSERT INTO {partitioned}{table} VALUES ({book})"
        assert write(insert) == NO_TOKEN
        assert write(insert, gates={f"{resource}:2": 1}) == NO_TOKEN
        assert write(insert, f"DELETE FROM {partitioned}{table}", gates=gates) is None
    moved = (f"INSERT INTO {partitioned} VALUES (1)", f"UPDATE {partitioned} SET book = 11")
    assert write(*moved, gates=gates) is None
    assert write(f"UPDATE {partitioned} SET book = 1") == NO_TOKEN
    for table in ("", "_low", "_high", "_top"):
        assert write(f"TRUNCATE {partitioned}{table}") == NO_TOKEN
        assert write(f"TRUNCATE {partitioned}{table}", gates=gates) == (NO_TOKEN if by_row else None)


def test_a_partition_alone_can_be_fenced(
    engine: Any, partitioned: str, resource: str, write: Callable[..., str | None]
) -> None:
    """Writes through its parent and by its own name are rejected; its neighbours stay open."""
    schema.add_fence(engine, f"{partitioned}_low", resource=resource)
    for table in ("", "_low"):
        assert write(f"INSERT INTO {partitioned}{table} VALUES (1)") == NO_TOKEN
    assert write(f"INSERT INTO {partitioned} VALUES (11)") is None
    assert write(f"TRUNCATE {partitioned}") == NO_TOKEN
    assert write(f"TRUNCATE {partitioned}", gates={resource: 1}) is None


async def test_a_second_call_changes_nothing_and_another_resource_replaces(
    world: World, books: str, resource: str, admin: psycopg.Connection[Any], write: Callable[..., str | None]
) -> None:
    """The triggers stay the same ones; with other columns they are others; one switched off is put right."""
    engine = world.engine()
    await given(schema.add_fence(engine, books, resource=resource + ":{book}"))
    first = triggers(admin, books)
    assert [row[1:] for row in first] == [("pgfence_fence", COMMENT), ("pgfence_fence_truncate", COMMENT)]
    await given(schema.add_fence(engine, books, resource=resource + ":{book}"))
    assert triggers(admin, books) == first
    admin.execute(f'ALTER TABLE "{books}" DISABLE TRIGGER pgfence_fence')
    await given(schema.add_fence(engine, books, resource=resource + ":{book}"))
    assert write(f'INSERT INTO "{books}" VALUES (1)') == NO_TOKEN
    await given(schema.add_fence(engine, books, resource=resource))
    assert [row[1:] for row in triggers(admin, books)] == [("pgfence_fence", COMMENT)]
    assert write(f'TRUNCATE "{books}"', gates={resource: 1}) is None


def fence_impatiently(engine: Any, table: str, resource: str) -> int:
    """Fence a table without waiting, and return how many statements that took."""
    with engine.begin() as own:
        own.exec_driver_sql("SET LOCAL lock_timeout = '1s'")
        sent: list[str] = []
        event.listen(own, "before_cursor_execute", lambda *args: sent.append(args[2]))
        schema.add_fence(own, table, resource=resource)
    return len(sent)


def test_for_a_new_partition_only_what_is_missing_is_made(
    engine: Any, partitioned: str, resource: str, admin: psycopg.Connection[Any], dsn: str
) -> None:
    """Beside readers of the whole table and a writer of another partition; three of them take no more statements than one."""
    resource += ":{book}"
    schema.add_fence(engine, partitioned, resource=resource)
    tables = [partitioned + end for end in ("", "_low", "_high", "_top")]
    before, counts, after = [triggers(admin, table) for table in tables], [], iter(range(20, 30))
    with psycopg.connect(dsn) as other:
        other.execute(ENTER, [[resource.format(book=1)], [1]])
        other.execute(f"INSERT INTO {partitioned}_low VALUES (1)".encode())
        for new in (["a"], ["b", "c", "d"]):
            for end, book in zip(new, after, strict=False):
                made = (
                    f"CREATE TABLE {partitioned}_{end} (LIKE {partitioned}); ALTER TABLE {partitioned} ATTACH PARTITION"
                )
                admin.execute(f"{made} {partitioned}_{end} FOR VALUES FROM ({book}) TO ({book + 1})".encode())
            other.execute(f"SELECT * FROM {partitioned}_top".encode())
            counts.append(fence_impatiently(engine, partitioned, resource))
            found = [row[1:] for end in new for row in triggers(admin, f"{partitioned}_{end}")]
            assert found == [("pgfence_fence", None), ("pgfence_fence_truncate", COMMENT)] * len(new)
    assert [triggers(admin, table) for table in tables] == before
    assert counts[0] == counts[1]


def test_another_resource_keeps_no_reader_out(
    engine: Any, books: str, partitioned: str, resource: str, dsn: str, write: Callable[..., str | None]
) -> None:
    """One kind of fence takes the place of the other beside a reader in no hurry, and on all partitions."""
    for table in (books, partitioned):
        for end in ("", ":a", ":{book}", ":{branch}"):
            with psycopg.connect(dsn) as reader:
                reader.execute(f'SELECT * FROM "{table}"'.encode())
                fence_impatiently(engine, table, resource + end)
            gate = (resource + end).format(book=1, branch="x")
            insert = f"INSERT INTO \"{table}\" VALUES (1, 'x', {len(end)})"
            assert (write(insert), write(insert, gates={gate: 1})) == (NO_TOKEN, None)
            assert write(f'TRUNCATE "{table}"') == NO_TOKEN
    fence_impatiently(engine, books, resource)
    assert write(f'TRUNCATE "{books}"', gates={resource: 1}) is None


async def test_dropping_a_fence_removes_its_triggers_and_may_be_repeated(
    world: World, books: str, partitioned: str, resource: str, admin: psycopg.Connection[Any]
) -> None:
    """After drop_fence() no trigger is left, also on partitions, and a second call does nothing."""
    engine = world.engine()
    for table in (books, partitioned):
        await given(schema.add_fence(engine, table, resource=resource + ":{book}"))
        for _ in range(2):
            await given(schema.drop_fence(engine, table))
    for table in (books, partitioned, f"{partitioned}_low", f"{partitioned}_top"):
        assert triggers(admin, table) == []


async def test_the_tables_cannot_be_dropped_under_a_fence(
    world: World, books: str, resource: str, name: str, admin: psycopg.Connection[Any]
) -> None:
    """`drop_all` names the table that would be left without its functions; without the fence it works."""
    engine = world.engine()
    configure(engine, schema=f"s{name[-12:]}")
    await given(schema.create_all(engine))
    await given(schema.add_fence(engine, f"public.{books}", resource=resource))
    with pytest.raises(SchemaError, match="drop_fence") as caught:
        await given(schema.drop_all(engine))
    assert books in caught.value.command
    await given(schema.drop_fence(engine, f"public.{books}"))
    await given(schema.drop_all(engine))
    admin.execute(f"DROP SCHEMA s{name[-12:]}")


# ---------------------------------------------------------------- what a table and a resource may be


async def test_a_table_may_be_a_name_a_table_or_a_mapped_class(
    world: World, books: str, resource: str, admin: psycopg.Connection[Any]
) -> None:
    """A name, a Table or a mapped class adds the same triggers."""

    class Base(DeclarativeBase):
        pass

    class Book(Base):
        __tablename__ = books
        __table_args__ = ({"schema": "public"},)
        book: Mapped[int] = mapped_column(primary_key=True)

    engine = world.engine()
    seen = set()
    for table in (books, f"public.{books}", Table(books, MetaData(), Column("book", Integer)), Book, Book.__table__):
        await given(schema.add_fence(engine, table, resource=resource))
        seen.add(str(triggers(admin, books)))
    assert len(seen) == 1


async def test_a_tables_schema_is_translated_like_in_every_statement(
    world: World, books: str, resource: str, admin: psycopg.Connection[Any]
) -> None:
    """`schema_translate_map` applies to the schema of a Table."""
    table = Table(books, MetaData(schema="tenant"), Column("book", Integer))
    engine = world.engine(execution_options={"schema_translate_map": {"tenant": "public"}})
    await given(schema.add_fence(engine, table, resource=resource))
    assert len(triggers(admin, books)) == 1


async def test_a_namespace_is_part_of_the_resource(
    world: World, books: str, resource: str, write: Callable[..., str | None]
) -> None:
    """The gate is that of a lease in the configured namespace."""
    engine = world.engine()
    configure(engine, namespace="shop")
    await given(schema.add_fence(engine, books, resource=resource))
    insert = f'INSERT INTO "{books}" VALUES (1)'
    assert write(insert, gates={resource: 1}) == NO_TOKEN
    assert write(insert, gates={f"shop\x1f{resource}": 1}) is None


@pytest.mark.parametrize("wrong", [None, 5, object(), int, Column("a", Integer)])
def test_an_argument_that_is_not_a_table_is_rejected(engine: Any, wrong: Any) -> None:
    """The error for an argument that is not a table says what a table can be."""
    with pytest.raises(TypeError, match="a Table or a mapped class"):
        schema.add_fence(engine, wrong, resource="r")


async def test_a_table_that_is_not_there_is_named(world: World, books: str, admin: psycopg.Connection[Any]) -> None:
    """A missing table, a view or a sequence is rejected with its name."""
    engine = world.engine()
    admin.execute(f'CREATE VIEW "{books} view" AS SELECT * FROM "{books}"')
    for call, message in (
        (lambda: schema.add_fence(engine, "nowhere", resource="r"), "table 'nowhere' does not exist"),
        (lambda: schema.drop_fence(engine, "no.where"), r"table 'no\.where' does not exist"),
        (lambda: schema.add_fence(engine, f"{books} view", resource="r"), "fence the tables on which it is based"),
    ):
        with pytest.raises(ValueError, match=message):
            await given(call())


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("resource", "message"),
    [
        ("close:{nothing}", "does not have"),
        ("close:{ctid}", "does not have"),
        ("close:{at}", "timestamp without time zone, whose values"),
        ("close:{price}", "numeric, whose values"),
        ("close:{padded}", "character, whose values"),
    ],
)
async def test_a_column_that_cannot_name_a_resource_is_rejected(
    world: World, books: str, admin: psycopg.Connection[Any], resource: str, message: str
) -> None:
    """Unknown, of the system, or of a type whose values are written in more than one way."""
    admin.execute(f'ALTER TABLE "{books}" ADD at timestamp, ADD price numeric, ADD padded char(5)')
    with pytest.raises(ValueError, match=message):
        await given(schema.add_fence(world.engine(), books, resource=resource))


def test_columns_of_every_usable_type_are_spelled_as_python_does(
    engine: Any, books: str, resource: str, write: Callable[..., str | None], admin: psycopg.Connection[Any]
) -> None:
    """Text, integers, uuid, date, an enum, a domain over text: `str()` of the value is what the gate is called."""
    kind = f"kind_{secrets.token_hex(4)}"
    admin.execute(f"CREATE TYPE {kind} AS ENUM ('big one'); CREATE DOMAIN {kind}_d AS varchar(9)")
    admin.execute(
        f"ALTER TABLE \"{books}\" ADD u uuid DEFAULT '00000000-0000-0000-0000-00000000000A', ADD d date DEFAULT"
        f" '2026-04-01', ADD s smallint DEFAULT -3, ADD b bigint DEFAULT 1234567890123, ADD k {kind} DEFAULT 'big one',"
        f" ADD v {kind}_d DEFAULT 'a\"b', ADD t text DEFAULT 'é '"
    )
    admin.execute(f"ALTER DATABASE {admin.info.dbname} SET datestyle = 'SQL, DMY'")
    try:
        schema.add_fence(engine, books, resource=resource + "|{u}|{d}|{s}|{b}|{k}|{v}|{t}|{{}}")
        gate = resource + '|00000000-0000-0000-0000-00000000000a|2026-04-01|-3|1234567890123|big one|a"b|é |{}'
        assert write(f'INSERT INTO "{books}" VALUES (1)', gates={gate: 1}) is None
        assert write(f'INSERT INTO "{books}" VALUES (2)', gates={resource: 1}) == NO_TOKEN
    finally:
        admin.execute(f"ALTER DATABASE {admin.info.dbname} RESET datestyle")
        admin.execute(f'DROP TABLE "{books}"; DROP TYPE {kind}; DROP DOMAIN {kind}_d')


def test_quotes_and_backslashes_in_a_resource_are_text(
    engine: Any, books: str, resource: str, write: Callable[..., str | None], admin: psycopg.Connection[Any]
) -> None:
    """A resource is stored unchanged, with either meaning of a backslash."""
    odd = resource + " it's \\' 100 % \\\\"
    for setting in ("on", "off"):
        admin.execute(f"ALTER DATABASE {admin.info.dbname} SET standard_conforming_strings = {setting}")
        engine.dispose()
        try:
            schema.add_fence(engine, books, resource=odd)
        finally:
            admin.execute(f"ALTER DATABASE {admin.info.dbname} RESET standard_conforming_strings")
        assert write(f'INSERT INTO "{books}" VALUES (1)', f'DELETE FROM "{books}"', gates={odd: 1}) is None
        schema.drop_fence(engine, books)


# ---------------------------------------------------------------- rights, and what is missing


async def test_without_pgfences_functions_the_command_is_named(world: World, books: str, name: str) -> None:
    """Without pgfence's functions, add_fence() raises an error that names `pgfence install`."""
    engine = world.engine()
    configure(engine, schema="public", prefix="nothing_")
    with pytest.raises(SchemaError, match="pgfence install --schema public --prefix nothing_"):
        await given(schema.add_fence(engine, f"public.{books}", resource=name))


@pytest.mark.every_driver
async def test_only_its_owner_can_fence_a_table(world: World, books: str, name: str, role: Callable[..., str]) -> None:
    """A role that does not own the table gets an error with the server's reason."""
    engine = world.engine(dsn=role())
    with pytest.raises(SchemaError, match=f"{books}. Try again as its owner") as caught:
        await given(schema.add_fence(engine, books, resource=name))
    assert caught.value.command == ""


@pytest.mark.every_driver
async def test_a_fence_is_part_of_the_callers_transaction(
    world: World, books: str, name: str, admin: psycopg.Connection[Any]
) -> None:
    """After the caller's rollback the fence does not exist, and in autocommit it is rejected."""
    async with connection(world, world.engine()) as open_connection:
        await given(schema.add_fence(open_connection, books, resource=name))
        await given(open_connection.rollback())
    assert triggers(admin, books) == []
    async with connection(world, world.engine(isolation_level="AUTOCOMMIT")) as open_connection:
        with pytest.raises(TransactionStateError):
            await given(schema.add_fence(open_connection, books, resource=name))


def test_the_search_path_of_a_writer_does_not_change_the_gate(engine: Any, dsn: str, books: str, resource: str) -> None:
    """The triggers find pgfence's tables by schema, so a temporary table of their name has no effect."""
    schema.add_fence(engine, books, resource=resource)
    with psycopg.connect(dsn) as raw:
        raw.execute(ENTER, [[resource], [5]])
        raw.execute(
            "CREATE TEMPORARY TABLE pgfence_gate AS SELECT %s AS resource, 1::bigint AS token, now() AS updated_at",
            [resource],
        )
        raw.execute("SET LOCAL search_path = pg_temp, pg_catalog")
        raw.execute(f"SELECT {forged(resource, 1)}".encode())
        with pytest.raises(psycopg.DatabaseError) as caught:
            raw.execute(f'INSERT INTO public."{books}" VALUES (1)'.encode())
        assert caught.value.sqlstate == STALE
        raw.rollback()
