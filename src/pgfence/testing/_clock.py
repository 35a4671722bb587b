"""Move the clock of a server that was started with libfaketime."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from glob import glob
from typing import TYPE_CHECKING

from pgfence.testing._errors import FaultUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_PLACES = ("/usr/lib/*/faketime/", "/usr/lib/faketime/", "/usr/lib64/faketime/", "/usr/local/lib/faketime/")
_HOW = "install libfaketime (Debian, Ubuntu: apt install libfaketime)"


def find_library() -> str:
    """Return the path of libfaketime."""
    if sys.platform != "linux":
        raise FaultUnavailableError("the server's clock can be moved on Linux only, with libfaketime")
    found = [path for place in _PLACES for path in glob(place + "libfaketime.so.1")]  # noqa: PTH207
    if not found:
        raise FaultUnavailableError(f"the server's clock cannot be moved: {_HOW}")
    return found[0]


class ServerClock:
    """The clock of one server, which reads its offset from a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._ahead = 0.0
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": find_library(),
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_NO_CACHE": "1",
            # The server measures waits with the monotonic clock, which is not changed when the clock is moved.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
        self._set(0.0)

    @contextmanager
    def move(self, seconds: float) -> Iterator[None]:
        """Set the clock ahead by a number of seconds, or back if the number is negative, until the end of the block."""
        before = self._ahead
        self._set(before + seconds)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, ahead: float) -> None:
        self._ahead = ahead
        new = self._file.with_suffix(".new")
        new.write_text(f"{ahead:+f}\n")
        new.chmod(0o644)
        new.replace(self._file)


CLOCKS: dict[str, ServerClock] = {}
"""The clocks of the servers that this process has started with libfaketime, by URL."""
