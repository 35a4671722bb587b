"""Operations in migrations: on the connection of a migration, as a script, reversed, and rendered."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from alembic.autogenerate import render_op_text
from alembic.autogenerate.api import AutogenContext
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from psycopg import sql
from sqlalchemy import Connection, MetaData, create_engine, text

from pgfence import schema
from pgfence._alembic import implementations, operations, renderers
from pgfence._sql.storage import VERSION, TableNames
from pgfence._sql.tables import is_installed
from pgfence.errors import SchemaError, TransactionStateError
from pgfence.lease import Lease
from support.revisions import Project, on_connection
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sqlalchemy import Engine

    from support.worlds import World

assert implementations
assert renderers

NO_TOKEN = "PF002"
COLUMNS = "book int NOT NULL, branch text NOT NULL, amount int NOT NULL DEFAULT 0, PRIMARY KEY (book, amount)"


async def perform(world: World, work: Callable[[Any], Any]) -> Any:
    """Hand `op` to some work, in one transaction on the driver of a world."""

    def body(connection: Connection) -> Any:
        answer = work(Operations(MigrationContext.configure(connection)))
        connection.commit()
        return answer

    return await on_connection(world, world.engine(), body)


@pytest.fixture
def place(admin: psycopg.Connection[Any]) -> Iterator[str]:
    """A schema, whose name has to be quoted, with a table "Entry" in it."""
    name = f"Own {secrets.token_hex(4)}"
    admin.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(name)))
    admin.execute(sql.SQL(f'CREATE TABLE {{}}."Entry" ({COLUMNS})').format(sql.Identifier(name)))
    yield name
    admin.execute("SET client_min_messages = warning")
    admin.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))


def names(admin: psycopg.Connection[Any], place: str) -> set[str]:
    """Return the tables, functions and triggers of a schema."""
    found = admin.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = %(in)s::regnamespace AND relkind IN ('r', 'p')"
        " UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = %(in)s::regnamespace"
        " UNION ALL SELECT tgname FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid"
        " WHERE c.relnamespace = %(in)s::regnamespace",
        {"in": f'"{place}"'},
    )
    return {name for (name,) in found}


def write(admin: psycopg.Connection[Any], place: str) -> None:
    """Write to the table without knowing of a fence."""
    entry = sql.Identifier(place, "Entry")
    admin.execute(sql.SQL("INSERT INTO {} VALUES (%s, 'x')").format(entry), [secrets.randbelow(2**30)])


# ------------------------------------------------------------ on a connection


async def test_an_installation_comes_and_goes_with_its_fence(
    world: World, place: str, admin: psycopg.Connection[Any]
) -> None:
    """Tables, functions and a fence are created on the migration's own connection, and dropped without a trace."""
    at: dict[str, Any] = {"schema": place, "pgfence_schema": place, "prefix": "a_"}

    def up(op: Any) -> None:
        op.create_pgfence(schema=place, prefix="a_", version=VERSION)
        op.add_fence("Entry", resource="close:{book}", **at)

    await perform(world, up)
    with pytest.raises(psycopg.errors.DatabaseError) as refused:
        write(admin, place)
    assert refused.value.sqlstate == NO_TOKEN
    await perform(world, lambda op: op.drop_fence("Entry", **at))
    write(admin, place)
    await perform(world, lambda op: op.drop_pgfence(schema=place, prefix="a_"))
    assert names(admin, place) == {"Entry"}


async def test_everything_may_be_repeated(world: World, place: str, admin: psycopg.Connection[Any]) -> None:
    """A migration that is replayed changes nothing, and rows and their tokens stay as they are."""

    def up(op: Any) -> None:
        op.create_pgfence(schema=place)
        op.add_fence("Entry", resource="books", schema=place, pgfence_schema=place)
        op.upgrade_pgfence(VERSION, VERSION, schema=place)

    await perform(world, up)
    admin.execute(sql.SQL("SELECT {}('x', 7)").format(sql.Identifier(place, "pgfence_enter_gate_v1")))
    before = names(admin, place)
    await perform(world, up)
    assert names(admin, place) == before
    gate = sql.Identifier(place, "pgfence_gate")
    assert admin.execute(sql.SQL("SELECT token FROM {}").format(gate)).fetchall() == [(7,)]
    await perform(world, lambda op: op.drop_fence("Entry", schema=place, pgfence_schema=place))
    await perform(world, lambda op: op.drop_fence("Entry", schema=place, pgfence_schema=place))


