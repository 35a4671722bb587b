"""The command `pgfence`: arguments in, lines and an exit code out. What it does is done by the library below it."""

from __future__ import annotations

import gc
import logging
import sys
import traceback
from typing import TYPE_CHECKING

from pgfence._sql.encoding import TextError
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.report import Console

if TYPE_CHECKING:
    from collections.abc import Sequence

_PARSER_MISUSE = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see `codes` for what each means.

    A mistake of the user ends in one line on stderr, an error that nobody foresaw in a traceback.

    Args:
        argv: the words after `pgfence`; None takes those of this process.
    """
    # The library's warnings go where an application sends them. Here they would say a second time what we say ourselves.
    logging.getLogger("pgfence").addHandler(logging.NullHandler())
    words = sys.argv[1:] if argv is None else list(argv)
    if argv is not None:
        return _perform(words)
    # What is loaded stays: to look through it for garbage would take a tenth of the start, and most of the end.
    gc.freeze()
    code = _perform(words)
    gc.freeze()
    return code


def _perform(words: Sequence[str]) -> int:
    from pgfence.cli.app import create_app

    try:
        create_app(words)(args=words or ["--help"], prog_name="pgfence")
    except CommandExit as end:
        return end.code
    except (MisuseError, TextError) as error:
        Console().warn(str(error))
        return Code.MISUSE
    except SystemExit as end:
        # The parser's own: 0 after --help and --version, 2 for words it cannot use.
        return Code.MISUSE if end.code == _PARSER_MISUSE or not words else int(end.code or 0)
    except Exception:
        traceback.print_exc()
        return Code.BUG
    return Code.OK
