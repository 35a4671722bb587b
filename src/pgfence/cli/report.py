"""What commands say: lines for people, and one JSON object for programs. What `pgfence run` says is on stderr, all of it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Generic, Literal, NoReturn, TypeAlias, TypeVar

from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.errors import LockTimeoutError, PgfenceError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgfence.types import Holder

F = TypeVar("F")

Outcome: TypeAlias = Literal[
    "ran", "busy", "done", "clock", "zone", "lost", "unavailable", "skipped", "refused", "not started", "interrupted"
]


@dataclass(slots=True)
class Report:
    """How one run went; grows while it goes on.

    Attributes:
        name: of the lock.
        key: its 64-bit number, once the namespace is known; a lease has none.
        outcome: what became of it.
        exit_code: of pgfence.
        locked: the command ran under the lock.
        waited: seconds until the lock was granted or refused.
        ran: seconds that the command ran; None if it did not.
        command_code: its exit status, 128 + N for signal N; None if it did not run.
        token: the fencing token of a lease.
        slot: which slot was run or is done, as an instant in ISO 8601; None without one.
        resumed: an earlier attempt at this slot had died half way.
        loss_reason: why the lock was lost.
        message: what people are told at the end.
        holders: who had the lock when it was busy.
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
        """Note what became of it, and return it."""
        self.outcome, self.exit_code, self.message = outcome, exit_code, message
        return self

    def as_json(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self) | {"waited": round(self.waited, 3), "ran": self.ran and round(self.ran, 3)})


def describe(holders: Sequence[Holder]) -> str:
    """Return who holds the lock, for a line."""
    return "; ".join(map(str, holders)) or "a process that has released it by now, or whose grant is not committed yet"


def as_data(holder: Holder) -> dict[str, str | int | None]:
    """Return what is known of a holder, for JSON."""
    fields = ("owner", "host", "pid", "backend_pid", "application_name", "purpose", "since")
    known = {name: getattr(holder, name) for name in fields}
    return known | {"since": holder.since.isoformat() if holder.since else None}


@dataclass(frozen=True, slots=True)
class Console:
    """Writes lines to stderr, at once and past any buffer. A reader that has gone ends neither us nor the command."""

    quiet: bool = False
    verbose: bool = False

    def write(self, line: str) -> None:
        """Write a line as it is."""
        with suppress(OSError):
            os.write(2, f"{line}\n".encode(errors="backslashreplace"))

    def warn(self, line: str) -> None:
        """Say it in any case; drivers break their messages into lines, we do not."""
        self.write(f"pgfence: {' '.join(line.split())}")

    def tell(self, line: str) -> None:
        """Say it unless quiet."""
        if not self.quiet:
            self.warn(line)

    def trace(self, line: str) -> None:
        """Say it only when verbose."""
        if self.verbose:
            self.warn(line)


@dataclass(frozen=True, slots=True)
class AdminReport(Generic[F]):
    """How a command went that ends a hold or frees a key.

    Attributes:
        outcome: in one word.
        code: the exit code.
        lines: for people.
        found: what was there, if that was seen.
    """

    outcome: str
    code: Code
    lines: list[str]
    found: F | None = None

    def show(self, *, as_json: bool, target: dict[str, str], found: dict[str, object]) -> NoReturn:
        """Show it, and end the command.

        Args:
            as_json: for programs.
            target: what the command was for.
            found: what was there.
        """
        if as_json:
            how = {"outcome": self.outcome, "exit_code": int(self.code)}
            print(json.dumps(target | how | found | {"message": " ".join(self.lines)}))
        elif self.code in {Code.OK, Code.NOBODY}:
            print("\n".join(self.lines))
        else:
            Console().warn(" ".join(self.lines))
        raise CommandExit(self.code)


def run_reported(work: Callable[[], AdminReport[F]]) -> AdminReport[F]:
    """Return what the work reports, or the error that it ended with."""
    try:
        return work()
    except LockTimeoutError as error:
        return AdminReport("busy", Code.BUSY, [str(error)])
    except PgfenceError as error:
        code = choose_code(error)
        return AdminReport("unavailable" if code is Code.UNAVAILABLE else "refused", code, [str(error)])


def choose_code(error: PgfenceError) -> Code:
    """Return the exit code for an error of the server's, or for none that was reached."""
    return Code.UNAVAILABLE if isinstance(error, UnreachableError) else Code.REFUSED


def expect_answer(*, dry_run: bool, yes: bool) -> None:
    """Raise MisuseError where a question could not be answered."""
    if not (dry_run or yes or sys.stdin.isatty()):
        raise MisuseError("nobody is there to be asked: add --yes, or --dry-run to look only")


def confirm(lines: Sequence[str], question: str) -> bool:
    """Show lines on stderr, and ask."""
    import click

    for line in lines:
        click.echo(line, err=True)
    try:
        return click.confirm(question, err=True)
    except click.Abort:  # the end of the input, or Ctrl-C
        return False
