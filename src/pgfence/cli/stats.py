"""`pgfence stats`: sample the list of holders repeatedly, and show the names with the longest total wait and the longest holds."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from pgfence import monitoring
from pgfence.cli import options
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.parser import SECONDS, Command, Option
from pgfence.cli.ps_view import describe_holder, find_time, format_span, open_console
from pgfence.cli.report import Console, choose_code, format_columns
from pgfence.cli.server import open_engine
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import datetime

    from pgfence._admin.ps import Listing, Row

SAMPLED = 1000
"""The largest number of rows in one sample."""
_BAR = 20


@dataclass(slots=True)
class Waited:
    """The waits for one name, as far as the samples show them.

    Attributes:
        seconds: the sum of the waiting times of all waiters, estimated from the samples.
        most: the largest number of waiters in one sample.
        longest: the longest wait of one waiter, in seconds.
    """

    seconds: float = 0.0
    most: int = 0
    longest: float = 0.0


@dataclass(slots=True)
class HoldSeen:
    """The longest hold of one name. `seconds` is how long it had lasted when it was last seen."""

    kind: str
    seconds: float
    holder: str


@dataclass(slots=True)
class HoldSamples:
    """The waits and holds that the samples have shown so far."""

    count: int = 0
    errors: int = 0
    limited: bool = False
    hidden: tuple[str, ...] = ()
    waited: dict[str, Waited] = field(default_factory=lambda: defaultdict(Waited))
    holds: dict[str, HoldSeen] = field(default_factory=dict)

    def add(self, listing: Listing, now: datetime, lasted: float) -> None:
        """Add a list that was read at `now`. It represents the last `lasted` seconds."""
        self.count += 1
        self.limited |= listing.limited
        self.hidden = listing.hidden
        together: dict[str, int] = defaultdict(int)
        for row in listing:
            self._add_hold(row, now)
            if row.waiters:
                together[row.label] = max(together[row.label], len(row.waiters))
                seen = self.waited[row.label]
                seen.longest = max(seen.longest, *(each.waiting.total_seconds() for each in row.waiters))
        for label, number in together.items():
            self.waited[label].seconds += number * lasted
            self.waited[label].most = max(self.waited[label].most, number)

    def _add_hold(self, row: Row, now: datetime) -> None:
        if row.holder.since is None:
            return
        seconds = max(0.0, (now - row.holder.since).total_seconds())
        known = self.holds.get(row.label)
        if known is None or seconds >= known.seconds:
            self.holds[row.label] = HoldSeen(row.holder.kind, seconds, describe_holder(row.holder))

    def list_longest_waits(self, most: int) -> list[tuple[str, Waited]]:
        """Return the names with the longest total wait, longest first."""
        return sorted(self.waited.items(), key=lambda each: -each[1].seconds)[:most]

    def list_longest_holds(self, most: int) -> list[tuple[str, HoldSeen]]:
        """Return the names with the longest holds, longest first."""
        return sorted(self.holds.items(), key=lambda each: -each[1].seconds)[:most]


@click.command(
    "stats",
    short_help="Show the names with the longest waits and holds.",
    cls=Command,
    usage="[OPTIONS] [PREFIX]",
    arguments={"PREFIX": "Sample only names that begin with PREFIX, as `pgfence ps` shows them. Default: all."},
    examples={
        "pgfence stats --for 60": "Sample for a minute",
        "pgfence stats account: --for 10 --interval 0.2": 'Sample only names that begin with "account:", five times a second',
    },
    codes=[
        ("0", "The lists were printed. After Ctrl-C, they contain what was seen until then."),
        ("64", "Misuse."),
        ("69", "The server did not respond to the first request."),
        ("78", "The server rejected the query, is not PostgreSQL, or is too old."),
    ],
)
@click.argument("names", metavar="[PREFIX]", default="")
@click.option(
    "--for",
    "length",
    cls=Option,
    type=SECONDS,
    default=10.0,
    metavar="SECONDS",
    help="Sample for SECONDS, or until you press Ctrl-C. Default: 10.",
)
@click.option(
    "--interval", cls=Option, type=SECONDS, default=1.0, metavar="SECONDS", help="Time between two samples. Default: 1."
)
@click.option(
    "--top", cls=Option, type=int, default=10, metavar="NUMBER", help="Number of names in each list. Default: 10."
)
@options.add_database_options
@options.as_json
def stats(
    names: str,
    length: float,
    interval: float,
    top: int,
    dsn: str | None,
    engine: str | None,
    namespace: str | None,
    schema: str | None,
    prefix: str | None,
    as_json: bool,
) -> None:
    """Sample the output of `pgfence ps` repeatedly, and show which names had the longest total wait and the longest holds.

    Use it to find the lock that slows an application down. The command takes no lock and writes nothing.
    """
    for value, what, least, most, unit in (
        (length, "--for", 0.1, 86400, " seconds"),
        (interval, "--interval", 0.1, 3600, " seconds"),
        (top, "--top", 1, 1000, ""),
    ):
        if not least <= value <= most:
            raise MisuseError(f"{what} must be from {least} to {most}{unit}, not {value:g}")
    with open_engine(dsn, engine, namespace=namespace, schema=schema, prefix=prefix) as target:
        samples = _collect_samples(lambda: monitoring.ps(target, names, limit=SAMPLED), length, interval)
    for note in samples.hidden:
        Console().warn(note)
    if as_json:
        print(json.dumps(_build_data(samples, top)))
    else:
        _show(samples, top)
    raise CommandExit(Code.OK)


def _collect_samples(read: Callable[[], Listing], length: float, interval: float) -> HoldSamples:
    """Read the list repeatedly until the time is over, or until Ctrl-C.

    Raises:
        CommandExit: not even the first list could be read.
    """
    samples, began = HoldSamples(), time.monotonic()
    last = began
    try:
        while True:
            start = time.monotonic()
            try:
                listing = read()
            except PgfenceError as error:
                if not samples.count:
                    Console().warn(str(error))
                    raise CommandExit(choose_code(error)) from error
                samples.errors += 1
            else:
                # The first sample represents the interval before it, as each later one does.
                samples.add(listing, find_time(listing), start - last if samples.count else min(interval, length))
                last = start
            pause = min(interval - (time.monotonic() - start), began + length - time.monotonic())
            if time.monotonic() + interval > began + length:
                return samples
            time.sleep(max(0.0, pause))
    except KeyboardInterrupt:
        return samples


def _show(samples: HoldSamples, top: int) -> None:
    tty = sys.stdout.isatty()
    console = open_console(sys.stdout)
    lines = [f"Samples: {samples.count}{f', and {samples.errors} that failed' if samples.errors else ''}."]
    if samples.limited:
        lines.append(f"Only the first {SAMPLED} rows of each sample were counted.")
    waits, holds = samples.list_longest_waits(top), samples.list_longest_holds(top)
    lines += ["", "Most waited for", *(_format_waits(waits) if waits else ["Nothing was waited for."])]
    lines += ["", "Longest holds", *(_format_holds(holds) if holds else ["Nothing was held."])]
    for line in lines:
        if tty:
            console.print(line, soft_wrap=True, style="bold" if line in {"Most waited for", "Longest holds"} else "")
        else:
            print(line)


def _format_waits(waits: Sequence[tuple[str, Waited]]) -> Iterable[str]:
    rows = [("WAITED", "", "WAITERS", "LONGEST", "NAME")]
    for label, seen in waits:
        bar = _build_bar(seen.seconds, waits[0][1].seconds)
        rows.append((_format(seen.seconds), bar, str(seen.most), _format(seen.longest), label))
    return format_columns(rows)


def _format_holds(holds: Sequence[tuple[str, HoldSeen]]) -> Iterable[str]:
    rows = [("HELD", "", "KIND", "NAME", "HOLDER")]
    for label, seen in holds:
        bar = _build_bar(seen.seconds, holds[0][1].seconds)
        rows.append((_format(seen.seconds), bar, seen.kind, label, seen.holder))
    return format_columns(rows)


def _build_bar(value: float, largest: float) -> str:
    return "#" * max(1, round(_BAR * value / largest)) if largest else ""


def _format(seconds: float) -> str:
    return format_span(timedelta(seconds=seconds))


def _build_data(samples: HoldSamples, top: int) -> dict[str, object]:
    waits = [
        {"name": label, "waited": round(seen.seconds, 3), "waiters": seen.most, "longest": round(seen.longest, 3)}
        for label, seen in samples.list_longest_waits(top)
    ]
    holds = [
        {"name": label, "kind": seen.kind, "held": round(seen.seconds, 3), "holder": seen.holder}
        for label, seen in samples.list_longest_holds(top)
    ]
    counted = {"samples": samples.count, "failed": samples.errors, "limited": samples.limited}
    return {**counted, "waits": waits, "holds": holds}
