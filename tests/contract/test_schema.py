"""`schema.create_all`, `check` and `drop_all` create, verify and drop the tables, and name what differs."""

from __future__ import annotations

import inspect
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import MetaData, create_engine, text
from sqlalchemy import inspect as looked_at
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from pgfence import schema
from pgfence.config import configure
from pgfence.errors import SchemaError, StandbyError, TransactionStateError, UnreachableError, UnsupportedServerError
from support import installations as tables
from support.installations import TableNames, build_grants, table_names_of, translate_error
from support.transactions import connection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.worlds import World

pytestmark = pytest.mark.twins

TABLES = {
    *("lease", "gate", "checkpoint", "audit", "slot", "schema_version", "idempotency_key"),
    *("semaphore", "permit_waiter", "rate_limit", "rate_take", "resign_request"),
    *("partition_set", "partition_member", "lock_name"),
}
TAKE = "SELECT granted, token FROM {} (%s, gen_random_uuid()::text, 10, 0, 0, NULL, 'o', 'h', 1, 'p', NULL, 'lease')"


@pytest.fixture
def place(admin: psycopg.Connection[Any], name: str) -> Iterator[TableNames]:
    """A schema that does not exist yet, and a prefix that must be quoted."""
    here = TableNames(f"Tenant {name[-12:]}", 'p%"')
    yield here
    admin.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(here.schema or "")))


def engine_at(world: World, place: TableNames, **kwargs: Any) -> Any:
    engine = world.engine(**kwargs)
    configure(engine, schema=place.schema, prefix=place.prefix)
    return engine


def made(admin: psycopg.Connection[Any], place: TableNames) -> tuple[set[str], int]:
    """Return the tables of a place without their prefix, and how many functions it has."""
    found = admin.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", [place.schema]).fetchall()
    count = admin.execute(
        "SELECT count(*) FROM pg_proc WHERE pronamespace = to_regnamespace(quote_ident(%s))", [place.schema]
    ).fetchone()
    return {name.removeprefix(place.prefix) for (name,) in found}, count[0] if count else 0


def take(admin: psycopg.Connection[Any], place: TableNames, name: str) -> Any:
    """Acquire a lease with the plain function; return whether it was granted, and the token."""
    function = sql.SQL(place.name("acquire_lease_v2").replace("%", "%%"))  # type: ignore[arg-type]
    return admin.execute(sql.SQL(TAKE).format(function), [name]).fetchone()


