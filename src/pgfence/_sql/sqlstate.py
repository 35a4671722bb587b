"""SQLSTATEs and what each one means to us. Errors are told apart by these five characters, never by text."""

from __future__ import annotations

LOCK_NOT_AVAILABLE = "55P03"
"""`lock_timeout` ran out: the only error after which nothing of the statement is held."""

SERIALIZATION_FAILURE = "40001"
DEADLOCK_DETECTED = "40P01"
READ_ONLY = "25006"
"""A write on a standby, or where transactions are read-only."""

IN_FAILED_TRANSACTION = "25P02"
"""The transaction is aborted: it takes nothing but a rollback."""
SWITCHING = "If the cluster is switching over, try again"
"""What to do about that, in every message."""

NO_RIGHT = "42501"
MISSING = ("42883", "42P01", "3F000", "42703", "42804")
"""No such function, table, schema or column, or one with other types."""
CONNECTION_LOST = ("08", "57P")
"""How the SQLSTATEs of connection exceptions, and of shutdowns and crashes, begin."""
OUTCOME_UNKNOWN = "40003"
STALE_TOKEN = "PF001"  # noqa: S105
NO_TOKEN = "PF002"  # noqa: S105
GATE_TIMEOUT = "PF003"
OUT_OF_MEMORY = "53200"
"""The shared lock table is full."""


def sqlstate_of(error: BaseException | None) -> str | None:
    """Return the SQLSTATE that an error carries, whatever wraps it; None where the server did not speak."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if isinstance(state, str):
            return state
        error = getattr(error, "driver_exception", None) or getattr(error, "orig", None) or error.__cause__
    return None
