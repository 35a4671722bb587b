"""Exit codes, and the exceptions that end a command with an exit code.

The numbers are public, because scripts and unit files test for them.
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Exit codes of pgfence itself. They have the values of sysexits.h where that file has a suitable code."""

    OK = 0
    MISUSE = 64
    """The command line or the environment is invalid, or no driver is installed."""
    TIME = 65
    """A slot that has not begun is recorded as done, because the server's clock was set back; or the host and the
    server have different rules for a time zone.
    """
    NOBODY = 67
    """There is no such holder, stuck key, leaked lock or known key, so there was nothing to do."""
    UNAVAILABLE = 69
    """No connection to the server, or the server has no room for another lock."""
    BUG = 70
    """An unexpected error; its traceback is printed."""
    OUTPUT = 74
    """The command is done, but its output could not be written."""
    BUSY = 75
    """The command could not do its work now, for example because another process holds the lock. A later call may succeed."""
    LOST = 76
    """The lock was lost before it was released; a command that was still running was stopped."""
    DECLINED = 77
    """The user did not confirm, and nothing was done."""
    REFUSED = 78
    """The server responded, but pgfence cannot use it, for example because it is a standby or tables are missing; or the extra `cli`
    or Alembic is not installed.
    """
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    SIGNAL = 128
    """The base of the exit codes for signals.

    The number of a signal is added: the one that ended the command, or the one that ended pgfence while it waited.
    """


class MisuseError(Exception):
    """The user must change the command line or the environment. The message says what to change."""


class CommandExit(Exception):
    """Ends a command with an exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