async def test_two_prefixes_fence_one_table_independently(
    world: World, place: str, admin: psycopg.Connection[Any]
) -> None:
    """Each installation has its own triggers, and dropping those of one leaves the other's."""

    def up(op: Any) -> None:
        for prefix in ("a_", "b_"):
            op.create_pgfence(schema=place, prefix=prefix)
            op.add_fence("Entry", resource="books", schema=place, pgfence_schema=place, prefix=prefix)

    await perform(world, up)
    await perform(world, lambda op: op.drop_fence("Entry", schema=place, pgfence_schema=place, prefix="a_"))
    await perform(world, lambda op: op.drop_pgfence(schema=place, prefix="a_"))
    assert {name for name in names(admin, place) if name.startswith("a_")} == set()
    with pytest.raises(psycopg.errors.DatabaseError, match="brought no token"):
        write(admin, place)


@pytest.mark.parametrize(
    ("directive", "error", "message"),
    [
        (
            lambda op, at: op.add_fence("Nowhere", resource="r", schema=at, pgfence_schema=at),
            ValueError,
            "does not exist",
        ),
        (lambda op, at: op.add_fence("Entry", resource="{page}", schema=at, pgfence_schema=at), ValueError, "'page'"),
        (lambda op, at: op.add_fence("Entry", resource="{a.b}", schema=at, pgfence_schema=at), ValueError, "braces"),
        (lambda op, at: op.add_fence("Entry", resource="r", schema=at, prefix="no_"), SchemaError, "--prefix no_"),
        (lambda op, at: op.create_pgfence(schema=at, version=99), ValueError, "not 99"),
        (lambda op, at: op.upgrade_pgfence(0, 1, schema=at), ValueError, "from 1 to .*not 0"),
        (lambda op, at: op.upgrade_pgfence(2, 1, schema=at, prefix="no_"), SchemaError, "no pgfence tables"),
        (lambda op, at: op.create_pgfence(schema=""), ValueError, "schema must not be empty"),
        (lambda op, at: op.create_pgfence(schema=at, version=True), ValueError, "not True"),
        (lambda op, at: op.add_fence(MetaData, resource="r"), TypeError, "must be a str"),
        (lambda op, at: op.add_fence("", resource="r"), ValueError, "must not be empty or contain NUL: ''"),
        (lambda op, at: op.drop_fence("T\0"), ValueError, "must not be empty or contain NUL"),
        (lambda op, at: op.drop_fence("Entry", schema=5), TypeError, "schema must be a str or None, not int"),
        (lambda op, at: op.drop_version_trigger("Entry", schema=""), ValueError, "schema must not be empty"),
        (lambda op, at: op.add_version_trigger("Entry", column=None, schema=at), TypeError, "column must be a str"),
        (lambda op, at: op.create_index_safely("ix", None, ["x"]), TypeError, "table must be a str"),
        (
            lambda op, at: op.create_index_safely("ix", "Entry", ["x"], schema=5),
            TypeError,
            "must be a str or None, not int",
        ),
        (lambda op, at: op.create_index_safely("ix", "Entry", []), ValueError, "needs at least one column"),
        (lambda op, at: op.drop_index_safely(None), TypeError, "index must be a str"),
    ],
)
async def test_what_cannot_be_done_is_reported_and_nothing_is_half_done(
    place: str, admin: psycopg.Connection[Any], dsn: str, directive: Any, error: type[Exception], message: str
) -> None:
    """A missing table or column, an unreadable resource or an unknown version end the migration with all it has done."""
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://", 1))
    with pytest.raises(error, match=message), engine.begin() as connection:
        op: Any = Operations(MigrationContext.configure(connection))
        op.create_pgfence(schema=place)
        directive(op, place)
    engine.dispose()
    assert names(admin, place) == {"Entry"}


