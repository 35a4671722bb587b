"""The options of `pgfence run`, as the user types them."""

from __future__ import annotations

import math
import os
import signal
from enum import StrEnum
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.locks import Terms
from pgfence.cli.options import Dsn, EnginePath, Json, Namespace, Prefix, Schema
from pgfence.cli.report import Console
from pgfence.cli.run import OnLost, OnUnreachable, Pooler, RunOptions
from pgfence.cli.run import run as run_guarded
from pgfence.cli.supervise import has_terminal


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "run",
        cls=_AfterDashes,
        epilog="Exit codes: those of the command; 64 misuse, 65 wrong clock, 69 unreachable, 75 busy or done, ...",
    )(run)


class OnBusy(StrEnum):
    """What to answer when somebody else holds the lock."""

    EXIT = "exit"
    OK = "ok"


class _AfterDashes(TyperCommand):
    """A command that takes another one after `--`, so that no option of either is taken for the other's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" not in args and not {"-h", "--help"} & set(args):
            ctx.fail("Write -- before the command.")
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS] NAME -- COMMAND [ARGS]..."]


def run(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The lock: one command per name at a time, on all hosts.")
    ],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="What to run while it is held.")],
    dsn: Dsn = None,
    engine: EnginePath = None,
    namespace: Namespace = None,
    schema: Schema = None,
    prefix: Prefix = None,
    pooler: Annotated[Pooler | None, typer.Option(help="What stands between here and the server.")] = None,
    wait: Annotated[
        float | None, typer.Option("--wait", "-w", metavar="SECONDS", help="Wait for the lock, [b]inf[/b] for ever.")
    ] = None,
    nonblock: Annotated[bool, typer.Option("--nonblock", "-n", help="Do not wait for the lock: the default.")] = False,
    on_busy: Annotated[OnBusy, typer.Option(help="Busy is a failure, or all is well.")] = OnBusy.EXIT,
    conflict_exit_code: Annotated[
        int | None, typer.Option("--conflict-exit-code", "-E", min=0, max=255, help="Exit code when busy.")
    ] = None,
    once_per: Annotated[
        str | None,
        typer.Option(metavar="day|hour|minute|CRON", help="Once in each slot of time, by the server's clock."),
    ] = None,
    tz: Annotated[
        str | None, typer.Option(metavar="ZONE", help="Where the day begins: Europe/Vienna. Default: UTC.")
    ] = None,
    lease: Annotated[
        bool, typer.Option("--lease", help="A lease instead of a lock: also through a pooler, with a token.")
    ] = False,
    ttl: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="How long it outlives a dead host. Default: 60.")
    ] = None,
    min_hold: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Not free again before, however short the command.")
    ] = None,
    max_hold: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Then it counts as lost, whatever the command does.")
    ] = None,
    on_lost: Annotated[OnLost, typer.Option(help="Stop the command when the lock is lost, or say so.")] = OnLost.STOP,
    on_unreachable: Annotated[
        OnUnreachable,
        typer.Option(help="No server when --wait is over: fail, skip the command, or run it [b]without the lock[/b]."),
    ] = OnUnreachable.FAIL,
    grace: Annotated[float, typer.Option(metavar="SECONDS", help="Between SIGTERM and SIGKILL.")] = 10.0,
    as_json: Json = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say what happens.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Do not say that it is busy.")] = False,
) -> None:
    """Run a command while this host holds a lock: flock(1) for a fleet. With --once-per: once, whoever comes first.

    Under one name it excludes other runs, AdvisoryLock and TransactionLock; with --lease or --once-per, Lease and Once.
    AdvisoryLock(token=True) excludes all of these.

    The server is named by --dsn, --engine, DATABASE_URL, or PGSERVICE, PGHOST and the other variables of libpq.
    """
    if nonblock and wait is not None:
        raise MisuseError("give --wait or --nonblock, not both")
    terms = Terms(lease=lease, once_per=once_per, tz=tz, ttl=ttl, min_hold=min_hold, max_hold=max_hold)
    terms.check()
    options = RunOptions(
        name=name,
        command=command,
        dsn=dsn,
        engine=engine,
        namespace=namespace,
        schema=schema,
        prefix=prefix,
        pooler=pooler,
        wait=_seconds(wait or 0.0, "--wait"),
        busy_code=_when_busy(on_busy, conflict_exit_code),
        on_lost=on_lost,
        on_unreachable=on_unreachable,
        grace=_seconds(grace, "--grace"),
        terms=terms,
    )
    _perform(options, Console(quiet=quiet, verbose=verbose), as_json=as_json)


def _when_busy(on_busy: OnBusy, code: int | None) -> int:
    if on_busy is OnBusy.OK and code is not None:
        raise MisuseError("give --on-busy=ok or --conflict-exit-code, not both")
    if on_busy is OnBusy.OK:
        return Code.OK
    return Code.BUSY if code is None else code


def _perform(options: RunOptions, speaker: Console, *, as_json: bool) -> NoReturn:
    _fill_standard_descriptors()
    report = run_guarded(options, speaker, os.environ)
    if as_json:
        speaker.write(report.as_json())
    elif report.message:
        (speaker.tell if report.outcome in {"busy", "done", "skipped"} else speaker.warn)(report.message)
    if report.exit_code == Code.SIGNAL + signal.SIGINT and has_terminal():
        # By this a shell knows that Ctrl-C was meant for its loop or script too. Its $? is the same.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise CommandExit(report.exit_code)


def _seconds(value: float, option: str) -> float:
    if math.isnan(value) or value < 0:
        raise MisuseError(f"{option} must be 0 or more seconds")
    return value


def _fill_standard_descriptors() -> None:
    """Open the null device where stdin, stdout or stderr is closed."""
    # Else the socket of a lock would get that number, and the command would write to it.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
