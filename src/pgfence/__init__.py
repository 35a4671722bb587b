"""Coordination through the PostgreSQL you already have, for SQLAlchemy, sync and async.

The everyday names. `pgfence.embedded`, `pgfence.testing` and the like are imported by those who need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence import compat, schema
from pgfence.advisory import AdvisoryLock, AsyncAdvisoryLock
from pgfence.config import configure
from pgfence.errors import (
    CapacityError,
    CommitOutcomeUnknownError,
    DeadlockError,
    FenceRequiredError,
    LockLostError,
    LockNotHeldError,
    LockTimeoutError,
    LossReason,
    PgfenceError,
    PoolerError,
    SchemaError,
    SelfDeadlockError,
    StaleFencingTokenError,
    StandbyError,
    TransactionStateError,
    UnreachableError,
    UnsupportedServerError,
    VersionConflict,
    VersionConflictError,
    VersionRequiredError,
)
from pgfence.fence import fence, fenced
from pgfence.fenced_handles import AsyncFencedHeld, AsyncHeldLease, FencedHeld, HeldLease
from pgfence.grants import Event, Holder, OnLoss, State
from pgfence.handles import AsyncHeld, Held, current, held
from pgfence.keys import KeyFamily, LockKey, Name
from pgfence.lease import AsyncLease, Lease, LeaseRef
from pgfence.once import AsyncOnce, AsyncSlot, CatchUp, Once, Slot
from pgfence.retrying import TransactionAttempt, in_transaction, run_transaction
from pgfence.timing import Seconds
from pgfence.transaction import AsyncTransactionLock, TransactionLock
from pgfence.versions import IfMatch, etag, if_match

if TYPE_CHECKING:
    from pgfence.fence import Fenced
    from pgfence.versions import Versioned, VersionedSession, VersionedUUID, load_for_version

__all__ = [
    "AdvisoryLock",
    "AsyncAdvisoryLock",
    "AsyncFencedHeld",
    "AsyncHeld",
    "AsyncHeldLease",
    "AsyncLease",
    "AsyncOnce",
    "AsyncSlot",
    "AsyncTransactionLock",
    "CapacityError",
    "CatchUp",
    "CommitOutcomeUnknownError",
    "DeadlockError",
    "Event",
    "FenceRequiredError",
    "Fenced",
    "FencedHeld",
    "Held",
    "HeldLease",
    "Holder",
    "IfMatch",
    "KeyFamily",
    "Lease",
    "LeaseRef",
    "LockKey",
    "LockLostError",
    "LockNotHeldError",
    "LockTimeoutError",
    "LossReason",
    "Name",
    "OnLoss",
    "Once",
    "PgfenceError",
    "PoolerError",
    "SchemaError",
    "Seconds",
    "SelfDeadlockError",
    "Slot",
    "StaleFencingTokenError",
    "StandbyError",
    "State",
    "TransactionAttempt",
    "TransactionLock",
    "TransactionStateError",
    "UnreachableError",
    "UnsupportedServerError",
    "VersionConflict",
    "VersionConflictError",
    "VersionRequiredError",
    "Versioned",
    "VersionedSession",
    "VersionedUUID",
    "__version__",
    "compat",
    "configure",
    "current",
    "etag",
    "fence",
    "fenced",
    "held",
    "if_match",
    "in_transaction",
    "load_for_version",
    "run_transaction",
    "schema",
]

__version__: str


def __getattr__(name: str) -> object:
    """Look up what takes longer than the import: the version of the package, and what needs SQLAlchemy's ORM."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pgfence")
    if name == "Fenced":
        from pgfence.fence import Fenced

        return Fenced
    if name in ("Versioned", "VersionedSession", "VersionedUUID", "load_for_version"):
        from pgfence import versions

        return getattr(versions, name)
    raise AttributeError(f"module 'pgfence' has no attribute {name!r}")