@pytest.mark.parametrize(
    ("directive", "options", "trigger"),
    [
        ("add_fence", {"resource": "r"}, "pgfence_fence"),
        ("drop_fence", {}, "pgfence_fence"),
        ("add_version_trigger", {"column": "amount"}, "pgfence_version"),
        ("drop_version_trigger", {}, "pgfence_version"),
    ],
)
async def test_an_unrelated_trigger_with_the_name_is_kept(
    place: str,
    admin: psycopg.Connection[Any],
    engine: Engine,
    tmp_path: Path,
    dsn: str,
    directive: str,
    options: dict[str, Any],
    trigger: str,
) -> None:
    """Neither an operation nor its script replaces or drops another program's trigger that has our name."""
    admin.execute(
        sql.SQL(
            "CREATE TRIGGER {} BEFORE UPDATE ON {} FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()"
        ).format(sql.Identifier(trigger), sql.Identifier(place, "Entry"))
    )
    own = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://", 1))
    with pytest.raises(ValueError, match="unrelated trigger"), own.begin() as connection:
        op: Any = Operations(MigrationContext.configure(connection))
        op.create_pgfence(schema=place)
        getattr(op, directive)("Entry", schema=place, pgfence_schema=place, **options)
    own.dispose()
    script = script_of(engine, tmp_path, f"op.{directive}('Entry', schema={place!r}, **{options!r})")
    with pytest.raises(psycopg.errors.RaiseException, match="unrelated trigger"):
        admin.execute(script)
    admin.execute("ROLLBACK")
    assert names(admin, place) == {"Entry", trigger}


async def test_tables_are_not_dropped_while_they_are_used(
    world: World, place: str, admin: psycopg.Connection[Any]
) -> None:
    """A downgrade past a fenced table, or past a held lease or key, is rejected with what to do first."""

    def up(op: Any) -> None:
        op.create_pgfence(schema=place)
        op.add_fence("Entry", resource="books", schema=place, pgfence_schema=place)

    await perform(world, up)
    with pytest.raises(SchemaError, match=r"still fenced: .*Entry"):
        await perform(world, lambda op: op.drop_pgfence(schema=place))
    await perform(world, lambda op: op.drop_fence("Entry", schema=place, pgfence_schema=place))
    use(admin, place, "lease")
    with pytest.raises(SchemaError, match="the lease 'close' is held"):
        await perform(world, lambda op: op.drop_pgfence(schema=place))
    use(admin, place, "lease", ended=True)
    use(admin, place, "key")
    for down in (lambda op: op.drop_pgfence(schema=place), lambda op: op.upgrade_pgfence(2, 1, schema=place)):
        with pytest.raises(SchemaError, match="the key 'order-1' is held"):
            await perform(world, down)
    assert {"pgfence_lease", "pgfence_idempotency_key"} < names(admin, place)
    use(admin, place, "key", ended=True)
    await perform(world, lambda op: op.upgrade_pgfence(2, 1, schema=place))
    assert "pgfence_idempotency_key" not in names(admin, place)
    await perform(world, lambda op: op.drop_pgfence(schema=place))
    assert names(admin, place) == {"Entry"}


HELD = {
    "lease": "INSERT INTO {} (name, token, ttl, acquired_at, renewed_at, expires_at, free_at)"
    " SELECT 'close', 1, 60, now(), now(), now() + '60 s', now() + '60 s'",
    "key": "INSERT INTO {} (scope, key, status, locked_until, created_at, expires_at)"
    " SELECT 'orders', 'order-1', 'in_progress', now() + '60 s', now(), now() + '60 s'",
}
ENDED = {
    "lease": "UPDATE {} SET expires_at = now() - interval '1 s'",
    "key": "UPDATE {} SET locked_until = now() - interval '1 s'",
}


def use(admin: psycopg.Connection[Any], place: str, what: str, *, ended: bool = False) -> None:
    """Hold a lease or a key, or let it expire."""
    table = sql.Identifier(place, "pgfence_lease" if what == "lease" else "pgfence_idempotency_key")
    # Without the trigger that keeps a key from being committed before it has a result.
    with admin.transaction():
        admin.execute("SET LOCAL session_replication_role = replica")
        admin.execute(sql.SQL((ENDED if ended else HELD)[what]).format(table))


