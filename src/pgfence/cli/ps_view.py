"""Print the list of `pgfence ps` as a table on a terminal, as aligned lines elsewhere, as JSON, or as the live view."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pgfence.cli.report import format_columns, make_printable
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from pgfence._admin.ps import Listing, Row, Waiter
    from pgfence.types import Holder

TITLES = ("NAME", "KIND", "STATE", "FOR", "HOLDER OR WAITER")
_STYLES = {
    "idle in transaction": "bold red",
    "idle in transaction (aborted)": "bold red",
    "lost": "bold red",
    "waiting": "yellow",
}
_WAITER = "  waiter"
_WIDE = 120
"""The smallest terminal width at which the holder has a separate column."""


NOTHING = "Nothing is held."


def show_listing(listing: Listing, file: TextIO, nothing: str = NOTHING) -> None:
    """Print the list, fitted to the width of a terminal and with colors; elsewhere, as aligned lines in full.

    If the list is empty, print `nothing`.
    """
    if file.isatty():
        console = open_console(file)
        console.print(_build_view(listing, console.width) if listing else nothing)
    elif listing:
        cells = [tuple(text for text, _ in line) for line in _iterate_lines(listing)]
        print("\n".join(format_columns([TITLES, *cells])), file=file)
    else:
        print(nothing, file=file)
    for note in _list_notes(listing):
        print(note, file=file)


def open_console(file: TextIO) -> Console:
    """Return a console of Rich. With NO_COLOR, it prints no escape sequences, not even for bold text."""
    system: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    return Console(file=file, color_system=system, highlight=False, markup=False, emoji=False)


def _list_notes(listing: Listing) -> list[str]:
    rows = f"{len(listing)} {'row' if len(listing) == 1 else 'rows'}"
    more = [f"There are more than {rows}; increase --limit to see more."] if listing.limited else []
    return [*more, *listing.hidden]


def _build_view(listing: Listing, width: int) -> RenderableType:
    """Return the table or, for a narrow terminal, entries with the holder on a second line."""
    lines = list(_iterate_lines(listing))
    if width < _WIDE:
        return Group(*_build_narrow([tuple((title, "bold") for title in TITLES), *lines], width))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in TITLES:
        table.add_column(title, overflow="fold", no_wrap=title == "FOR", ratio=1 if title == TITLES[-1] else None)
    for line in lines:
        table.add_row(*(Text(text, style) for text, style in line))
    return table


def _build_narrow(lines: Sequence[Sequence[tuple[str, str]]], width: int) -> Iterator[Text]:
    widths = [max(len(line[column][0]) for line in lines) for column in range(1, 4)]
    room = max(len(_WAITER), width - sum(widths) - 2 * len(widths))
    for (name, bold), *cells, (holder, _) in lines:
        shown = Text().append(name if len(name) <= room else f"{name}\n", bold)
        shown.append(" " * (room - len(name) if len(name) <= room else room))
        for (text, style), size in zip(cells, widths, strict=True):
            shown.append("  ").append(text.ljust(size), style)
        shown.rstrip()
        shown.append(f"\n    {holder}")
        yield shown


def find_time(listing: Listing) -> datetime:
    """Return when the list was read, by the server's clock, because the times in it come from that clock."""
    return listing._at or datetime.now(UTC)


