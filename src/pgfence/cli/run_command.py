"""The options of `pgfence run`."""

from __future__ import annotations

import os
from typing import Literal

import click

from pgfence.cli import options, running
from pgfence.cli.codes import Code, MisuseError
from pgfence.cli.guarded import OnLost
from pgfence.cli.locks import Terms
from pgfence.cli.parser import SECONDS, Option
from pgfence.cli.report import Console
from pgfence.cli.run import OnUnreachable, RunOptions
from pgfence.cli.run import run as run_guarded
from pgfence.cli.server import Pooler

_HELD = "Kind of lock"
_BUSY = "If another process holds the lock"
_FAILURES = "If the lock is lost or no server can be reached"


@click.command(
    "run",
    short_help="Run a command while this host holds a lock.",
    cls=running.AfterDashes,
    usage="[OPTIONS] NAME -- COMMAND [ARGS]...",
    arguments={
        "NAME": "Name of the lock. One command per name runs at a time, across all hosts.",
        "COMMAND": "Program to run while the lock is held, with its arguments.",
    },
    examples={
        "pgfence run nightly-billing -- bin/close-day": "Run a job on one host at a time; if it is already running, exit with 75",
        "pgfence run --wait 60 deploy-shop -- bin/deploy": "Wait up to a minute for the lock",
        "pgfence run --once-per day --on-busy ok report -- bin/report": "In the crontab of every host: run once a day, on one "
        "of these hosts",
    },
    codes=[
        ("0-255", "The command's own exit code; 128 + N if signal N ended it."),
        (
            "0",
            "With --on-busy ok, the lock is busy or the slot is done; with --on-unreachable skip, no server could be reached.",
        ),
        ("64", "Misuse: an option, a name, a URL or an engine cannot be used."),
        (
            "65",
            "With --once-per, a slot that has not begun is recorded as done, or the rules for --tz differ between host and server.",
        ),
        (
            "69",
            "The server could not be reached by the end of --wait, rejected the login or has no room for another lock.",
        ),
        ("70", "An unexpected error; its traceback is printed."),
        ("75", "Busy: another process holds the lock, or the slot is done. Change this code with -E."),
        ("76", "The lock was lost before it was released; a command that was still running was stopped."),
        (
            "78",
            "Locks are not safe on this server (a pooler, a standby or not PostgreSQL), or tables or permissions are missing.",
        ),
        ("126", "The command could not be executed."),
        ("127", "The command was not found."),
        ("128 + N", "Signal N was received before the command was started."),
    ],
)
@click.argument("name", metavar="NAME")
@click.argument("command", metavar="COMMAND", nargs=-1, required=True)
@click.option(
    "--lease",
    cls=Option,
    heading=_HELD,
    is_flag=True,
    help="Hold a lease instead of an advisory lock. A lease also works through a pooler in transaction mode, and its fencing token"
    " is passed to the command.",
)
@click.option(
    "--once-per",
    cls=Option,
    heading=_HELD,
    metavar="day|hour|minute|CRON",
    help="Run once in each slot of time, on one of the hosts. The server's clock determines the slot. CRON is a crontab's five fields,"
    " such as '30 2 * * 1-5', or a nickname such as @daily.",
)
@click.option(
    "--tz",
    cls=Option,
    heading=_HELD,
    metavar="ZONE",
    help="Time zone for --once-per, such as Europe/Vienna. Default: UTC.",
)
@click.option(
    "--ttl",
    cls=Option,
    heading=_HELD,
    type=SECONDS,
    metavar="SECONDS",
    help="Longest time until the lease of a dead host expires. The TTL does not limit how long the command runs. Default: 60.",
)
@click.option(
    "--min-hold",
    cls=Option,
    heading=_HELD,
    type=SECONDS,
    metavar="SECONDS",
    help="Keep the lease for at least SECONDS, up to the TTL, even if the command ends sooner.",
)
@click.option(
    "--max-hold",
    cls=Option,
    heading=_HELD,
    type=SECONDS,
    metavar="SECONDS",
    help="End the lease after SECONDS. A command that is still running is stopped, unless --on-lost is warn.",
)
@click.option(
    "--wait",
    "-w",
    cls=Option,
    heading=_BUSY,
    type=SECONDS,
    metavar="SECONDS",
    help="Wait up to SECONDS for the lock; inf waits indefinitely. Default: do not wait.",
)
@click.option("--nonblock", "-n", cls=Option, heading=_BUSY, is_flag=True, help="Do not wait. This is the default.")
@click.option(
    "--on-busy",
    cls=Option,
    heading=_BUSY,
    type=click.Choice(["exit", "ok"]),
    default="exit",
    help="If the lock is busy or the slot is done, exit with 0 (ok) or with 75 (exit). Default: exit.",
)
@click.option(
    "--conflict-exit-code",
    "-E",
    cls=Option,
    heading=_BUSY,
    type=click.IntRange(0, 255),
    metavar="CODE",
    help="Exit code if the lock is busy or the slot is done, instead of 75.",
)
@click.option(
    "--on-lost",
    cls=Option,
    heading=_FAILURES,
    type=click.Choice([each.value for each in OnLost]),
    default=OnLost.STOP.value,
    help="When the lock is lost, stop the command and exit with 76, or print a warning and let the command continue. Default: stop.",
)
@click.option(
    "--on-unreachable",
    cls=Option,
    heading=_FAILURES,
    type=click.Choice([each.value for each in OnUnreachable]),
    default=OnUnreachable.FAIL.value,
    help="What to do if no server responds within --wait: fail, skip the command, or run it WITHOUT the lock. Default: fail.",
)
@running.build_grace_option(_FAILURES)
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
    help="Do not report waits, a busy lock, a slot that is done or a skipped command; errors are still printed.",
)
@click.option(
    "--json",
    "as_json",
    cls=Option,
    heading=options.OUTPUT,
    is_flag=True,
    help="Print one JSON object as the last line on stderr.",
)
def run(
    name: str,
    command: tuple[str, ...],
    lease: bool,
    once_per: str | None,
    tz: str | None,
    ttl: float | None,
    min_hold: float | None,
    max_hold: float | None,
    wait: float | None,
    nonblock: bool,
    on_busy: Literal["exit", "ok"],
    conflict_exit_code: int | None,
    on_lost: str,
    on_unreachable: str,
    grace: float,
    dsn: str | None,
    engine: str | None,
    pooler: str | None,
    namespace: str | None,
    schema: str | None,
    prefix: str | None,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Run a command while this host holds a lock, like flock(1), but across all your hosts.

    Use it for cron jobs, deployments and any program that only one host should run at a time. The lock NAME excludes other runs,
    AdvisoryLock and TransactionLock with that name. With --lease or --once-per, it excludes Lease and Once instead.
    AdvisoryLock(token=True) excludes all of these.
    """
    if nonblock and wait is not None:
        raise MisuseError("use --wait or --nonblock, not both")
    terms = Terms(lease=lease, once_per=once_per, tz=tz, ttl=ttl, min_hold=min_hold, max_hold=max_hold)
    terms.check()
    wanted = RunOptions(
        name=name,
        command=command,
        dsn=dsn,
        engine=engine,
        namespace=namespace,
        schema=schema,
        prefix=prefix,
        pooler=None if pooler is None else Pooler(pooler),
        wait=running.check_seconds(wait or 0.0, "--wait"),
        busy_code=_when_busy(on_busy, conflict_exit_code),
        on_lost=OnLost(on_lost),
        on_unreachable=OnUnreachable(on_unreachable),
        grace=running.check_seconds(grace, "--grace"),
        terms=terms,
    )
    speaker = Console(quiet=quiet, verbose=verbose)
    running.fill_standard_descriptors()
    running.end_command(run_guarded(wanted, speaker, os.environ), speaker, as_json=as_json)


def _when_busy(on_busy: Literal["exit", "ok"], code: int | None) -> int:
    if on_busy == "ok" and code is not None:
        raise MisuseError("use --on-busy=ok or --conflict-exit-code, not both")
    if on_busy == "ok":
        return Code.OK
    return Code.BUSY if code is None else code