@pytest.mark.parametrize("what", HELD)
def test_a_script_drops_nothing_that_is_still_used(engine: Engine, tmp_path: Path, what: str) -> None:
    """Run while a lease or a key is held, what `--sql` prints of a downgrade ends with nothing dropped."""
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False), autocommit=True) as psql:
        psql.execute(script_of(engine, tmp_path, "op.create_pgfence()"))
        use(psql, "public", what)
        for directive in ("op.drop_pgfence()", "op.upgrade_pgfence(2, 1)")[: 1 if what == "lease" else 2]:
            with pytest.raises(psycopg.errors.RaiseException, match=f"the {what} '.*' is held: stop its holder first"):
                psql.execute(script_of(engine, tmp_path, directive))
            psql.execute("ROLLBACK")
        use(psql, "public", what, ended=True)
        for directive in ("op.upgrade_pgfence(2, 1)", "op.drop_pgfence()", "op.drop_pgfence()"):
            psql.execute(script_of(engine, tmp_path, directive))
        assert psql.execute("SELECT to_regclass('pgfence_lease')").fetchone() == (None,)


def test_tables_want_a_transaction(engine: Engine) -> None:
    """In an autocommit block they could be left incomplete, which is rejected."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        op: Any = Operations(MigrationContext.configure(connection))
        with pytest.raises(TransactionStateError, match="autocommit"):
            op.create_pgfence()


def test_another_database_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """On SQLite, where many run their tests, tables and fences are skipped, and an index is an ordinary one."""
    caplog.set_level("INFO")
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE entry (book int)"))
        op: Any = Operations(MigrationContext.configure(connection))
        op.create_pgfence()
        op.add_fence("entry", resource="{book}")
        op.create_index_safely("ix_entry_book", "entry", ["book"])
        assert connection.execute(text("SELECT count(*) FROM sqlite_master")).scalar_one() == 2
        op.drop_index_safely("ix_entry_book", "entry")
        assert connection.execute(text("SELECT count(*) FROM sqlite_master")).scalar_one() == 1
    engine.dispose()
    assert "the operation was skipped on sqlite" in caplog.text


# ------------------------------------------------------------ as a script


def script_of(engine: Engine, folder: Path, *directives: str) -> str:
    """Return the output of `alembic upgrade --sql` for some directives, without the part about Alembic's own table."""
    project = Project(folder / secrets.token_hex(4), engine, MetaData(), version_table=f"v_{secrets.token_hex(4)}")
    project.write("; ".join(directives))
    whole = project.sql()
    body = whole.partition("-- Running upgrade")[2].partition("\n")[2]
    return "BEGIN;\n" + body.partition("INSERT INTO v_")[0] + "COMMIT;"


KINDS = {
    "plain": f'CREATE TABLE "T %" ({COLUMNS})',
    "partitioned": f'CREATE TABLE "T %" ({COLUMNS}) PARTITION BY RANGE (book);'
    ' CREATE TABLE "T low" PARTITION OF "T %" FOR VALUES FROM (0) TO (10)',
    "inherited": f'CREATE TABLE "T %" ({COLUMNS}); CREATE TABLE "T low" () INHERITS ("T %")',
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resource", ["it's 100 % {{x}} $pgfence$ \\", "close:{book}:{branch}"])
def test_a_script_makes_the_same_triggers(engine: Engine, tmp_path: Path, dsn: str, kind: str, resource: str) -> None:
    """The output of `--sql`, run by psql, creates exactly the triggers of the operation, and drops them."""
    add = f"op.add_fence('T %', resource={resource!r})"
    create, drop = "op.create_pgfence()", "op.drop_fence('T %')"
    left = []
    with engine.begin() as connection:
        own = connection.connection.dbapi_connection
        assert isinstance(own, psycopg.Connection)
        own.execute(KINDS[kind])
        op: Any = Operations(MigrationContext.configure(connection))
        op.create_pgfence()
        op.add_fence("T %", resource=resource)
        left.append(triggers(own))
        op.drop_fence("T %")
        assert triggers(own) == []
        op.drop_pgfence()
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False), autocommit=True) as psql:
        psql.execute(script_of(engine, tmp_path, create, add, add))
        left.append(triggers(psql))
        psql.execute(script_of(engine, tmp_path, drop, "op.drop_pgfence()"))
        assert triggers(psql) == []
    assert left[0] == left[1] != []


