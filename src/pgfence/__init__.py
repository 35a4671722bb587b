"""Coordinate processes through the PostgreSQL you already run, with sync or async SQLAlchemy.

This module exports the names that most programs use. Import `pgfence.embedded`, `pgfence.testing` and the other modules
separately.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._process.clock import Seconds
from pgfence.config import configure
from pgfence.errors import (
    AttemptLostError,
    CapacityError,
    CommitOutcomeUnknownError,
    DeadlockError,
    FenceRequiredError,
    IdempotencyInProgressError,
    IdempotencyKeyReusedError,
    IdempotencyMisuseError,
    KeyCollisionError,
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
    WaitCancelledError,
)
from pgfence.fence import fence, fenced
from pgfence.keys import KeyFamily, LockKey, Name

if TYPE_CHECKING:
    from pgfence import compat, schema
    from pgfence._api.handles import AsyncHeld, Held, current, held
    from pgfence._holds.carriers import cancel_waits
    from pgfence.advisory import AdvisoryLock, AsyncAdvisoryLock
    from pgfence.claims import Claimable, claim, extend_claim, finish_claim
    from pgfence.effects import AsyncAttempt, AsyncIdempotentEffect, Attempt, IdempotentEffect
    from pgfence.election import AsyncElection, AsyncMember, AsyncTerm, Election, Member, Term
    from pgfence.fence import Fenced
    from pgfence.fence.handles import AsyncFencedHeld, AsyncHeldLease, FencedHeld, HeldLease
    from pgfence.idempotency import AsyncIdem, Idem, Op, idempotent, idempotent_call, insert_once
    from pgfence.lease import AsyncLease, Heartbeat, Lease
    from pgfence.once import AsyncOnce, AsyncSlot, CatchUp, Once, Slot, SlotOverError
    from pgfence.partitions import AsyncPartitions, AsyncWorker, Partitions, Worker, partition_for
    from pgfence.rate_limit import AsyncRateLimit, RateLimit
    from pgfence.read_write import AsyncReadWriteLock, AsyncWriteHeld, ReadWriteLock, WriteHeld
    from pgfence.retrying import TransactionAttempt, in_transaction, run_transaction
    from pgfence.semaphore import AsyncPermit, AsyncSemaphore, Permit, Semaphore
    from pgfence.transaction import AsyncTransactionLock, TransactionLock
    from pgfence.types import Event, Holder, Json, LeaseRef, LockEvent, OnLoss, ProcessPause, State
    from pgfence.versions import (
        IfMatch,
        Versioned,
        VersionedSession,
        VersionedUUID,
        etag,
        if_match,
        load_for_version,
    )

__all__ = [
    "AdvisoryLock",
    "AsyncAdvisoryLock",
    "AsyncAttempt",
    "AsyncElection",
    "AsyncFencedHeld",
    "AsyncHeld",
    "AsyncHeldLease",
    "AsyncIdem",
    "AsyncIdempotentEffect",
    "AsyncLease",
    "AsyncMember",
    "AsyncOnce",
    "AsyncPartitions",
    "AsyncPermit",
    "AsyncRateLimit",
    "AsyncReadWriteLock",
    "AsyncSemaphore",
    "AsyncSlot",
    "AsyncTerm",
    "AsyncTransactionLock",
    "AsyncWorker",
    "AsyncWriteHeld",
    "Attempt",
    "AttemptLostError",
    "CapacityError",
    "CatchUp",
    "Claimable",
    "CommitOutcomeUnknownError",
    "DeadlockError",
    "Election",
    "Event",
    "FenceRequiredError",
    "Fenced",
    "FencedHeld",
    "Heartbeat",
    "Held",
    "HeldLease",
    "Holder",
    "Idem",
    "IdempotencyInProgressError",
    "IdempotencyKeyReusedError",
    "IdempotencyMisuseError",
    "IdempotentEffect",
    "IfMatch",
    "Json",
    "KeyCollisionError",
    "KeyFamily",
    "Lease",
    "LeaseRef",
    "LockEvent",
    "LockKey",
    "LockLostError",
    "LockNotHeldError",
    "LockTimeoutError",
    "LossReason",
    "Member",
    "Name",
    "OnLoss",
    "Once",
    "Op",
    "Partitions",
    "Permit",
    "PgfenceError",
    "PoolerError",
    "ProcessPause",
    "RateLimit",
    "ReadWriteLock",
    "SchemaError",
    "Seconds",
    "SelfDeadlockError",
    "Semaphore",
    "Slot",
    "SlotOverError",
    "StaleFencingTokenError",
    "StandbyError",
    "State",
    "Term",
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
    "WaitCancelledError",
    "Worker",
    "WriteHeld",
    "__version__",
    "cancel_waits",
    "claim",
    "compat",
    "configure",
    "current",
    "etag",
    "extend_claim",
    "fence",
    "fenced",
    "finish_claim",
    "held",
    "idempotent",
    "idempotent_call",
    "if_match",
    "in_transaction",
    "insert_once",
    "load_for_version",
    "partition_for",
    "run_transaction",
    "schema",
]

__version__: str


_LATE = {
    "AdvisoryLock": "pgfence.advisory",
    "AsyncAdvisoryLock": "pgfence.advisory",
    "AsyncAttempt": "pgfence.effects",
    "AsyncElection": "pgfence.election",
    "AsyncFencedHeld": "pgfence.fence.handles",
    "AsyncHeld": "pgfence._api.handles",
    "AsyncHeldLease": "pgfence.fence.handles",
    "AsyncIdem": "pgfence.idempotency",
    "AsyncIdempotentEffect": "pgfence.effects",
    "AsyncLease": "pgfence.lease",
    "AsyncMember": "pgfence.election",
    "AsyncOnce": "pgfence.once",
    "AsyncPartitions": "pgfence.partitions",
    "AsyncPermit": "pgfence.semaphore",
    "AsyncRateLimit": "pgfence.rate_limit",
    "AsyncReadWriteLock": "pgfence.read_write",
    "AsyncSemaphore": "pgfence.semaphore",
    "AsyncSlot": "pgfence.once",
    "AsyncTerm": "pgfence.election",
    "AsyncTransactionLock": "pgfence.transaction",
    "AsyncWorker": "pgfence.partitions",
    "AsyncWriteHeld": "pgfence.read_write",
    "Attempt": "pgfence.effects",
    "CatchUp": "pgfence.once",
    "Claimable": "pgfence.claims",
    "Election": "pgfence.election",
    "Event": "pgfence.types",
    "Fenced": "pgfence.fence",
    "FencedHeld": "pgfence.fence.handles",
    "Heartbeat": "pgfence.lease",
    "Held": "pgfence._api.handles",
    "HeldLease": "pgfence.fence.handles",
    "Holder": "pgfence.types",
    "Idem": "pgfence.idempotency",
    "IdempotentEffect": "pgfence.effects",
    "IfMatch": "pgfence.versions",
    "Json": "pgfence.types",
    "Lease": "pgfence.lease",
    "LeaseRef": "pgfence.types",
    "LockEvent": "pgfence.types",
    "Member": "pgfence.election",
    "OnLoss": "pgfence.types",
    "Once": "pgfence.once",
    "Op": "pgfence.idempotency",
    "Partitions": "pgfence.partitions",
    "Permit": "pgfence.semaphore",
    "ProcessPause": "pgfence.types",
    "RateLimit": "pgfence.rate_limit",
    "ReadWriteLock": "pgfence.read_write",
    "Semaphore": "pgfence.semaphore",
    "Slot": "pgfence.once",
    "SlotOverError": "pgfence.once",
    "State": "pgfence.types",
    "Term": "pgfence.election",
    "TransactionAttempt": "pgfence.retrying",
    "TransactionLock": "pgfence.transaction",
    "Versioned": "pgfence.versions",
    "VersionedSession": "pgfence.versions",
    "VersionedUUID": "pgfence.versions",
    "Worker": "pgfence.partitions",
    "WriteHeld": "pgfence.read_write",
    "cancel_waits": "pgfence._holds.carriers",
    "claim": "pgfence.claims",
    "current": "pgfence._api.handles",
    "etag": "pgfence.versions",
    "extend_claim": "pgfence.claims",
    "finish_claim": "pgfence.claims",
    "held": "pgfence._api.handles",
    "idempotent": "pgfence.idempotency",
    "idempotent_call": "pgfence.idempotency",
    "if_match": "pgfence.versions",
    "in_transaction": "pgfence.retrying",
    "insert_once": "pgfence.idempotency",
    "load_for_version": "pgfence.versions",
    "partition_for": "pgfence.partitions",
    "run_transaction": "pgfence.retrying",
}
"""The module of each exported name that is imported only when it is first accessed."""

_LATE_MODULES = {"compat", "schema"}

if not TYPE_CHECKING:  # type checkers must report misspelt names

    def __getattr__(name: str) -> object:
        """Import a name on first access."""
        from importlib import import_module

        if name in _LATE:
            found = getattr(import_module(_LATE[name]), name)
        elif name in _LATE_MODULES:
            found = import_module(f"pgfence.{name}")
        elif name == "__version__":
            from importlib.metadata import version

            found = version("pgfence")
        else:
            raise AttributeError(f"module 'pgfence' has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
