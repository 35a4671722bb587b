"""The options of `pgfence elect`."""

from __future__ import annotations

import os

import click

from pgfence.cli import options, running
from pgfence.cli.elect import ElectOptions, Restart
from pgfence.cli.elect import elect as keep_running
from pgfence.cli.locks import check_ttl
from pgfence.cli.parser import SECONDS, Option
from pgfence.cli.report import Console
from pgfence.cli.server import Pooler

_TERM = "Election"
_END = "If the command ends or the term is lost"
DEFAULT_TTL = 15.0


@click.command(
    "elect",
    short_help="Keep one copy of a command running in a fleet.",
    cls=running.AfterDashes,
    usage="[OPTIONS] NAME -- COMMAND [ARGS]...",
    arguments={
        "NAME": "Name of the election. One host leads and runs the command.",
        "COMMAND": "Program that the leader runs, with its arguments. It must stay in the foreground.",
    },
    examples={
        "pgfence elect scheduler -- bin/scheduler": "Run on every host; one host starts the scheduler, and another host takes over if that host dies",
        "pgfence elect --restart always mailbox -- bin/poll": "Start the command again whenever it ends, on any host",
    },
    codes=[
        ("0-255", "The command's own exit code, if the command is not started again; 128 + N if signal N ended it."),
        ("64", "Misuse: an option, a name, a URL or an engine cannot be used."),
        ("69", "At the start, the server rejected the login, or the database or host does not exist."),
        ("70", "An unexpected error; its traceback is printed."),
        ("76", "The term was lost before it was released. Only with --restart never, or after a signal."),
        (
            "78",
            "At the start, the tables are missing or too old, a permission is missing, or the server is not PostgreSQL.",
        ),
        ("126", "The command could not be executed."),
        ("127", "The command was not found."),
        ("128 + N", "Signal N was received while the command was not running."),
    ],
)
@click.argument("name", metavar="NAME")
@click.argument("command", metavar="COMMAND", nargs=-1, required=True)
@click.option(
    "--ttl",
    cls=Option,
    heading=_TERM,
    type=SECONDS,
    default=DEFAULT_TTL,
    metavar="SECONDS",
    help="Longest time until the term of a dead leader expires and another host takes over. The TTL does not limit how long the command"
    " runs. Default: 15.",
)
@click.option(
    "--max-hold",
    cls=Option,
    heading=_TERM,
    type=SECONDS,
    metavar="SECONDS",
    help="End each term after SECONDS. A command that is still running is stopped, and another host may lead.",
)
@click.option(
    "--owner",
    cls=Option,
    heading=_TERM,
    metavar="TEXT",
    help="Name of this host, as operators see it. Default: host and process id.",
)
@click.option(
    "--restart",
    cls=Option,
    heading=_END,
    type=click.Choice([each.value for each in Restart]),
    default=Restart.ON_FAILURE.value,
    help="Whether this host is a candidate again when the command has ended: always, only if its exit code is not 0, or never."
    " Default: on-failure.",
)
@running.build_grace_option(_END)
@options.dsn
@options.engine
@running.pooler
@options.namespace
@options.schema
@options.prefix
@running.verbose
@click.option(
    "--quiet",
    "-q",
    cls=Option,
    heading=options.OUTPUT,
    is_flag=True,
    help="Do not report that the command ended and that this host is a candidate again; errors are still printed.",
)
def elect(
    name: str,
    command: tuple[str, ...],
    ttl: float,
    max_hold: float | None,
    owner: str | None,
    restart: str,
    grace: float,
    dsn: str | None,
    engine: str | None,
    pooler: str | None,
    namespace: str | None,
    schema: str | None,
    prefix: str | None,
    verbose: bool,
    quiet: bool,
) -> None:
    """Keep one copy of a command running in a fleet.

    Use it for a scheduler, a poller and any service that must run on one host at a time. Start it on every host: the elected
    leader runs the command, and the other hosts wait. When the leader exits, dies or loses its term, another host is elected.
    """
    check_ttl(ttl)
    wanted = ElectOptions(
        name=name,
        command=command,
        dsn=dsn,
        engine=engine,
        namespace=namespace,
        schema=schema,
        prefix=prefix,
        pooler=None if pooler is None else Pooler(pooler),
        owner=owner,
        ttl=ttl,
        max_hold=max_hold,
        restart=Restart(restart),
        grace=running.check_seconds(grace, "--grace"),
    )
    speaker = Console(quiet=quiet, verbose=verbose)
    running.fill_standard_descriptors()
    running.end_command(keep_running(wanted, speaker, os.environ), speaker)