def test_a_script_makes_the_same_version_trigger(engine: Engine, tmp_path: Path) -> None:
    """What `--sql` prints counts as the operation does, in the same column."""
    directive = """op.add_version_trigger('T', column='the "n"')"""
    left = []
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False), autocommit=True) as psql:
        psql.execute("""CREATE TABLE "T" (id int, "the ""n\"\"" int NOT NULL DEFAULT 1)""")
        with engine.begin() as connection:
            op: Any = Operations(MigrationContext.configure(connection))
            op.add_version_trigger("T", column='the "n"')
        left.append(triggers(psql))
        with engine.begin() as connection:
            op = Operations(MigrationContext.configure(connection))
            op.drop_version_trigger("T")
        assert triggers(psql) == []
        psql.execute(script_of(engine, tmp_path, directive, directive))
        left.append(triggers(psql))
        psql.execute("""INSERT INTO "T" VALUES (1); UPDATE "T" SET id = 2""")
        assert psql.execute('SELECT * FROM "T"').fetchall() == [(2, 2)]
        psql.execute(script_of(engine, tmp_path, "op.drop_version_trigger('T')"))
        assert triggers(psql) == []
    assert left[0] == left[1] != []


def triggers(connection: psycopg.Connection[Any]) -> list[Any]:
    return connection.execute(
        "SELECT pg_get_triggerdef(oid), obj_description(oid, 'pg_trigger') FROM pg_trigger"
        " WHERE NOT tgisinternal AND tgname ~ '^pgfence_(fence|version)' ORDER BY tgrelid::regclass::text, tgname"
    ).fetchall()


def test_a_script_of_a_resource_without_its_column_stops(engine: Engine, tmp_path: Path) -> None:
    """On a table without the column, or whose column has no unique text form, the script fails and creates nothing."""
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False), autocommit=True) as psql:
        psql.execute(f"CREATE TABLE entry ({COLUMNS}, at timestamptz)")
        for column in ("page", "at"):
            script = script_of(engine, tmp_path, f"op.create_pgfence(); op.add_fence('entry', resource='{{{column}}}')")
            with pytest.raises(psycopg.errors.RaiseException, match=f"needs a column {column} of entry"):
                psql.execute(script)
            psql.execute("ROLLBACK")
        assert triggers(psql) == []


# ------------------------------------------------------------ indexes


@pytest.mark.parametrize("per_migration", [True, False])
def test_an_index_is_built_over_what_an_interrupted_build_left(
    engine: Engine, tmp_path: Path, per_migration: bool
) -> None:
    """An INVALID index, which IF NOT EXISTS would take for a good one, is dropped and built again; a good one stays."""
    project = Project(tmp_path / "alembic", engine, MetaData(), transaction_per_migration=per_migration)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("CREATE TABLE entry (book int, branch text)"))
        connection.execute(text("INSERT INTO entry VALUES (1, 'a'), (1, 'b')"))
        with pytest.raises(Exception, match="duplicate"):
            connection.execute(text('CREATE UNIQUE INDEX CONCURRENTLY "IX" ON entry (book)'))
        assert indexes(engine) == [("IX", False)]
        connection.execute(text("DELETE FROM entry WHERE branch = 'b'"))
    project.write("op.create_index_safely('IX', 'entry', ['book'], unique=True)", "op.drop_index_safely('IX', 'entry')")
    project.upgrade()
    assert indexes(engine) == [("IX", True)]
    project.write("op.create_index_safely('IX', 'entry', ['book'], unique=True)")
    project.upgrade()
    assert indexes(engine) == [("IX", True)]
    project.downgrade()
    assert indexes(engine) == []


def indexes(engine: Engine) -> list[tuple[str, bool]]:
    asked = "SELECT indexrelid::regclass::text, indisvalid FROM pg_index WHERE indrelid = 'entry'::regclass ORDER BY 1"
    with engine.connect() as connection:
        return [(name.strip('"'), valid) for name, valid in connection.execute(text(asked))]


