"""Options and functions that the parsers of `pgfence run` and `pgfence elect` share."""

from __future__ import annotations

import math
import os
import shlex
import signal
from typing import TYPE_CHECKING, NoReturn, TypeVar

import click

from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.options import DATABASE, OUTPUT
from pgfence.cli.parser import SECONDS, Command, Option
from pgfence.cli.server import Pooler
from pgfence.cli.supervise import has_terminal

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence.cli.report import Console, Report

_Command = TypeVar("_Command", bound="Callable[..., object]")


class AfterDashes(Command):
    """A command that takes another command after `--`, so that the options of the two are never confused."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and reject a call without `--`, or without exactly one NAME before it."""
        if ctx.resilient_parsing:  # the shell completes a line that has no `--` yet
            return super().parse_args(ctx, args)
        if "--" not in args and not {"-h", "--help"} & set(args):
            ctx.fail("Write -- before the command.")
        after = args[args.index("--") + 1 :] if "--" in args else []
        try:
            left = super().parse_args(ctx, args)
        except click.MissingParameter:
            if not after:
                raise
            ctx.fail("Write NAME before --.")
        extra = len(ctx.params["command"]) - len(after)
        if extra:
            words = (ctx.params["name"], *ctx.params["command"][:extra])
            ctx.fail("Write NAME before --." if extra < 0 else f"Write one NAME before --, not {shlex.join(words)}.")
        return left


def build_grace_option(heading: str) -> Callable[[_Command], _Command]:
    """Return the decorator that adds --grace under a heading."""
    return click.option(
        "--grace",
        cls=Option,
        heading=heading,
        type=SECONDS,
        default=10.0,
        metavar="SECONDS",
        help="Time between SIGTERM and SIGKILL when the command is stopped. With inf, no SIGKILL is sent. Default: 10.",
    )


pooler = click.option(
    "--pooler",
    cls=Option,
    heading=DATABASE,
    type=click.Choice([each.value for each in Pooler]),
    help="Connection pooler in front of the server. Default: auto, which rejects an advisory lock, but not a lease, if it detects a pooler.",
)

verbose = click.option("--verbose", "-v", cls=Option, heading=OUTPUT, is_flag=True, help="Print each step.")


def end_command(report: Report, speaker: Console, *, as_json: bool = False) -> NoReturn:
    """Print the report, and end `pgfence` with the exit code in it."""
    if as_json:
        speaker.write(report.as_json())
    elif report.message:
        (speaker.tell if report.outcome in {"busy", "done", "skipped"} else speaker.warn)(report.message)
    if report.exit_code == Code.SIGNAL + signal.SIGINT and has_terminal():
        # If SIGINT ends this process, a shell also ends its loop or script. $? is the same as after an exit with this code.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    raise CommandExit(report.exit_code)


def check_seconds(value: float, option: str) -> float:
    """Return the value of an option that is a number of seconds, after checking it.

    Raises:
        MisuseError: the value is negative or not a number.
    """
    if math.isnan(value) or value < 0:
        raise MisuseError(f"{option} must be 0 or more seconds, not {value:g}")
    return value


def fill_standard_descriptors() -> None:
    """Open the null device where stdin, stdout or stderr is closed."""
    # Otherwise, the socket of a lock would get the number of a closed descriptor, and the command would write to the socket.
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
