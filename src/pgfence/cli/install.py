"""`pgfence install`: makes tables and server functions, or prints the script that does."""

from __future__ import annotations

from typing import Annotated

import typer

from pgfence import schema as tables
from pgfence.cli.codes import CommandExit, MisuseError
from pgfence.cli.options import Dsn, EnginePath
from pgfence.cli.report import Console, choose_code
from pgfence.cli.server import open_engine
from pgfence.config import DEFAULT
from pgfence.errors import PgfenceError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "install",
        epilog="Exit codes: 0 all is there; 64 misuse; 69 unreachable; 78 not allowed, or not as it was made.",
    )(install)


def install(
    dsn: Dsn = None,
    engine: EnginePath = None,
    schema: Annotated[
        str | None, typer.Option(help="Where; made if it is missing. Default: the first of the search path.")
    ] = None,
    prefix: Annotated[str | None, typer.Option(help="Of the names of tables and functions. Default: pgfence_.")] = None,
    sql: Annotated[bool, typer.Option("--sql", help="Print the script for psql and ask no server.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing when all is well.")] = False,
) -> None:
    """Make the tables that leases, fences, slots and idempotency keys need. Locks need none. A second time changes nothing.

    The server is named by --dsn, --engine, DATABASE_URL, or PGSERVICE, PGHOST and the other variables of libpq.
    """
    if sql and (dsn or engine):
        raise MisuseError("--sql asks no server: give it without --dsn and --engine")
    if sql:
        print(_build_script(schema, prefix), end="")
        return
    with open_engine(dsn, engine, schema=schema, prefix=prefix) as target:
        try:
            tables.create_all(target)
        except PgfenceError as error:
            Console().warn(str(error))
            raise CommandExit(choose_code(error)) from None
    Console(quiet=quiet).tell("tables and functions are there")


def _build_script(schema: str | None, prefix: str | None) -> str:
    try:
        return tables.sql(schema=schema, prefix=DEFAULT.prefix if prefix is None else prefix)
    except ValueError as error:
        raise MisuseError(f"--schema, --prefix: {error}") from None
