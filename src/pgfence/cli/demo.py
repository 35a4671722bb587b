"""`pgfence demo`: find the server, run the demo, print the result and choose the exit code."""

from __future__ import annotations

import json
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from sqlalchemy.exc import DBAPIError

from pgfence._demo.bank import SCHEMA
from pgfence._demo.errors import DemoError
from pgfence._demo.load import build_psql_command
from pgfence._demo.runner import LEAST_PROCESSES, play
from pgfence._process.clock import clock
from pgfence.cli.codes import Code, MisuseError
from pgfence.cli.screen import Screen, show
from pgfence.cli.server import find_engine
from pgfence.embedded import server
from pgfence.errors import CapacityError, LockLostError, LockTimeoutError, PgfenceError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from sqlalchemy import Engine

    from pgfence._demo.runner import Outcome
    from pgfence.cli.report import Console

_MOST_PROCESSES = 32
_LEAST_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of one call of `pgfence demo`. If `dsn` is None, a server is started. `seconds` is the length of each act."""

    dsn: str | None
    seconds: float
    processes: int
    keep: bool
    as_json: bool


class DemoInterrupted(KeyboardInterrupt):
    """A signal asked the demo to end. The class is not an `Exception`, so that no handler treats the signal as an error."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def demo(options: DemoOptions, speaker: Console) -> int:
    """Run the demo, print the result, and return the exit code.

    Raises:
        MisuseError: an option or the URL cannot be used.
    """
    if not LEAST_PROCESSES <= options.processes <= _MOST_PROCESSES:
        raise MisuseError(f"--processes must be from {LEAST_PROCESSES} to {_MOST_PROCESSES}, not {options.processes}")
    if not options.seconds >= _LEAST_SECONDS:
        raise MisuseError(f"--seconds must be at least {_LEAST_SECONDS}, not {options.seconds:g}")
    try:
        with _handle_signals():
            return _play(options, speaker)
    except DemoInterrupted as stop:
        return Code.SIGNAL + stop.signum
    except LockTimeoutError:
        speaker.warn(
            "another demo is running in this database: wait until it has ended, or pass another database to --dsn"
        )
        return Code.BUSY
    except (UnreachableError, CapacityError, LockLostError) as error:
        speaker.warn(str(error))
        return Code.UNAVAILABLE
    except (DemoError, PgfenceError) as error:
        speaker.warn(str(error))
        return Code.REFUSED
    except DBAPIError as error:
        speaker.warn(f"the server rejected a statement or closed the connection: {error.orig}")
        return Code.UNAVAILABLE


def _play(options: DemoOptions, speaker: Console) -> int:
    begin = clock()
    with ExitStack() as stack:
        # The URL has no driver name, so that any installed driver is used.
        dsn = options.dsn or stack.enter_context(server()).replace("+psycopg", "", 1)
        engine = find_engine(dsn=dsn, path=None, environ={})
        stack.callback(engine.dispose)
        with Screen() as screen:
            outcome = play(engine, screen, seconds=options.seconds, processes=options.processes, keep=options.keep)
        _show(outcome, options, clock() - begin)
        if options.keep:
            _keep(engine, options, speaker)
    return outcome.verdict


def _show(outcome: Outcome, options: DemoOptions, seconds: float) -> None:
    if not options.as_json:
        show(outcome)
        return
    asked = {"embedded": options.dsn is None, "seconds_per_act": options.seconds}
    answer = {"exit_code": outcome.verdict, "seconds": round(seconds, 3)}
    print(json.dumps(outcome.as_data() | asked | answer, indent=2), flush=True)


def _keep(engine: Engine, options: DemoOptions, speaker: Console) -> None:
    if options.dsn is not None:
        speaker.tell(
            f"the tables are in the schema {SCHEMA} of the given database; to remove them, run DROP SCHEMA {SCHEMA} CASCADE"
        )
        return
    with suppress(DemoInterrupted):  # the result is already printed, so Ctrl-C is the normal end
        speaker.write(f"The server runs until you press Ctrl-C. To connect:\n\n    {build_psql_command(engine)}\n")
        threading.Event().wait()


@contextmanager
def _handle_signals() -> Iterator[None]:
    """Raise `DemoInterrupted` on the first signal that asks the demo to end, and ignore later signals during the clean-up."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(signum: int, _frame: FrameType | None) -> NoReturn:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise DemoInterrupted(signum)

    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
