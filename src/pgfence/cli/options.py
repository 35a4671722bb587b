"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgfence.cli.parser import Option

if TYPE_CHECKING:
    from collections.abc import Callable

C = TypeVar("C", bound="Callable[..., Any] | click.Command")

DATABASE = "Database"
OUTPUT = "Output"
AUDIT = "Confirmation and audit"

dsn = click.option(
    "--dsn",
    cls=Option,
    heading=DATABASE,
    metavar="URL",
    help="Database URL. Do not include a password, because the process list shows it. Default: DATABASE_URL, or PGSERVICE,"
    " PGHOST and the other variables of libpq.",
)
engine = click.option(
    "--engine",
    cls=Option,
    heading=DATABASE,
    metavar="MODULE:ATTR",
    help="Engine of your application, or a function that returns one.",
)
namespace = click.option(
    "--namespace",
    cls=Option,
    heading=DATABASE,
    metavar="TEXT",
    help="Prefix of every name, so that two applications in one database never share a lock. Default: that of --engine, if given.",
)
schema = click.option(
    "--schema",
    cls=Option,
    heading=DATABASE,
    metavar="TEXT",
    help="Schema of pgfence's tables. Default: the schema on the search path that contains them.",
)
prefix = click.option(
    "--prefix",
    cls=Option,
    heading=DATABASE,
    metavar="TEXT",
    help="Name prefix of pgfence's tables and functions. Default: pgfence_.",
)


def add_table_options(command: C) -> C:
    """Add the options that select the database and pgfence's tables."""
    for option in (prefix, schema, engine, dsn):  # Click lists the option that is applied last at the top
        command = option(command)
    return command


def add_database_options(command: C) -> C:
    """Add the options that select the database, the namespace and pgfence's tables."""
    for option in (prefix, schema, namespace, engine, dsn):
        command = option(command)
    return command


as_json = click.option("--json", "as_json", cls=Option, heading=OUTPUT, is_flag=True, help="Print one JSON object.")
quiet = click.option(
    "--quiet",
    "-q",
    cls=Option,
    heading=OUTPUT,
    is_flag=True,
    help="Print nothing on success; errors are still printed.",
)
reason = click.option(
    "--reason",
    cls=Option,
    heading=AUDIT,
    required=True,
    metavar="TEXT",
    help="Reason, written to the audit table.",
)
actor = click.option(
    "--actor",
    cls=Option,
    heading=AUDIT,
    metavar="TEXT",
    help="Your name, written to the audit table. Default: the OS user and host.",
)
yes = click.option(
    "--yes",
    "-y",
    cls=Option,
    heading=AUDIT,
    is_flag=True,
    help="Do not ask for confirmation. Required without a terminal, except with --dry-run.",
)