async def given(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


@pytest.mark.every_driver
async def test_create_all_creates_everything_and_may_be_repeated(
    world: World, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """create_all() creates schema, tables and functions, and a second call keeps their rows."""
    engine = engine_at(world, place)
    await given(schema.create_all(engine))
    assert made(admin, place) == (TABLES, len(tables.list_functions(place)))
    assert take(admin, place, "a") == (True, 1)
    await given(schema.create_all(engine))
    assert take(admin, place, "a") == (False, 1)


async def test_drop_all_leaves_nothing_and_may_be_repeated(
    world: World, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """After `drop_all` neither a table nor a function is left, and the schema stays."""
    engine = engine_at(world, place)
    await given(schema.create_all(engine))
    for _ in range(2):
        await given(schema.drop_all(engine))
        assert made(admin, place) == (set(), 0)


async def test_on_a_connection_it_is_part_of_the_callers_transaction(
    world: World, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """After the caller's rollback, nothing was created."""
    async with connection(world, engine_at(world, place)) as open_connection:
        await given(schema.create_all(open_connection))
        await given(open_connection.rollback())
    assert made(admin, place) == (set(), 0)


@pytest.mark.every_driver
async def test_autocommit_is_rejected_on_a_connection_not_on_an_engine(
    world: World, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """All or nothing needs a transaction: the caller's Connection has none, a Connection of pgfence gets one."""
    engine = engine_at(world, place, isolation_level="AUTOCOMMIT")
    async with connection(world, engine) as open_connection:
        with pytest.raises(TransactionStateError, match="Pass the engine"):
            await given(schema.create_all(open_connection))
    await given(schema.create_all(engine))
    assert made(admin, place)[0] == TABLES


async def test_a_schema_per_tenant_by_schema_translate_map(
    world: World, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """One engine, an `execution_options` copy for each tenant: each has its own tables and its own tokens."""
    engine = world.engine()
    configure(engine, schema="tenant", prefix=place.prefix)
    other = TableNames(f"{place.schema} 2", place.prefix)
    try:
        for one in (place, other):
            await given(schema.create_all(engine.execution_options(schema_translate_map={"tenant": one.schema})))
            assert made(admin, one)[0] == TABLES
        assert [take(admin, one, "a") for one in (place, other, other)] == [(True, 1), (True, 1), (False, 1)]
    finally:
        admin.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(other.schema or "")))


async def test_a_connections_own_translate_map_counts(world: World, place: TableNames) -> None:
    """The map of one Connection names the tenant, on top of what its engine says."""
    async with connection(world, engine_at(world, place)) as open_connection:
        options = open_connection.execution_options(schema_translate_map={place.schema: "elsewhere"})
        await given(options)
        assert table_names_of(open_connection) == TableNames("elsewhere", place.prefix)


async def test_without_a_schema_the_search_path_decides_once(
    world: World, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """Created in the first schema of the search path, and then found also by a path that begins elsewhere."""
    admin.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(place.schema or "")))
    engine = world.engine()
    configure(engine, prefix=place.prefix)
    path = postgresql.dialect().identifier_preparer.quote_identifier(place.schema or "")  # type: ignore[no-untyped-call]
    for search_path in (path, f"pg_temp, public, {path}"):
        async with connection(world, engine) as open_connection:
            await given(open_connection.execute(text(f"SET LOCAL search_path = {search_path}")))
            await given(schema.create_all(open_connection))
            await given(open_connection.commit())
    assert made(admin, place) == (TABLES, len(tables.list_functions(place)))
    assert admin.execute("SELECT to_regclass(%s)", [TableNames("public", place.prefix).name("lease")]).fetchone() == (
        None,
    )
    # A writer whose search path knows nothing of it meets the same tables.
    assert take(admin, place, "a") == (True, 1)


async def test_a_search_path_that_leads_nowhere_says_what_to_do(world: World, place: TableNames) -> None:
    """If the search path contains no existing schema, the error names `configure`."""
    async with connection(world, world.engine()) as open_connection:
        await given(open_connection.execute(text("SET LOCAL search_path = nowhere")))
        with pytest.raises(
            SchemaError,
            match=r"^database '.*' has no usable schema on the search path 'nowhere': .* the USAGE privilege .*configure\(engine, schema=",
        ):
            await given(schema.create_all(open_connection))


def test_callers_that_start_together_create_the_tables_once(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """Eight callers run `create_all` at the same moment: all of them return, and the tables were created once."""
    together = threading.Barrier(8)

    def create() -> None:
        engine = world_engine(dsn, place)
        try:
            engine.connect().close()
            together.wait(30)
            schema.create_all(engine)
        finally:
            engine.dispose()

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(create) for _ in range(8)]:
            done.result()
    assert made(admin, place)[0] == TABLES


# ---------------------------------------------------------------- what is there already


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("ALTER TABLE {lease} ALTER expires_at TYPE timestamp", "lease.expires_at is timestamp without time zone"),
        ("ALTER TABLE {lease} DROP evicted", "lease.evicted is missing"),
        ("ALTER TABLE {gate} ALTER token TYPE integer", "gate.token is integer"),
    ],
)
def test_columns_that_install_does_not_alter_come_with_the_statement(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any], harm: str, message: str
) -> None:
    """A naive timestamp, a missing column, another type: the message has the ALTER TABLE, and what dropping would lose."""
    error = harmed(dsn, place, admin, harm)
    assert message in str(error)
    assert f"in database {dsn.rpartition('/')[2]!r}, schema {place.schema!r}" in str(error)
    assert "Do not drop them instead: fencing tokens would start again at 1" in str(error)
    assert error.command.startswith("ALTER TABLE")
    admin.execute(error.command.encode())
    with world_engine(dsn, place).connect() as repaired:
        assert tables.verify(repaired, place) is None
    repaired.engine.dispose()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("DROP TABLE {checkpoint}", r"incomplete: checkpoint is missing\. .*creates what is missing"),
        (
            "DROP TABLE {lease}",
            "is created again is empty: lease loses fencing tokens, so the tokens start again at 1",
        ),
        ("ALTER TABLE {lease} DROP kind", r"incomplete: lease\.kind is missing\. .*creates what is missing$"),
        ("DELETE FROM {schema_version}", "version 0"),
    ],
)
def test_what_install_repairs_is_said_and_repaired(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any], harm: str, message: str
) -> None:
    """A missing table, a column that an upgrade adds, no version: the message names the command and what is lost."""
    error = harmed(dsn, place, admin, harm)
    assert re.search(message, str(error))
    assert f"in database {dsn.rpartition('/')[2]!r}, schema {place.schema!r}" in str(error)
    assert error.command == place.command
    engine = world_engine(dsn, place)
    schema.create_all(engine)
    with engine.connect() as repaired:
        assert tables.verify(repaired, place) is None
    engine.dispose()


