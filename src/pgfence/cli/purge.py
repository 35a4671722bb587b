"""`pgfence purge`: takes expired idempotency keys away; for a crontab."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from sqlalchemy.exc import DBAPIError

from pgfence import monitoring
from pgfence._admin.purge import LARGEST_BATCH
from pgfence._api.inputs import check_int
from pgfence._sql.errors import message_of
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.options import Dsn, EnginePath, Json, Prefix, Schema  # noqa: TC001 - typer reads them when it runs
from pgfence.cli.report import Console, choose_code
from pgfence.cli.server import open_engine
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from sqlalchemy import Engine


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "purge",
        epilog="Exit codes: 0 done, also when there was nothing to do; 64 misuse; 69 unreachable; 75 the server ended it, by a"
        " timeout for one; 78 not allowed there.",
    )(purge)


def purge(
    batch: Annotated[int, typer.Option(metavar="NUMBER", help="Keys in one transaction.")] = 1000,
    dsn: Dsn = None,
    engine: EnginePath = None,
    schema: Schema = None,
    prefix: Prefix = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing when all is well.")] = False,
) -> None:
    """Take the idempotency keys away whose time is over, in small transactions. Any number of hosts may do it at once.

    The server is named by --dsn, --engine, DATABASE_URL, or PGSERVICE, PGHOST and the other variables of libpq.
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
        return None, Code.BUSY, f"{message_of(error)}. What was purged before stays so"
    return purged, Code.OK, f"{purged} expired keys taken away"
