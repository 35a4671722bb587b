"""The options of `pgfence demo`."""

from __future__ import annotations

import click

from pgfence.cli.codes import CommandExit
from pgfence.cli.parser import SECONDS, Command, Option
from pgfence.cli.report import Console


@click.command(
    "demo",
    short_help="Watch how pgfence works on a temporary PostgreSQL server.",
    cls=Command,
    examples={
        "pgfence demo": "Start a server and watch",
        "pgfence demo --seconds 1 --json": "Run briefly, and print JSON for a program",
    },
    codes=[
        ("0", "All results are as expected."),
        (
            "1",
            "A guard failed: a guarded act lost money, no process took over from a dead holder, or a scene had a wrong result.",
        ),
        ("3", "Nothing went wrong in an act or scene without a guard, so the demo proves nothing."),
        ("64", "Misuse: an option or the URL cannot be used."),
        (
            "69",
            "The server did not respond or closed the connection; or no PostgreSQL binaries were found for the temporary server.",
        ),
        ("75", "Another demo is running in this database."),
        (
            "78",
            (
                "The server cannot run the demo, because it is a pooler or a standby, the role may not create a schema, or the"
                " schema pgfence_demo already exists."
            ),
        ),
        ("128 + N", "Signal N ended the demo."),
    ],
)
@click.option("--dsn", cls=Option, metavar="URL", help="Run in this database instead of starting a server.")
@click.option(
    "--seconds",
    cls=Option,
    type=SECONDS,
    default=4.0,
    metavar="SECONDS",
    help="Length of each act of the demo, at least 0.5. Default: 4.",
)
@click.option(
    "--processes",
    cls=Option,
    type=int,
    default=8,
    metavar="NUMBER",
    help="Number of worker processes, from 3 to 32. Default: 8.",
)
@click.option(
    "--keep",
    cls=Option,
    is_flag=True,
    help="Keep the server until you press Ctrl-C, and print how to connect to it. With --dsn, keep the tables, and print how to remove"
    " them.",
)
@click.option("--json", "as_json", cls=Option, is_flag=True, help="Print one JSON object instead of the table.")
def demo(dsn: str | None, seconds: float, processes: int, keep: bool, as_json: bool) -> None:
    """Watch processes transfer money without a lock, with one, and while lock holders are being killed.

    Use it to see what pgfence guarantees. By default, the command starts a temporary PostgreSQL server and takes less than a minute.
    """
    from pgfence.cli.demo import DemoOptions
    from pgfence.cli.demo import demo as play

    options = DemoOptions(dsn=dsn, seconds=seconds, processes=processes, keep=keep, as_json=as_json)
    raise CommandExit(play(options, Console()))
