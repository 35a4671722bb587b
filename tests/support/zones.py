"""Hosts whose time zone database is of another age than the server's."""

from __future__ import annotations

import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING
from zoneinfo import TZPATH, ZoneInfo, reset_tzpath

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime, timedelta
    from pathlib import Path


def write_zone(folder: Path, name: str, before: timedelta, change: datetime, after: timedelta) -> None:
    """Write a zone whose local time is ahead of UTC by one difference before an instant, and by another one from then on."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    types = [struct.pack(">lbb", int(ahead.total_seconds()), 0, 0) for ahead in (before, after)]
    instants = struct.pack(">2l", -(2**31), int(change.timestamp()))
    path.write_bytes(
        b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 2, 2, 4) + instants + b"\0\1" + b"".join(types) + b"LMT\0"
    )


@contextmanager
def zones_of_host(folder: Path) -> Iterator[None]:
    """Take the zones of this folder for those of this host, while the block runs."""
    kept = TZPATH
    # Only these: other tests compare zones, which are equal only to themselves.
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*/*")]
    try:
        reset_tzpath([str(folder)])
        ZoneInfo.clear_cache(only_keys=names)
        yield
    finally:
        reset_tzpath(kept)
        ZoneInfo.clear_cache(only_keys=names)
