"""The output of commands: lines for people, and one JSON object for programs. `pgfence run` prints only to stderr."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import textwrap
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.errors import LockTimeoutError, PgfenceError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pgfence.types import Holder

F = TypeVar("F")
_WIDEST = 100

Outcome: TypeAlias = Literal[
    "ran", "busy", "done", "clock", "zone", "lost", "unavailable", "skipped", "refused", "not started", "interrupted"
]


@dataclass(slots=True)
class Report:
    """The result of one run. Its fields are filled in during the run.

    Attributes:
        key: the 64-bit number of the lock; None for a lease, and until the namespace is known.
        exit_code: the exit code of pgfence.
        locked: whether the command ran under the lock.
        waited: seconds until the lock was granted or the wait ended.
        ran: seconds that the command ran, or None if it did not.
        command_code: the exit status of the command, 128 + N for signal N, or None if it did not run.
        slot: the slot that was run or is done, as an instant in ISO 8601; None without `--once-per`.
        resumed: whether an earlier attempt at this slot was not finished.
        message: the line printed at the end.
        holders: the holders of the lock, if it was busy.
    """

    name: str
    key: int | None = None
    outcome: Outcome = "ran"
    exit_code: int = 0
    locked: bool = False
    waited: float = 0.0
    ran: float | None = None
    command_code: int | None = None
    token: int | None = None
    slot: str | None = None
    resumed: bool = False
    loss_reason: str | None = None
    message: str | None = None
    holders: list[dict[str, str | int | None]] = field(default_factory=list)

    def end(self, outcome: Outcome, exit_code: int, message: str | None = None) -> Report:
        """Set the outcome, the exit code and the message, and return the report."""
        self.outcome, self.exit_code, self.message = outcome, exit_code, message
        return self

    def as_json(self) -> str:
        """Return the report as one line of JSON."""
        return json.dumps(asdict(self) | {"waited": round(self.waited, 3), "ran": self.ran and round(self.ran, 3)})


def describe(holders: Sequence[Holder]) -> str:
    """Return the holders of a lock as text."""
    return (
        "; ".join(map(str, holders))
        or "an unknown process, which has released it since or has not committed its grant yet"
    )


def as_data(holder: Holder) -> dict[str, str | int | None]:
    """Return a fixed set of fields of a holder for JSON. A field is None if it is not known."""
    fields = ("owner", "host", "pid", "backend_pid", "application_name", "purpose", "since")
    known = {name: getattr(holder, name) for name in fields}
    return known | {"since": holder.since.isoformat() if holder.since else None}


class Console(NamedTuple):
    """Writes lines to stderr, unbuffered. A closed pipe ends neither pgfence nor the command."""

    quiet: bool = False
    verbose: bool = False

    def write(self, line: str, patience: float | None = None) -> None:
        """Write a line unchanged.

        If stderr is a pipe or a terminal whose reader has stopped, this method waits for the reader, or for at most `patience`
        seconds, after which the line is dropped.
        """
        with suppress(OSError):
            if select.select([], [2], [], patience)[1]:
                os.write(2, f"{line}\n".encode(errors="backslashreplace"))

    def warn(self, line: str, patience: float | None = None) -> None:
        """Print a line, even if quiet. Line breaks, as in the messages of drivers, are replaced by spaces."""
        self.write(f"pgfence: {make_printable(' '.join(line.split()))}", patience)

    def tell(self, line: str, patience: float | None = None) -> None:
        """Print a line unless quiet."""
        if not self.quiet:
            self.warn(line, patience)

    def trace(self, line: str, patience: float | None = None) -> None:
        """Print a line only if verbose."""
        if self.verbose:
            self.warn(line, patience)


class AdminReport(NamedTuple, Generic[F]):
    """The result of a command that ends holds or frees a key.

    `outcome` is one word, and `lines` is the text for people. `found` is None if the command ended before it found anything.
    """

    outcome: str
    code: Code
    lines: list[str]
    found: F | None = None

    def show(self, *, as_json: bool, target: dict[str, str], found: dict[str, object]) -> NoReturn:
        """Print the report, and end the command. The JSON object includes `target`, which selects the lock or key, and `found`."""
        if as_json:
            how = {"outcome": self.outcome, "exit_code": int(self.code)}
            print(json.dumps(target | how | found | {"message": " ".join(self.lines)}))
        elif self.code in {Code.OK, Code.NOBODY}:
            print("\n".join(map(make_printable, self.lines)))
        else:
            Console().warn(" ".join(self.lines))
        raise CommandExit(self.code)


def make_printable(text: str) -> str:
    """Return a text with its control and format characters replaced by backslash escapes.

    Names, owners and other texts may come from any client of the database. Escape sequences in them would control the terminal, and
    line breaks would look like other rows.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def format_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines with all values in full and control characters escaped. The first row has the titles."""
    cells = [[make_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def run_reported(work: Callable[[], AdminReport[F]]) -> AdminReport[F]:
    """Return the report of `work`, or a report of the error that it raised."""
    try:
        return work()
    except LockTimeoutError as error:
        return AdminReport("busy", Code.BUSY, [str(error)])
    except PgfenceError as error:
        code = choose_code(error)
        return AdminReport("unavailable" if code is Code.UNAVAILABLE else "refused", code, [str(error)])


@contextmanager
def exit_on_error() -> Iterator[None]:
    """If pgfence raises an error inside the block, print one line on stderr and end the command with the exit code for it."""
    try:
        yield
    except PgfenceError as error:
        Console().warn(str(error))
        raise CommandExit(choose_code(error)) from error


def choose_code(error: PgfenceError) -> Code:
    """Return the exit code for an error: UNAVAILABLE if there is no connection to the server, and REFUSED otherwise."""
    return Code.UNAVAILABLE if isinstance(error, UnreachableError) else Code.REFUSED


def format_in_color(text: str, color: str) -> str:
    """Return a text in bold and in a color. If stdout is not a terminal or NO_COLOR is set, return it unchanged."""
    import click

    return click.style(text, fg=color, bold=True) if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def write_wrapped(text: str, indent: int = 0) -> None:
    """Print a paragraph to stdout, wrapped at the width of the terminal (at most 100 columns), or at 80 columns without one."""
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    blank = " " * indent
    # Long words are not broken, so that a statement or a command in the text can still be copied.
    filled = textwrap.TextWrapper(
        width, initial_indent=blank, subsequent_indent=blank, break_long_words=False, break_on_hyphens=False
    )
    print(filled.fill(make_printable(" ".join(text.splitlines()))))


def expect_answer(*, dry_run: bool, yes: bool) -> None:
    """Raise MisuseError if confirmation is needed and stdin is not a terminal."""
    if not (dry_run or yes or sys.stdin.isatty()):
        raise MisuseError("cannot ask for confirmation without a terminal: add --yes, or --dry-run to change nothing")


def misuse_of(error: ValueError) -> MisuseError:
    """Return the error for an argument that the library rejected. For --reason and --actor, its message names the option."""
    message = str(error)
    return MisuseError(f"--{message}" if message.startswith(("reason ", "actor ")) else message)


def confirm(lines: Sequence[str], question: str) -> bool:
    """Print lines to stderr, ask for confirmation, and return whether the user confirmed."""
    import click

    for line in lines:
        click.echo(make_printable(line), err=True)
    try:
        return click.confirm(question, err=True)
    except click.Abort:  # the end of the input, or Ctrl-C
        return False
