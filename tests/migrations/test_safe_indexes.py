"""`create_index_safely` beside existing objects: the same index stays, the remains of a build are replaced, others are an error."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

TABLE = 'CREATE TABLE entry (id int PRIMARY KEY, book int, "Or der" int, branch text, closed bool)'

SAME: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "unique": (["book"], {"unique": True}),
    "quoted, of several": (["Or der", "branch"], {}),
    "partial": (["book"], {"unique": True, "postgresql_where": text("NOT closed AND branch <> 'a:b %'")}),
    "compared by a column": (["book"], {"postgresql_where": sa.column("book") > 3}),
    "of expressions": ([text("lower(branch)"), text("book DESC")], {}),
    "of a function": ([sa.func.lower(sa.column("branch"))], {}),
    "with more columns": (["book"], {"postgresql_include": ["branch"], "postgresql_with": {"fillfactor": 50}}),
    "of another method": (["branch"], {"postgresql_using": "hash"}),
    "of another operator class": (["branch"], {"postgresql_ops": {"branch": "text_pattern_ops"}}),
    "naming its table": (
        [text("lower(entry.branch)")],
        {"postgresql_where": text("entry.closed AND entry IS NOT NULL")},
    ),
    "with a comment": (["book"], {"postgresql_where": text("closed -- and counted; $pgfence$")}),
}

OTHERS = {
    "CREATE INDEX ix ON entry (book)": (["book"], {"unique": True}),
    "CREATE UNIQUE INDEX ix ON entry (book) WHERE NOT closed": (["book"], {"unique": True}),
    "CREATE UNIQUE INDEX ix ON entry (book) WHERE closed": (["book"], SAME["partial"][1]),
    "CREATE INDEX ix ON entry USING hash (book)": (["book"], {}),
    "CREATE INDEX ix ON entry (book) INCLUDE (branch)": (["book"], {}),
    "CREATE INDEX ix ON entry (id)": ([text("book DESC")], {}),
    "CREATE INDEX ix ON entry (book DESC)": (["book"], {}),
    'CREATE INDEX ix ON entry (branch COLLATE "C")': (["branch"], {}),
    "ALTER TABLE entry ADD CONSTRAINT ix UNIQUE (book) DEFERRABLE": (["book"], {"unique": True}),
    "ALTER TABLE entry ADD CONSTRAINT ix EXCLUDE (book WITH =)": (["book"], {}),
    "CREATE TABLE ix (book int)": (["book"], {}),
    "CREATE VIEW ix AS SELECT 1 AS book": (["book"], {}),
    "CREATE TABLE other (book int); CREATE INDEX ix ON other (book)": (["book"], {}),
    "CREATE INDEX ix ON entry (book) WHERE public.entry.closed": (
        ["book"],
        {"postgresql_where": text("public.entry.closed")},
    ),
}


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """A connection in autocommit to a database with one table."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as opened:
        opened.exec_driver_sql(TABLE)
        yield opened


def build(connection: Connection, name: str | None, columns: list[Any], **options: Any) -> None:
    op: Any = Operations(MigrationContext.configure(connection))
    op.create_index_safely(name, "entry", columns, **options)


def indexes(connection: Connection, schema: str = "public") -> list[tuple[Any, ...]]:
    """Return the indexes of the table that are no primary key: oid, name, valid."""
    asked = (
        "SELECT indexrelid, indexrelid::regclass::text, indisvalid FROM pg_index"
        f" WHERE NOT indisprimary AND indrelid = '{schema}.entry'::regclass"
    )
    return [tuple(row) for row in connection.exec_driver_sql(asked)]


@pytest.mark.parametrize("kind", SAME)
def test_the_same_index_stays(connection: Connection, kind: str) -> None:
    """Built twice it is the same one, in any notation; nothing else is left behind."""
    columns, options = SAME[kind]
    build(connection, "ix %", columns, **options)
    before = indexes(connection)
    assert [(name, valid) for _, name, valid in before] == [('"ix %"', True)]
    build(connection, "ix %", columns, **options)
    assert indexes(connection) == before
    assert connection.exec_driver_sql("SELECT to_regclass('pg_temp.entry')").scalar() is None


@pytest.mark.parametrize("other", OTHERS)
def test_a_doubtful_index_is_reported_and_stays(connection: Connection, other: str) -> None:
    """An index that differs, a table or a view of that name ends the migration; it is not taken for the wanted one."""
    connection.exec_driver_sql(other)
    before = indexes(connection)
    columns, options = OTHERS[other]
    with pytest.raises(ValueError, match=r"there is already (an index ix|an object named ix)"):
        build(connection, "ix", columns, **options)
    assert indexes(connection) == before


