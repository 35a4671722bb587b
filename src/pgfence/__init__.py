"""Coordination through the PostgreSQL you already have, for SQLAlchemy, sync and async.

The everyday names. `pgfence.embedded`, `pgfence.testing` and the like are imported by those who need them.
"""

from __future__ import annotations

from pgfence import compat
from pgfence.advisory import AdvisoryLock, AsyncAdvisoryLock
from pgfence.config import configure
from pgfence.errors import (
    CapacityError,
    DeadlockError,
    LockLostError,
    LockNotHeldError,
    LockTimeoutError,
    LossReason,
    PgfenceError,
    PoolerError,
    SelfDeadlockError,
    StandbyError,
    TransactionStateError,
    UnreachableError,
    UnsupportedServerError,
)
from pgfence.grants import Event, Holder, OnLoss, State
from pgfence.handles import AsyncHeld, Held, current, held
from pgfence.keys import KeyFamily, LockKey, Name
from pgfence.timing import Seconds
from pgfence.transaction import AsyncTransactionLock, TransactionLock

__all__ = [
    "AdvisoryLock",
    "AsyncAdvisoryLock",
    "AsyncHeld",
    "AsyncTransactionLock",
    "CapacityError",
    "DeadlockError",
    "Event",
    "Held",
    "Holder",
    "KeyFamily",
    "LockKey",
    "LockLostError",
    "LockNotHeldError",
    "LockTimeoutError",
    "LossReason",
    "Name",
    "OnLoss",
    "PgfenceError",
    "PoolerError",
    "Seconds",
    "SelfDeadlockError",
    "StandbyError",
    "State",
    "TransactionLock",
    "TransactionStateError",
    "UnreachableError",
    "UnsupportedServerError",
    "__version__",
    "compat",
    "configure",
    "current",
    "held",
]

__version__: str


def __getattr__(name: str) -> str:
    """Look the version up when it is asked for: reading the metadata takes longer than the import."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pgfence")
    raise AttributeError(f"module 'pgfence' has no attribute {name!r}")
