"""The options of `pgfence demo`, as the user types them."""

from __future__ import annotations

from typing import Annotated

import typer

from pgfence.cli.codes import CommandExit
from pgfence.cli.report import Console


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "demo",
        epilog="Exit codes: 0 all as it should be; 1 a guarded act lost money, or nobody took over; 3 the control lost nothing.",
    )(demo)


def demo(
    dsn: Annotated[
        str | None, typer.Option(help="A database to play in, instead of a server of the demo's own.")
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="How long each act lasts.")] = 4.0,
    processes: Annotated[int, typer.Option(metavar="NUMBER", help="How many move money at a time.")] = 8,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave server and tables there, and say how to connect.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON object on stdout.")] = False,
) -> None:
    """Watch real processes move money on a real server: without a lock, with each of them, with holders killed."""
    from pgfence.cli.demo import DemoOptions
    from pgfence.cli.demo import demo as play

    options = DemoOptions(dsn=dsn, seconds=seconds, processes=processes, keep=keep, as_json=as_json)
    raise CommandExit(play(options, Console()))