def _iterate_lines(listing: Listing) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield the cells of each line with their styles. The line of a holder is followed by a line for each waiter."""
    now = find_time(listing)
    for row in listing:
        state = (_describe_state(row, now), _STYLES.get(row.state, ""))
        held = "" if row.holder.since is None else format_span(now - row.holder.since)
        yield (
            (make_printable(row.label), "bold"),
            (row.holder.kind, ""),
            state,
            (held, ""),
            (describe_holder(row.holder), ""),
        )
        for waiter in row.waiters:
            yield _build_waiter_line(waiter)


def _build_waiter_line(waiter: Waiter) -> tuple[tuple[str, str], ...]:
    behind = f"behind {_join(waiter.blocked_by)}" if waiter.blocked_by else ""
    waiting = format_span(waiter.waiting)
    return (_WAITER, "yellow"), ("", ""), (behind, ""), (waiting, "yellow"), (describe_holder(waiter.who), "")


def _describe_state(row: Row, now: datetime) -> str:
    words = [f"{row.state} behind {_join(row.blocked_by)}" if row.blocked_by else row.state]
    if row.holder.mode == "shared":
        words.append("shared")
    if row.holder.expires_at is not None and row.state != "lost":
        words.append(f"{format_span(row.holder.expires_at - now)} left")
    return ", ".join(words)


def _join(pids: tuple[int, ...]) -> str:
    return ", ".join(str(pid) if pid else "a prepared transaction" for pid in pids)


def describe_holder(holder: Holder) -> str:
    """Return what is known about a holder or waiter, as text without control characters."""
    who = holder.owner or holder.application_name or ""
    where = f"{holder.user}@{holder.host or 'local'}" if holder.user else holder.host or ""
    process = f"pid {holder.pid}" if holder.pid else ""
    backend = f"backend {holder.backend_pid}" if holder.backend_pid else ""
    token = f"token {holder.token}" if holder.token is not None else ""
    return make_printable(", ".join(filter(None, (who, where, process, backend, token, holder.purpose))))


def format_span(span: timedelta) -> str:
    """Return a length of time in one or two units: 0.3s, 12s, 1m03s, 2h05m, 3d04h."""
    seconds = max(0.0, span.total_seconds())
    if seconds < 10:
        return f"{seconds:.1f}s"
    for unit, part, size in (("d", "h", 86400), ("h", "m", 3600), ("m", "s", 60)):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}{int(seconds % size // {'h': 3600, 'm': 60, 's': 1}[part]):02}{part}"
    return f"{seconds:.0f}s"


def build_data(listing: Listing) -> dict[str, object]:
    """Return the list as data for JSON."""
    return {
        "rows": [_build_row_data(row) for row in listing],
        "limited": listing.limited,
        "hidden": list(listing.hidden),
    }


def _build_row_data(row: Row) -> dict[str, object]:
    holder = row.holder
    key = None if holder.key is None else {"space": holder.key.space, "value": holder.key.value}
    return {
        "name": holder.name,
        "scope": row.scope,
        "lock_key": key,
        "kind": holder.kind,
        "state": row.state,
        **_build_holder_data(holder),
        "owner": holder.owner,
        "pid": holder.pid,
        "purpose": holder.purpose,
        "token": holder.token,
        "since": holder.since and holder.since.isoformat(),
        "expires_at": holder.expires_at and holder.expires_at.isoformat(),
        "blocked_by": list(row.blocked_by),
        "waiters": [
            {
                **_build_holder_data(waiter.who),
                "waiting": round(waiter.waiting.total_seconds(), 3),
                "blocked_by": list(waiter.blocked_by),
            }
            for waiter in row.waiters
        ],
    }


def _build_holder_data(holder: Holder) -> dict[str, object]:
    known = ("mode", "application_name", "user", "host", "backend_pid")
    return {name: getattr(holder, name) for name in known}


def watch(
    read: Callable[[int | None], Listing], limit: int | None, interval: float, *, as_json: bool, nothing: str = NOTHING
) -> None:
    """Refresh the list until Ctrl-C. If the list cannot be read, show the error, and try again at the next refresh."""
    console = open_console(sys.stdout)
    live = None
    if console.is_terminal and not console.is_dumb_terminal and not as_json:
        live = Live(console=console, screen=True, auto_refresh=False)
    try:
        with live or console:
            while True:
                began = time.monotonic()
                most = limit if live is None else min(limit or console.height, console.height)
                _show(_try_read(read, most), live, as_json=as_json, nothing=nothing)
                time.sleep(max(0.0, interval - (time.monotonic() - began)))
    except KeyboardInterrupt:
        return


def _try_read(read: Callable[[int | None], Listing], most: int | None) -> Listing | PgfenceError:
    try:
        return read(most)
    except PgfenceError as error:
        return error


def _show(found: Listing | PgfenceError, live: Live | None, *, as_json: bool, nothing: str) -> None:
    now = datetime.now(UTC)
    if live is not None:
        live.update(build_frame(found, now, live.console.width, nothing), refresh=True)
    elif as_json:
        at = {"at": now.isoformat()}
        print(
            json.dumps(at | ({"error": str(found)} if isinstance(found, PgfenceError) else build_data(found))),
            flush=True,
        )
    elif isinstance(found, PgfenceError):
        print(f"{now.isoformat(timespec='seconds')}  {found}", flush=True)
    else:
        print(now.isoformat(timespec="seconds"))
        show_listing(found, sys.stdout, nothing)
        print(flush=True)


def build_frame(found: Listing | PgfenceError, now: datetime, width: int, nothing: str = NOTHING) -> RenderableType:
    """Return one frame of the live view."""
    title = Text(f"pgfence ps   {now.isoformat(timespec='seconds')}   Ctrl-C to quit", "dim")
    if isinstance(found, PgfenceError):
        return Group(title, Text(), Text(str(found), "bold red"))
    body = _build_view(found, width) if found else Text(nothing)
    return Group(title, Text(), body, *(Text(note, "dim") for note in _list_notes(found)))
