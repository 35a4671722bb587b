"""Exit codes, and the error that becomes one. The numbers are part of the contract: scripts and unit files test for them."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Exit codes of pgfence itself. Those of sysexits.h where it has one, as mail systems and systemd know them."""

    OK = 0
    MISUSE = 64
    """The command line, a name or the database URL cannot be used."""
    TIME = 65
    """A slot is done that has not begun, because the server's clock was set back; or host and server differ on a time zone."""
    NOBODY = 67
    """Nobody has that name: there was nothing to evict."""
    UNAVAILABLE = 69
    """No session with the server could be had, or it has no room for another lock."""
    BUG = 70
    """An error that nobody foresaw; a traceback tells more."""
    BUSY = 75
    """Somebody else holds the lock. Trying again later may succeed."""
    LOST = 76
    """The lock was lost before it was given back; a command that was still running was stopped."""
    DECLINED = 77
    """The question was not answered with yes: nothing was done."""
    REFUSED = 78
    """The server answered and session locks are not safe there: a pooler, a standby, no PostgreSQL."""
    NOT_EXECUTABLE = 126
    NOT_FOUND = 127
    SIGNAL = 128
    """Plus the number of the signal that ended the command, or pgfence while it waited."""


class MisuseError(Exception):
    """The user has to change something on the command line or in the environment; the message says what."""


class CommandExit(Exception):
    """Ends a command with an exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code