def test_an_index_that_names_a_table_in_quotes_stays(connection: Connection) -> None:
    """Capitals, spaces and quotation marks in the schema, the table and the index."""
    connection.exec_driver_sql('CREATE SCHEMA "Odd One"; ALTER TABLE entry SET SCHEMA "Odd One"')
    connection.exec_driver_sql('ALTER TABLE "Odd One".entry RENAME TO "En ""Try"')
    op: Any = Operations(MigrationContext.configure(connection))
    for _ in range(2):
        op.create_index_safely(
            'I "X', 'En "Try', ["id"], schema="Odd One", postgresql_where=text('"En ""Try"."Or der" > 1')
        )
    assert connection.exec_driver_sql("SELECT count(*) FROM pg_indexes WHERE indexname = 'I \"X'").scalar() == 1


def test_an_incomparable_index_is_accepted_by_its_definition(connection: Connection) -> None:
    """No other table has rows of the type that the function takes; the error says how the server describes the index."""
    connection.exec_driver_sql("CREATE FUNCTION f(entry) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT ($1).book'")
    build(connection, "ix", [text("f(entry)")], unique=True)
    before = indexes(connection)
    with pytest.raises(
        ValueError,
        match=r"does not exist; the existing index is UNIQUE USING btree \(f\(entry\.\*\)\)\): if the two indexes are the same,",
    ):
        build(connection, "ix", [text("f(entry)")], unique=True)
    build(connection, "ix", [text("f(entry.*)")], unique=True)
    assert indexes(connection) == before


def test_an_error_that_is_not_about_the_index_is_raised_unchanged(connection: Connection) -> None:
    """A comparison that runs into `statement_timeout` does not say that the index differs."""
    columns, options = SAME["naming its table"]
    build(connection, "ix", columns, **options)
    connection.exec_driver_sql("SET statement_timeout = '100ms'")
    with connection.engine.begin() as other:
        other.exec_driver_sql("LOCK TABLE entry")
        with pytest.raises(DBAPIError, match="statement timeout"):
            build(connection, "ix", columns, **options)


def test_the_error_says_what_the_two_are(connection: Connection) -> None:
    """Both are written down in the server's words."""
    connection.exec_driver_sql("CREATE UNIQUE INDEX ix ON entry (book) WHERE NOT closed")
    with pytest.raises(ValueError, match=r"\(book\) WHERE \(NOT closed\), and not UNIQUE USING btree \(book\)\)"):
        build(connection, "ix", ["book"], unique=True)


@pytest.mark.parametrize("name", [None, "ix_entry_book"])
@pytest.mark.parametrize("schema", ["public", "tenant"])
def test_the_remains_of_a_build_are_found_by_name_and_schema(
    connection: Connection, name: str | None, schema: str
) -> None:
    """A naming convention makes the name, and a `schema_translate_map` the schema; an INVALID index there is built again."""
    if schema == "tenant":
        connection.exec_driver_sql("CREATE SCHEMA tenant; ALTER TABLE entry SET SCHEMA tenant")
        connection = connection.execution_options(schema_translate_map={None: "tenant"})
    connection.exec_driver_sql(f"INSERT INTO {schema}.entry VALUES (1, 1), (2, 1)")
    with pytest.raises(IntegrityError):
        build(connection, name, ["book"], unique=True)
    assert [valid for _, _, valid in indexes(connection, schema)] == [False]
    connection.exec_driver_sql(f"DELETE FROM {schema}.entry WHERE id = 2")
    build(connection, name, ["book"], unique=True)
    assert [valid for _, _, valid in indexes(connection, schema)] == [True]


def test_a_partitioned_table_is_rejected_before_a_commit(engine: Engine) -> None:
    """The transaction of the migration goes on as it was; an index that is there already, over all partitions, stays."""
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"transaction_per_migration": True})
        op: Any = Operations(context)
        with pytest.raises(ValueError, match="for each partition"), context.begin_transaction(_per_migration=True):
            op.execute("CREATE TABLE entry (id int, book int) PARTITION BY RANGE (id)")
            op.create_index_safely("ix", "entry", ["book"])
        assert connection.exec_driver_sql("SELECT to_regclass('entry')").scalar() is None
        connection.rollback()
        with context.begin_transaction(_per_migration=True):
            op.execute("CREATE TABLE entry (id int, book int) PARTITION BY RANGE (id)")
            op.create_index("ix", "entry", ["book"])
            op.create_index_safely("ix", "entry", ["book"])


def test_a_role_that_cannot_compare_gets_an_error(connection: Connection) -> None:
    """A role that may not create temporary tables gets an error, not a success."""
    connection.exec_driver_sql("CREATE INDEX ix ON entry (book)")
    role, database = f"no_temp_{secrets.token_hex(4)}", f'DATABASE "{connection.engine.url.database}"'
    connection.exec_driver_sql(f"REVOKE TEMP ON {database} FROM PUBLIC; CREATE ROLE {role}")
    connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA public TO {role}; SET ROLE {role}")
    try:
        with pytest.raises(ValueError, match="may differ from the one to create .*temporary"):
            build(connection, "ix", [text("book ASC")])
    finally:
        connection.exec_driver_sql(
            f"RESET ROLE; GRANT TEMP ON {database} TO PUBLIC; DROP OWNED BY {role}; DROP ROLE {role}"
        )