async def test_an_index_is_built_on_every_driver(world: World, place: str, admin: psycopg.Connection[Any]) -> None:
    """The block outside of a transaction works on async drivers under run_sync; repeated, the index stays as it is."""

    def up(op: Any) -> None:
        with op.get_context().begin_transaction(_per_migration=True):
            for _ in range(2):
                op.create_index_safely("IX", "Entry", ["branch", "book"], schema=place)

    await perform(world, up)
    made = "SELECT indexdef FROM pg_indexes WHERE schemaname = %s AND indexname = 'IX'"
    [(definition,)] = admin.execute(made, [place]).fetchall()
    assert definition.endswith("(branch, book)")

    def down(op: Any) -> None:
        with op.get_context().begin_transaction(_per_migration=True):
            op.drop_index_safely("IX", "Entry", schema=place)

    await perform(world, down)
    assert admin.execute(made, [place]).fetchall() == []


def test_an_index_in_a_callers_transaction_is_rejected(engine: Engine) -> None:
    """CONCURRENTLY cannot run in a transaction that Alembic did not begin: the error says what to do, nothing is built."""
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE entry (book int)"))
        op: Any = Operations(MigrationContext.configure(connection))
        for directive in (op.create_index_safely, op.drop_index_safely):
            with pytest.raises(TransactionStateError, match="Let Alembic begin it"):
                directive("ix", "entry", *([["book"]] if directive == op.create_index_safely else []))
        assert connection.scalar(text("SELECT count(*) FROM pg_index WHERE indrelid = 'entry'::regclass")) == 0


@pytest.mark.parametrize(
    "other", ["op.create_index('ix', 'entry', ['branch'])", "op.create_index('ix', 'entry', ['book'], unique=True)"]
)
def test_another_index_of_that_name_is_not_accepted(engine: Engine, tmp_path: Path, other: str) -> None:
    """An index on other columns, or a unique one instead of a plain one, ends the migration with both named."""
    project = Project(tmp_path / "alembic", engine, MetaData())
    project.write(f"op.execute('CREATE TABLE entry (book int, branch text)'); {other}")
    project.upgrade()
    project.write("op.create_index_safely('ix', 'entry', ['book'])")
    with pytest.raises(ValueError, match="there is already an index ix"):
        project.upgrade()


def test_an_index_may_stand_in_an_autocommit_block(engine: Engine, tmp_path: Path) -> None:
    """Several of them may share one block, of expressions too."""
    project = Project(tmp_path / "alembic", engine, MetaData())
    project.write("op.execute('CREATE TABLE entry (book int, branch text)')")
    project.write(
        "with op.get_context().autocommit_block():\n"
        "        op.create_index_safely('ix_1', 'entry', ['book'])\n"
        "        op.create_index_safely('ix_2', 'entry', [sa.text('lower(branch)')])"
    )
    project.upgrade()
    assert indexes(engine) == [("ix_1", True), ("ix_2", True)]


def test_a_script_builds_the_index_outside_of_a_transaction(engine: Engine, tmp_path: Path) -> None:
    """`--sql` ends the transaction, clears what is left of a build, and builds with CONCURRENTLY."""
    script = script_of(engine, tmp_path, "op.create_index_safely('ix', 'entry', ['book'])")
    steps = [
        script.rindex(step) for step in ("DO $pgfence$", "DROP INDEX", "CONCURRENTLY IF NOT EXISTS ix", "BEGIN;\n\n")
    ]
    assert [script.index("COMMIT;"), *steps] == sorted([script.index("COMMIT;"), *steps])


# ------------------------------------------------------------ written down, and reversed


def written(operation: Any) -> str:
    context = MigrationContext.configure(dialect_name="postgresql", opts={"alembic_module_prefix": "op."})
    return render_op_text(AutogenContext(context, autogenerate=False), operation)


