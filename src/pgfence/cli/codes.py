"""Exit codes, and the exceptions that become one. The numbers are public: scripts and unit files test for them."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Exit codes of pgfence itself, which are those of sysexits.h where it has a suitable code."""

    OK = 0
    MISUSE = 64
    """The command line, a name or the database URL cannot be used."""
    TIME = 65
    """A slot that has not begun is recorded as done, because the server's clock was set back; or host and server differ on
    a time zone.
    """
    NOBODY = 67
    """No holder has that name, or nothing is stuck under that key, so there was nothing to do."""
    UNAVAILABLE = 69
    """No connection to the server, or the server has no room for another lock."""
    BUG = 70
    """An unexpected error; its traceback is printed."""
    OUTPUT = 74
    """The command is done, but its output could not be written."""
    BUSY = 75
    """Another process holds the lock. A later attempt may succeed."""
    LOST = 76
    """The lock was lost before it was released; a command that was still running was stopped."""
    DECLINED = 77
    """The user did not confirm, and nothing was done."""
    REFUSED = 78
    """The server responded, but pgfence cannot work there, for example because it is a standby, or tables are missing."""
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    SIGNAL = 128
    """The base of the exit codes for signals.

    The number of the signal that ended the command, or pgfence while it waited, is added.
    """


class MisuseError(Exception):
    """The user has to change something on the command line or in the environment; the message says what to change."""


class CommandExit(Exception):
    """Ends a command with an exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
