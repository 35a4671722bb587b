"""The command-line parser. The module of a command is imported only when the command is used."""

from __future__ import annotations

import errno
import signal
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from pgfence.cli.codes import Code, CommandExit
from pgfence.cli.parser import Group, Option
from pgfence.cli.report import Console

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = {
    "run": "run_command",
    "elect": "elect_command",
    "install": "install",
    "init": "init",
    "doctor": "doctor",
    "ps": "ps",
    "stats": "stats",
    "evict": "evict",
    "keys": "keys",
    "release-leaked": "release_leaked",
    "audit": "audit",
    "purge": "purge",
    "key": "key",
    "demo": "demo_command",
}


class _Commands(Group):
    """The group of all commands."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the options of the group. With `--help`, print the help."""
        with _catch_output_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _catch_output_errors():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        found = getattr(import_module(f"pgfence.cli.{MODULES[cmd_name]}"), cmd_name.replace("-", "_"))
        assert isinstance(found, click.Command)
        return found


@contextmanager
def _catch_output_errors() -> Iterator[None]:
    """End the command without a traceback if the reader of a pipe has ended, or if the disk is full."""
    try:
        yield
    except BrokenPipeError:
        # Other programs in a pipeline also end in this way, for example in `pgfence ps | head -1`.
        raise CommandExit(Code.SIGNAL + signal.SIGPIPE) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        Console().warn(f"error: cannot write to stdout: {error.strerror}")
        raise CommandExit(Code.OUTPUT) from None


def _show_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        print(f"pgfence {version('pgfence')}")
        ctx.exit()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    cls=Option,
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Print the version and exit.",
)
def pgfence() -> None:
    """Locks, leases and once-only jobs through the PostgreSQL you already run.

    `pgfence COMMAND --help` describes a command and its exit codes.
    """
