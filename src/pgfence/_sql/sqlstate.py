"""The SQLSTATEs that pgfence distinguishes."""

from __future__ import annotations

LOCK_NOT_AVAILABLE = "55P03"
"""`lock_timeout` expired. This is the only error that proves that no lock of the statement is held."""

SERIALIZATION_FAILURE = "40001"
DEADLOCK_DETECTED = "40P01"
READ_ONLY = "25006"
"""A write on a standby, or in a read-only transaction."""

IN_FAILED_TRANSACTION = "25P02"
"""The transaction is aborted and accepts only a rollback."""
SWITCHING = "If the cluster is switching over, try again"
"""The advice in every message about a read-only server."""

NO_RIGHT = "42501"
MISSING = ("42883", "42P01", "3F000", "42703", "42804")
"""A function, table, schema or column that does not exist, or has different types."""
CONNECTION_LOST = ("08", "57P")
"""The prefixes of the SQLSTATEs for lost connections, shutdowns and crashes."""
OUTCOME_UNKNOWN = "40003"
STALE_TOKEN = "PF001"  # noqa: S105
NO_TOKEN = "PF002"  # noqa: S105
GATE_TIMEOUT = "PF003"
OUT_OF_MEMORY = "53200"
"""The shared lock table is full."""


def sqlstate_of(error: BaseException | None) -> str | None:
    """Return the SQLSTATE of an error, however it is wrapped, or None if the error does not come from the server."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if isinstance(state, str):
            return state
        error = getattr(error, "driver_exception", None) or getattr(error, "orig", None) or error.__cause__
    return None