EVERYTHING = [
    (operations.CreatePgfence(version=1), "op.create_pgfence(version=1)", "op.drop_pgfence()"),
    (
        operations.DropPgfence("locks", "a_", 1),
        "op.drop_pgfence(schema='locks', prefix='a_')",
        "op.create_pgfence(schema='locks', prefix='a_', version=1)",
    ),
    (operations.UpgradePgfence(1, 1, prefix="a_"), "op.upgrade_pgfence(1, 1, prefix='a_')", None),
    (
        operations.AddFence("T", resource="it's {x}", namespace="n", schema="s", pgfence_schema="p", prefix="a_"),
        "op.add_fence('T', resource=\"it's {x}\", namespace='n', schema='s', pgfence_schema='p', prefix='a_')",
        "op.drop_fence('T', schema='s', pgfence_schema='p', prefix='a_')",
    ),
    (
        operations.AddVersionTrigger("t", schema="s"),
        "op.add_version_trigger('t', schema='s')",
        "op.drop_version_trigger('t', schema='s')",
    ),
    (
        operations.DropVersionTrigger("t", column="C 1", prefix="a_"),
        "op.drop_version_trigger('t', column='C 1', prefix='a_')",
        "op.add_version_trigger('t', column='C 1', prefix='a_')",
    ),
    (operations.DropFence("t", resource="r"), "op.drop_fence('t')", "op.add_fence('t', resource='r')"),
    (
        operations.CreateIndexSafely("ix", "t", ["a"], schema="s", unique=True),
        "op.create_index_safely('ix', 't', ['a'], unique=True, schema='s')",
        "op.drop_index_safely('ix', table_name='t', schema='s')",
    ),
]


@every_row(("operation", "script", "back"), EVERYTHING)
def test_an_operation_is_written_as_it_is_called(operation: Any, script: str, back: str | None) -> None:
    """Each is written into a script with what it needs and no more, and its reverse likewise; no database is asked."""
    assert written(operation) == script
    assert written(operation.reverse()) == (back or script)
    assert written(operation.reverse().reverse()) == script
    assert operation.to_diff_tuple()
    assert operation.reverse().to_diff_tuple()


@every_row("operation", [operations.DropFence("t"), operations.DropIndexSafely("ix", "t")])
def test_what_does_not_say_what_was_there_cannot_be_reversed(operation: Any) -> None:
    """The drop of a fence or an index can be reversed only if the operation describes it."""
    with pytest.raises(ValueError, match="reversed"):
        operation.reverse()


# ------------------------------------------------------------ versions of the tables


@pytest.mark.parametrize("earlier", range(1, VERSION))
def test_tables_of_an_earlier_version_come_to_the_newest_and_back(engine: Engine, tmp_path: Path, earlier: int) -> None:
    """Rows stay, and a lease held across the way down stays held, with its token; what the newer brought goes with it."""
    at = f"from_, to = {earlier}, {VERSION}; "
    project = Project(tmp_path / "alembic", engine, MetaData())
    project.write(f"op.create_pgfence(version={earlier})", "op.drop_pgfence()")
    project.write(f"{at}op.upgrade_pgfence(from_, to)", f"{at}op.upgrade_pgfence(to, from_)")
    project.upgrade("+1")
    with engine.connect() as connection:
        assert versions_of(connection) == {earlier}
        connection.execute(text("SELECT pgfence_enter_gate_v1('gate', 7)"))
        connection.commit()
    lease = Lease(engine, "across", ttl=60)
    project.upgrade()
    with lease.hold() as held:
        with engine.connect() as connection:
            assert max(versions_of(connection)) == VERSION
        assert schema.create_all(engine) is None
        project.downgrade("-1")
        with engine.connect() as connection:
            assert versions_of(connection) == {earlier}
            assert connection.execute(text("SELECT resource, token FROM pgfence_gate")).all() == [("gate", 7)]
        held.renew()
        token = held.token
        with pytest.raises(SchemaError, match="the lease 'across' is held"):
            project.downgrade()
        project.upgrade()
        held.renew()
    with lease.hold() as held:
        assert held.token > token
    project.downgrade()


def versions_of(connection: Connection) -> set[int]:
    return set(connection.execute(text("SELECT version FROM pgfence_schema_version")).scalars())


def test_an_old_migration_is_content_with_newer_tables(engine: Engine) -> None:
    """Replayed where the newest tables are, the operation of an older version leaves them as they are."""
    with engine.begin() as connection:
        op: Any = Operations(MigrationContext.configure(connection))
        op.create_pgfence()
        op.create_pgfence(version=1)
        assert max(versions_of(connection)) == VERSION
        assert is_installed(connection, TableNames())
