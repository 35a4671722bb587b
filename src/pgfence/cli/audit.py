"""`pgfence audit`: print who ended holds and freed keys, when and why."""

from __future__ import annotations

import json
import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from pgfence import monitoring
from pgfence.cli import options
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.parser import Command, Option
from pgfence.cli.report import exit_on_error, make_printable
from pgfence.cli.server import open_engine

if TYPE_CHECKING:
    from pgfence.monitoring import AuditEntry

ACTIONS = ("evict", "ask to resign", "free key", "release leaked")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@click.command(
    "audit",
    short_help="Print who ended holds and freed keys, and why.",
    cls=Command,
    examples={
        "pgfence audit --since 2d": "The last two days",
        "pgfence audit --action evict --json": "All evictions, as JSON for a program",
    },
    codes=[
        ("0", "The matching entries were printed; there may be none."),
        ("64", "Misuse."),
        ("69", "The server did not respond."),
        ("78", "Tables or permissions are missing."),
    ],
)
@click.option(
    "--since",
    cls=Option,
    heading="Filter",
    metavar="TIME",
    help="Print only entries since TIME, which is an age such as 2h (units: s, m, h, d), or an ISO 8601 time, which is local time if"
    " it has no zone.",
)
@click.option(
    "--action",
    cls=Option,
    heading="Filter",
    type=click.Choice(ACTIONS),
    help="Print only entries with this action.",
)
@options.add_table_options
@options.as_json
def audit(
    since: str | None,
    action: str | None,
    dsn: str | None,
    engine: str | None,
    schema: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Print who evicted holders, asked leaders to resign, freed keys and released leaked locks, and when and why.

    The entries of all namespaces are printed, oldest first.
    """
    wanted = None if since is None else parse_since(since)
    with open_engine(dsn, engine, schema=schema, prefix=prefix) as target, exit_on_error():
        found = monitoring.audit(target, since=wanted, action=action)
    if as_json:
        print(json.dumps({"entries": [_as_data(entry) for entry in found]}))
    else:
        print("\n".join(map(_format_entry, found)) if found else _describe_nothing(since, action))
    raise CommandExit(Code.OK)


def parse_since(text: str) -> datetime | timedelta:
    """Return the time or the age that `--since` gives. A time without a zone is local time.

    Raises:
        MisuseError: the text is neither a time nor an age.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip()):
        try:
            return timedelta(**{_UNITS[match[2]]: float(match[1])})
        except OverflowError:
            raise MisuseError(f"--since {text!r} is too long ago: give a later time") from None
    try:
        since = datetime.fromisoformat(text)
    except ValueError:
        raise MisuseError(
            f"--since {text!r} is neither an age nor a time: give an age such as 2h (units: s, m, h, d) or a time such as"
            " 2026-04-01T03:00"
        ) from None
    try:
        return since.astimezone()
    except (ValueError, OverflowError):  # in UTC, the year would be 0 or 10000
        raise MisuseError(f"--since {text!r} is out of range: give a time between the years 2 and 9998") from None


def _describe_nothing(since: str | None, action: str | None) -> str:
    filters = [f"--since {since}"] if since else []
    filters += [f"--action {action}"] if action else []
    return f"No entries{' match ' if filters else ''}{' and '.join(filters)}."


def _format_entry(entry: AuditEntry) -> str:
    where = f" (namespace {entry.namespace})" if entry.namespace else ""
    at = entry.at.isoformat(timespec="seconds")
    what, why = f"{at}  {entry.action}  {entry.resource}{where}", f"    by {entry.actor}: {entry.reason}"
    return f"{make_printable(what)}\n{make_printable(why)}"


def _as_data(entry: AuditEntry) -> dict[str, object]:
    known = ("action", "namespace", "resource", "actor", "reason", "detail")
    return {"at": entry.at.isoformat(), **{name: getattr(entry, name) for name in known}}
