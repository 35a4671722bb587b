"""The command `pgfence`, which parses arguments, calls the library, prints lines and returns an exit code."""

from __future__ import annotations

import gc
import io
import logging
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from pgfence._sql.encoding import TextError
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.report import Console

if TYPE_CHECKING:
    from collections.abc import Sequence

_MISSING = "the packages of the command line are not installed: run pip install 'pgfence[cli]'"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see `codes` for the meaning of each code.

    A mistake on the command line prints one line to stderr; an unexpected error prints a traceback.

    Args:
        argv: the arguments after `pgfence`; None for the arguments of this process.
    """
    # The command prints its own messages. The library's warnings, printed by the last-resort handler, would repeat them.
    logging.getLogger("pgfence").addHandler(logging.NullHandler())
    words = sys.argv[1:] if argv is None else list(argv)
    if argv is not None:
        return _perform(words)
    if sys.stdout is None:  # closed by the caller, as in `pgfence ps >&-`, who does not want the output
        descriptor = os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(
            descriptor, True
        )  # it may have the number of a standard descriptor, which a command inherits
        sys.stdout = os.fdopen(descriptor, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the encoding of the terminal cannot represent must not end the command.
        sys.stdout.reconfigure(errors="backslashreplace")
    # Loaded modules are never freed, and the garbage collector would need a tenth of the run time to search them. The modules
    # that are already loaded are therefore exempt, and the collector starts only after far more objects than those of the
    # remaining modules have been created.
    gc.freeze()
    gc.set_threshold(100_000)
    gc.enable()
    code = _end_output(_perform(words))
    gc.freeze()
    return code


def _end_output(code: int) -> int:
    """Flush stdout, and return the exit code. If the flush fails after a success, return the code for that error."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except OSError as error:
        # Otherwise, the interpreter would flush stdout again when it exits, and print a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if isinstance(error, BrokenPipeError):
            return code or Code.SIGNAL + signal.SIGPIPE
        Console().warn(f"error: cannot write to stdout: {error.strerror}")
        return code or Code.OUTPUT


def _perform(words: Sequence[str]) -> int:
    try:
        import click
    except ModuleNotFoundError:
        Console().warn(_MISSING)
        return Code.REFUSED
    from pgfence.cli.app import pgfence

    try:
        code = pgfence.main(args=[*words] or ["--help"], prog_name="pgfence", standalone_mode=False)
    except CommandExit as end:
        return end.code
    except click.UsageError as error:
        message = error.format_message().rstrip(".")
        where = f"; see `{error.ctx.command_path} --help`" if error.ctx else ""
        Console().warn(f"error: {message[:1].lower()}{message[1:]}{where}")
        return Code.MISUSE
    except (MisuseError, TextError) as error:
        Console().warn(f"error: {error}")
        return Code.MISUSE
    except click.Abort:  # Click's form of Ctrl-C
        return Code.SIGNAL + signal.SIGINT
    except Exception:
        traceback.print_exc()
        return Code.BUG
    return int(code or Code.OK) if words else Code.MISUSE
