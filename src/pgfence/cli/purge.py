"""`pgfence purge`: delete expired idempotency keys."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from sqlalchemy.exc import DBAPIError

from pgfence import monitoring
from pgfence._admin.purge import LARGEST_BATCH
from pgfence._api.inputs import check_int
from pgfence._sql.errors import message_of
from pgfence.cli import options
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.parser import Command, Option
from pgfence.cli.report import Console, choose_code
from pgfence.cli.server import open_engine
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from sqlalchemy import Engine


@click.command(
    "purge",
    short_help="Delete expired idempotency keys.",
    cls=Command,
    examples={
        "pgfence purge --quiet": "In the crontab of one host, or of all hosts",
    },
    codes=[
        ("0", "The purge is complete, even if no key had expired."),
        ("64", "Misuse."),
        ("69", "The server did not respond, or the connection was lost. Keys that were already purged stay deleted."),
        (
            "75",
            "The server ended the purge, for example because of a timeout. Keys that were already purged stay deleted.",
        ),
        ("78", "Tables or permissions are missing, or the server is read-only."),
    ],
)
@click.option(
    "--batch",
    cls=Option,
    heading=options.DATABASE,
    type=int,
    default=1000,
    metavar="NUMBER",
    help="Number of keys deleted in one transaction, from 1 to 100,000. Default: 1000.",
)
@options.add_table_options
@options.as_json
@options.quiet
def purge(
    batch: int,
    dsn: str | None,
    engine: str | None,
    schema: str | None,
    prefix: str | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Delete expired idempotency keys in small batches.

    Use it in a crontab or a scheduled job. Several hosts may run it at the same time. The command deletes the keys of all
    namespaces, and the names of locks that no process has started to use for 30 days.
    """
    try:
        check_int(batch, "batch", LARGEST_BATCH)
    except ValueError as error:
        raise MisuseError(f"--{error}") from None
    with open_engine(dsn, engine, schema=schema, prefix=prefix) as target:
        purged, code, message = _perform(target, batch)
    if as_json:
        print(json.dumps({"purged": purged, "exit_code": int(code), "message": message}))
    elif code is not Code.OK:
        Console().warn(message)
    elif not quiet:
        print(message)
    raise CommandExit(code)


def _perform(engine: Engine, batch: int) -> tuple[int | None, Code, str]:
    try:
        purged = monitoring.purge(engine, batch=batch)
    except PgfenceError as error:
        return None, choose_code(error), str(error)
    except DBAPIError as error:
        return (
            None,
            Code.BUSY,
            f"the server ended the purge: {message_of(error)}. Keys that were already purged stay deleted",
        )
    return purged, Code.OK, f"deleted {purged} expired {'key' if purged == 1 else 'keys'}"