def harmed(dsn: str, place: TableNames, admin: psycopg.Connection[Any], harm: str) -> SchemaError:
    """Create everything, damage it, and return what the check says."""
    here = world_engine(dsn, place)
    schema.create_all(here)
    with here.connect() as open_connection:
        assert tables.verify(open_connection, place) is None
    names = {table: sql.SQL(place.name(table)) for table in TABLES}  # type: ignore[arg-type]
    admin.execute(sql.SQL(harm).format(**names))
    with here.connect() as open_connection:
        error = tables.verify(open_connection, place)
    here.dispose()
    assert error is not None
    return error


def world_engine(dsn: str, place: TableNames, role: str | None = None) -> Any:
    engine = create_engine(f"postgresql+psycopg://{(role or dsn).split('://', 1)[1]}")
    configure(engine, schema=place.schema, prefix=place.prefix)
    return engine


async def test_tables_that_differ_are_not_altered(
    world: World, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """`create_all` over tables with a naive timestamp raises, and leaves them as they are."""
    engine = engine_at(world, place)
    await given(schema.create_all(engine))
    lease = sql.SQL(place.name("lease"))  # type: ignore[arg-type]
    admin.execute(sql.SQL("ALTER TABLE {} ALTER renewed_at TYPE timestamp").format(lease))
    with pytest.raises(SchemaError, match=r"renewed_at is timestamp without time zone .*in its own zone"):
        await given(schema.create_all(engine))


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize(
    "missing", ["DROP FUNCTION {release_lease_v1}", "DROP TABLE {audit}; DELETE FROM {schema_version}"]
)
async def test_what_is_missing_is_created_again(
    world: World, place: TableNames, admin: psycopg.Connection[Any], missing: str
) -> None:
    """A missing function or table is created again, and the rest keeps its rows."""
    engine = engine_at(world, place)
    await given(schema.create_all(engine))
    take(admin, place, "a")
    names = {name: sql.SQL(place.name(name)) for name in (*TABLES, "release_lease_v1")}  # type: ignore[arg-type]
    admin.execute(sql.SQL(missing).format(**names))
    await given(schema.create_all(engine))
    assert made(admin, place) == (TABLES, len(tables.list_functions(place)))
    assert take(admin, place, "a") == (False, 1)


def test_a_newer_version_is_good_enough(dsn: str, place: TableNames, admin: psycopg.Connection[Any]) -> None:
    """Functions keep their names, so tables of a later release serve this one too."""
    engine = world_engine(dsn, place)
    schema.create_all(engine)
    admin.execute(f"INSERT INTO {place.name('schema_version')} (version) VALUES (99)".encode())
    with engine.connect() as open_connection:
        assert tables.verify(open_connection, place) is None
    schema.create_all(engine)
    engine.dispose()


@pytest.mark.every_driver
async def test_nothing_there_is_an_error_that_names_the_command(world: World, place: TableNames) -> None:
    """The check of a place without tables raises what `translate_error` explains."""
    async with connection(world, engine_at(world, place)) as open_connection:
        with pytest.raises(DBAPIError) as caught:
            if world.is_async:
                await open_connection.run_sync(tables.verify, place)
            else:
                await world.call(tables.verify, open_connection, place)
    error = translate_error(caught.value, place)
    assert isinstance(error, SchemaError)
    assert f"pgfence install --schema '{place.schema}' --prefix 'p%\"'" in str(error)


@pytest.mark.every_driver
async def test_no_server_is_an_unreachable_error(world: World) -> None:
    """Without a listening server the error is typed, names the address, and shows no password."""
    engine = world.engine(dsn="postgresql://somebody:hunter2@127.0.0.1:1/d")
    with pytest.raises(UnreachableError, match=r"(?s)127\.0\.0\.1:1/d.*Nothing was created") as caught:
        await given(schema.create_all(engine))
    assert "hunter2" not in str(caught.value)


@pytest.mark.every_driver
async def test_a_server_that_takes_no_writes_is_a_standby_error(world: World, role: Callable[..., str]) -> None:
    """A standby, or a role in read-only mode, raises StandbyError."""
    engine = world.engine(dsn=role({"default_transaction_read_only": "on"}))
    configure(engine, schema="nowhere")
    with pytest.raises(StandbyError, match="standby"):
        await given(schema.create_all(engine))


def test_other_servers_and_drivers_are_rejected_by_name(dsn: str) -> None:
    """Another database, an old PostgreSQL and an argument that is not an engine are named in the error."""
    with pytest.raises(UnsupportedServerError, match="sqlite"):
        schema.create_all(create_engine("sqlite://"))
    old = world_engine(dsn, TableNames("nowhere"))
    old.connect().close()
    old.dialect.server_version_info = (13, 4)
    with pytest.raises(UnsupportedServerError, match=r"this server is 13\.4"):
        schema.create_all(old)
    old.dispose()
    with pytest.raises(TypeError, match="expected an Engine or AsyncEngine"):
        schema.create_all(Session(old))  # type: ignore[call-overload]


# ---------------------------------------------------------------- rights


@pytest.mark.every_driver
async def test_a_role_that_may_not_create_tables_gets_the_command(
    world: World, place: TableNames, role: Callable[..., str]
) -> None:
    """The error contains the server's reason and the command, which another role must run."""
    engine = engine_at(world, place, dsn=role())
    with pytest.raises(SchemaError, match="permission denied for .* as a role with the missing privilege") as caught:
        await given(schema.create_all(engine))
    assert caught.value.sqlstate == "42501"
    assert caught.value.command == place.command


async def test_dropping_tables_of_another_role_does_not_advise_to_install(
    world: World, place: TableNames, role: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """Only the owner can drop the tables, so no command is advised."""
    await given(schema.create_all(engine_at(world, place)))
    least = role()
    admin.execute(f'GRANT USAGE ON SCHEMA "{place.schema}" TO {least.split("//")[1].split(":")[0]}'.encode())
    with pytest.raises(SchemaError, match=r"must be owner of .*\. Try again as its owner$") as caught:
        await given(schema.drop_all(engine_at(world, place, dsn=least)))
    assert caught.value.command == ""


async def test_a_version_trigger_without_its_function_names_the_missing_privilege(
    world: World, place: TableNames, role: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """Installing the tables would not create the function, so it is not advised. A role that gets the privilege can add it."""
    await given(schema.create_all(engine_at(world, place)))
    least = role()
    name, table = least.split("//")[1].split(":")[0], f'"{place.schema}".paper'
    admin.execute(f"CREATE TABLE {table} (version bigint NOT NULL); ALTER TABLE {table} OWNER TO {name}".encode())
    admin.execute(f'GRANT USAGE ON SCHEMA "{place.schema}" TO {name}'.encode())
    engine = engine_at(world, place, dsn=least)
    with pytest.raises(SchemaError, match=r"Try again as a role with the missing privilege$") as caught:
        await given(schema.add_version_trigger(engine, f"{place.schema}.paper"))
    assert caught.value.command == ""
    admin.execute(f'GRANT CREATE ON SCHEMA "{place.schema}" TO {name}'.encode())
    await given(schema.add_version_trigger(engine, f"{place.schema}.paper"))


@pytest.mark.every_driver
async def test_a_role_with_the_listed_rights_only_can_use_everything(
    world: World, place: TableNames, role: Callable[..., str], admin: psycopg.Connection[Any]
) -> None:
    """The GRANTs are enough for leases, gates, tokens, and for `create_all` where all is there; to evict needs one more."""
    await given(schema.create_all(engine_at(world, place)))
    least = role()
    who = least.split("//")[1].split(":")[0]
    for statement in build_grants(place, who):
        admin.execute(statement.encode())
    await given(schema.create_all(engine_at(world, place, dsn=least)))
    lease = "gen_random_uuid()::text"
    with psycopg.connect(least, autocommit=True) as user:
        assert take(user, place, "a") == (True, 1)
        for call in (
            f"{place.name('enter_gates_v1')}(ARRAY['a'], ARRAY[1])",
            f"{place.name('save_checkpoint_v1')}('a', 1, '{{}}')",
            f"{place.name('renew_leases_v1')}(ARRAY['a'], ARRAY[{lease}], ARRAY[1], ARRAY[10.0])",
            f"{place.name('release_lease_v1')}('a', {lease}, 1)",
            f"{place.name('forget_lease_v1')}('a', {lease})",
            f"{place.name('lock_with_token_v2')}(pg_backend_pid(), 1, 'b', 0, 'h', 1)",
            "pg_advisory_unlock_all()",
        ):
            user.execute(f"SELECT {call}".encode())
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            user.execute(f"DELETE FROM {place.name('lease')}".encode())
        evict = f"SELECT * FROM {place.name('evict_lease_v2')}('a', 'me', 'because', NULL)".encode()
        with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught:
            user.execute(evict)
        error = translate_error(caught.value, place)
        assert isinstance(error, SchemaError)
        admin.execute(error.command.replace("<role>", who).encode())
        assert user.execute(evict).fetchall() == [(1, 2)]


@pytest.mark.twins
@pytest.mark.matrix
@pytest.mark.parametrize("missing", range(3))
async def test_each_listed_right_is_needed(
    world: World, place: TableNames, role: Callable[..., str], admin: psycopg.Connection[Any], missing: int
) -> None:
    """Without any one of them an operation fails, and the error is a SchemaError with a GRANT."""
    await given(schema.create_all(engine_at(world, place)))
    least = role()
    statements = build_grants(place, least.split("//")[1].split(":")[0])
    assert len(statements) == 3
    for statement in statements[:missing] + statements[missing + 1 :]:
        admin.execute(statement.encode())
    with pytest.raises(psycopg.errors.InsufficientPrivilege) as caught, psycopg.connect(least, autocommit=True) as user:
        take(user, place, "a")
        user.execute(tables.build_check(place).encode())
    error = translate_error(caught.value, place)
    assert isinstance(error, SchemaError)
    assert error.command.startswith("GRANT ")


# ---------------------------------------------------------------- in a MetaData, as a script


def test_the_tables_live_in_the_users_metadata_once() -> None:
    """They take the schema of the MetaData unless one is given, and a second call returns the same ones."""
    metadata = MetaData(schema="app")
    first = schema.tables(metadata)
    assert {table.fullname for table in first} == {f"app.pgfence_{name}" for name in TABLES}
    assert [id(table) for table in schema.tables(metadata)] == [id(table) for table in first]
    assert {table.schema for table in schema.tables(metadata, schema="other", prefix="x_")} == {"other"}


@pytest.mark.parametrize(("schema_name", "prefix"), [("", "p_"), (None, "p" * 41), (None, "é" * 21), ("a\0", "p_")])
def test_a_place_that_has_no_usable_names_is_rejected(schema_name: str | None, prefix: str) -> None:
    """An unusable schema or prefix is rejected by `configure` and by the functions of `schema`."""
    for call in (
        lambda: configure(create_engine("postgresql+psycopg://"), schema=schema_name, prefix=prefix),
        lambda: schema.sql(schema=schema_name, prefix=prefix),
        lambda: schema.tables(MetaData(), schema=schema_name, prefix=prefix),
    ):
        with pytest.raises(ValueError, match=r"(schema|prefix) "):
            call()


def test_the_longest_prefix_is_cut_nowhere(dsn: str, place: TableNames, admin: psycopg.Connection[Any]) -> None:
    """No name of pgfence is longer than the server keeps, and a fence with it is found again."""
    here = TableNames(place.schema, "p" * 40)
    engine = world_engine(dsn, here)
    schema.create_all(engine)
    assert made(admin, here) == (TABLES, len(tables.list_functions(here)))
    admin.execute(sql.SQL("CREATE TABLE {}.books (book int)").format(sql.Identifier(here.schema or "")))
    for _ in range(2):
        schema.add_fence(engine, f"{here.schema}.books", resource="{book}")
        found = admin.execute("SELECT oid, tgname FROM pg_trigger WHERE tgname ~ '^p{40}fence'").fetchall()
    assert {name for _, name in found} == {"p" * 40 + "fence", "p" * 40 + "fence_truncate"}
    engine.dispose()


def test_the_metadata_and_the_database_agree(dsn: str, place: TableNames) -> None:
    """What the database has after `create_all` is what the Tables say, column by column."""
    engine = world_engine(dsn, place)
    schema.create_all(engine)
    found = looked_at(engine)
    for table in schema.tables(MetaData(), schema=place.schema, prefix=place.prefix):
        columns = found.get_columns(table.name, schema=place.schema)
        assert [(c["name"], c["nullable"]) for c in columns] == [(c.name, c.nullable) for c in table.columns]
        primary = found.get_pk_constraint(table.name, schema=place.schema)["constrained_columns"]
        assert primary == [column.name for column in table.primary_key]
    engine.dispose()


def test_rows_that_change_often_have_room_on_their_page(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """Leases, gates and slots are updated without touching an index."""
    engine = world_engine(dsn, place)
    schema.create_all(engine)
    engine.dispose()
    found = admin.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident(%s))"
        " AND 'fillfactor=50' = ANY(reloptions)",
        [place.schema],
    )
    assert {name.removeprefix(place.prefix) for (name,) in found} == {
        *("lease", "gate", "slot"),
        *("semaphore", "permit_waiter", "rate_limit", "rate_take", "partition_member"),
    }


@pytest.mark.parametrize("table", ["lease", "gate"])
@pytest.mark.parametrize("token", [0, -1])
def test_no_row_can_have_a_token_below_one(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any], table: str, token: int
) -> None:
    """A CHECK constraint rejects a token below 1 from every writer."""
    engine = world_engine(dsn, place)
    schema.create_all(engine)
    engine.dispose()
    take(admin, place, "a")
    admin.execute(f"SELECT {place.name('enter_gates_v1')}(ARRAY['a'], ARRAY[1])".encode())
    with pytest.raises(psycopg.errors.CheckViolation):
        admin.execute(f"UPDATE {place.name(table)} SET token = {token}".encode())


def test_the_script_makes_the_same_and_may_run_twice(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """`sql()` through a plain connection: `create_all` finds nothing left to do."""
    script = schema.sql(schema=place.schema, prefix=place.prefix)
    for _ in range(2):
        admin.execute(script.encode())
    engine = world_engine(dsn, place)
    with engine.connect() as open_connection:
        assert tables.is_installed(open_connection, place)
    engine.dispose()
    assert take(admin, place, "a") == (True, 1)


def test_a_repeated_script_neither_waits_nor_blocks(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any]
) -> None:
    """Run again beside an open transaction with a key, and itself not yet committed, it lets others claim keys and take leases."""
    script = schema.sql(schema=place.schema, prefix=place.prefix)
    admin.execute(script.encode())
    claim = sql.SQL(f"SELECT {place.name('claim_key_v1').replace('%', '%%')}('s', %s, NULL, 60, 0)")  # type: ignore[arg-type]
    with psycopg.connect(dsn) as business, psycopg.connect(dsn) as installer, psycopg.connect(dsn) as other:
        business.execute(claim, ["one"])
        for session in (installer, other):
            session.execute("SET lock_timeout = '3s'")
        installer.execute(script.partition("BEGIN;")[2].rpartition("COMMIT;")[0].encode())
        assert take(other, place, "a") == (True, 1)
        assert other.execute(claim, ["two"]).fetchone() == ("fresh",)
        for session in (business, installer, other):
            session.rollback()


def test_tables_in_the_users_metadata_can_be_created_in_its_tests() -> None:
    """With SQLite in tests `metadata.create_all` passes; pgfence does not work there."""
    metadata = MetaData()
    schema.tables(metadata)
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    assert set(looked_at(engine).get_table_names()) == set(metadata.tables)
    engine.dispose()
