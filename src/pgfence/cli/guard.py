"""The guard of one command: ends it when the `pgfence run` that started it is gone.

The server frees the lock of a `pgfence run` that was killed with SIGKILL at once, and nothing in that process can then
stop the command, which would run on unprotected. So a second, small process sleeps on a pipe whose other end only
`pgfence run` holds. End of file there means that it died: whatever it had started gets SIGTERM, and SIGKILL after the grace.

It is run as a program of its own (`python -I -S guard.py GRACE`), in a session of its own, and imports nothing of
pgfence: so it costs little, no key of the terminal reaches it, and a `pkill -f "pgfence run"` passes it by.
`pgfence run` dismisses it with SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys
import time

PAUSE = 0.05


def end(target: int, grace: float) -> None:
    """Send SIGTERM to `target`, and SIGKILL if something of it is still there after `grace` seconds.

    Args:
        target: a process, or as a negative number a process group.
        grace: seconds.
    """
    deadline = time.monotonic() + grace
    try:
        os.kill(target, signal.SIGTERM)
        os.kill(target, signal.SIGCONT)
        while time.monotonic() < deadline:
            os.kill(target, 0)
            time.sleep(PAUSE)
        os.kill(target, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def main() -> None:
    """Read one line that says whom to end, then wait for the end of the input."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    target = sys.stdin.readline()
    sys.stdin.read()
    if target:
        end(int(target), float(sys.argv[1]))


if __name__ == "__main__":
    main()
