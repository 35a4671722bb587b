"""`pgfence ps`: list what is held, who holds it and who waits for it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from pgfence import monitoring
from pgfence._admin.ps import KINDS, LARGEST_LIMIT, STATES
from pgfence.cli import options
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.parser import SECONDS, Command, Option
from pgfence.cli.ps_view import build_data, show_listing, watch
from pgfence.cli.report import exit_on_error
from pgfence.cli.server import open_engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._admin.ps import Listing

FILTER = "Filter"
_STATES = {state.replace(" ", "-"): state for state in STATES}


@click.command(
    "ps",
    short_help="List what is held, by whom, and who waits.",
    cls=Command,
    usage="[OPTIONS] [PREFIX]",
    arguments={"PREFIX": "List only names that begin with PREFIX, as the list shows them. Default: all."},
    examples={
        "pgfence ps": "Who holds what",
        "pgfence ps close: --watch": 'Names that begin with "close:", refreshed every second',
        "pgfence ps --state idle-in-transaction": "Forgotten transactions that hold a lock",
        "pgfence ps --json | jq '.rows[] | select(.waiters != [])'": "Locks that others wait for, as JSON for a program",
    },
    codes=[
        ("0", "The list was printed; it may be empty."),
        ("64", "Misuse."),
        ("69", "The server did not respond."),
        ("78", "The server rejected the query, is not PostgreSQL, or is too old."),
    ],
)
@click.argument("names", metavar="[PREFIX]", default="")
@click.option(
    "--kind",
    "kinds",
    cls=Option,
    heading=FILTER,
    type=click.Choice(KINDS),
    multiple=True,
    metavar="KIND",
    help=f"List only this kind: {', '.join(KINDS)}. May be repeated.",
)
@click.option(
    "--state",
    "states",
    cls=Option,
    heading=FILTER,
    type=click.Choice(list(_STATES)),
    multiple=True,
    metavar="STATE",
    help=f"List only holders in this state: {', '.join(_STATES)}. May be repeated.",
)
@click.option(
    "--limit",
    cls=Option,
    heading=FILTER,
    type=int,
    default=100,
    show_default=False,
    metavar="NUMBER",
    help="List up to NUMBER rows; 0 lists all rows. Default: 100.",
)
@click.option(
    "--watch", "watched", cls=Option, heading=options.OUTPUT, is_flag=True, help="Refresh until you press Ctrl-C."
)
@click.option(
    "--interval",
    cls=Option,
    heading=options.OUTPUT,
    type=SECONDS,
    default=1.0,
    metavar="SECONDS",
    help="Time between two refreshes of --watch. Default: 1.",
)
@options.add_database_options
@click.option(
    "--json",
    "as_json",
    cls=Option,
    heading=options.OUTPUT,
    is_flag=True,
    help="Print one JSON object; with --watch, print one per line.",
)
def ps(
    names: str,
    kinds: tuple[str, ...],
    states: tuple[str, ...],
    limit: int,
    watched: bool,
    interval: float,
    dsn: str | None,
    engine: str | None,
    namespace: str | None,
    schema: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """List who holds which lock, lease or key, and who waits for it. Locks that others wait for come first.

    Use it when something hangs. The command takes no lock and writes nothing. A role without privileges sees less, and the list
    says what is missing.
    """
    if not 0 <= limit <= LARGEST_LIMIT:
        raise MisuseError(f"--limit must be from 0 to {LARGEST_LIMIT}, not {limit}")
    if not 0.1 <= interval <= 3600:
        raise MisuseError(f"--interval must be from 0.1 to 3600 seconds, not {interval:g}")
    chosen = [_STATES[state] for state in states]
    nothing = _describe_nothing(
        names, [*(f"--kind {kind}" for kind in kinds), *(f"--state {state}" for state in states)]
    )
    with open_engine(dsn, engine, namespace=namespace, schema=schema, prefix=prefix) as target:

        def read(most: int | None) -> Listing:
            return monitoring.ps(target, names, kind=kinds or None, state=chosen or None, limit=most)

        if watched:
            watch(read, limit or None, interval, as_json=as_json, nothing=nothing)
        else:
            _show_once(read, limit or None, nothing, as_json=as_json)
    raise CommandExit(Code.OK)


def _describe_nothing(prefix: str, filters: list[str]) -> str:
    """Return the message for an empty list. It repeats the options, which may have excluded other rows."""
    what = f"Nothing that matches {', '.join(filters)}" if filters else "Nothing"
    return f"{what} is held{f' under a name that begins with {prefix!r}' if prefix else ''}."


def _show_once(read: Callable[[int | None], Listing], limit: int | None, nothing: str, *, as_json: bool) -> None:
    try:
        with exit_on_error():
            listing = read(limit)
    except ValueError as error:
        raise MisuseError(str(error)) from None
    if as_json:
        print(json.dumps(build_data(listing)))
    else:
        show_listing(listing, sys.stdout, nothing)
