"""`pgfence install`: create tables and server functions, or print the script that creates them."""

from __future__ import annotations

import click
from sqlalchemy.exc import DBAPIError

from pgfence import schema as tables
from pgfence._admin.connection import translate_statement_error
from pgfence.cli import options
from pgfence.cli.codes import MisuseError
from pgfence.cli.parser import Command, Option
from pgfence.cli.report import Console, exit_on_error
from pgfence.cli.server import check_names, open_engine
from pgfence.config import DEFAULT


@click.command(
    "install",
    short_help="Create pgfence's tables and functions.",
    cls=Command,
    examples={
        "pgfence install": "Create what is missing, in the first schema on the search path",
        "pgfence install --schema locks": "Create the tables in a separate schema",
        "pgfence install --sql | psql shop": "Print the script, and run it with psql",
    },
    codes=[
        ("0", "Everything is installed."),
        ("64", "Misuse."),
        ("69", "The server did not respond."),
        (
            "78",
            "This role may not create the tables, existing ones differ, or the server rejected a statement.",
        ),
    ],
)
@options.dsn
@options.engine
@click.option(
    "--schema",
    cls=Option,
    heading=options.DATABASE,
    metavar="TEXT",
    help="Schema of the tables, which is created if it does not exist. Default: the first schema on the search path.",
)
@options.prefix
@click.option(
    "--sql",
    cls=Option,
    heading=options.OUTPUT,
    is_flag=True,
    help="Print a script for psql without contacting a server.",
)
@options.quiet
def install(
    dsn: str | None, engine: str | None, schema: str | None, prefix: str | None, sql: bool, quiet: bool
) -> None:
    """Create pgfence's tables and server functions.

    Leases, elections, fences, slots, semaphores, rate limits, partitions, idempotency keys and advisory locks with a token
    need them. Other advisory locks and transaction locks need no tables.

    Run it once per database and after an upgrade of pgfence, or in every deployment. If the tables are up to date, it changes
    nothing.
    """
    if sql and (dsn or engine):
        raise MisuseError("--sql does not contact a server: omit --dsn and --engine")
    if sql:
        print(_build_script(schema, prefix), end="")
        return
    with open_engine(dsn, engine, schema=schema, prefix=prefix) as target, exit_on_error():
        try:
            tables.create_all(target)
        except DBAPIError as error:
            raise translate_statement_error(target, error) or error from error
    Console(quiet=quiet).tell("tables and functions are installed")


def _build_script(schema: str | None, prefix: str | None) -> str:
    prefix = DEFAULT.prefix if prefix is None else prefix
    check_names(schema=schema, prefix=prefix)
    return tables.sql(schema=schema, prefix=prefix)
