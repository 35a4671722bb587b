"""Lease, for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._api.inputs import EngineSource
from pgfence._api.locks import LockBase
from pgfence._process.coroutines import run_sync
from pgfence.fence.handles import HeldLease
from pgfence.lease._engines import SYNC_ENGINES
from pgfence.lease._request import LeaseOptions, adopt

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds
    from pgfence.types import Holder, LeaseRef


class Lease(LeaseOptions[EngineSource, HeldLease], LockBase[HeldLease]):
    """A lock that expires: it lives in a row of the database, not in a connection, and brings a fencing token.

    While it is held, a dedicated thread renews it every third of the TTL. Works through any pooler.

    Guarantees: one holder per name until `expires_at`, by the server's clock; a holder that dies loses it after one TTL at the
    latest; tokens only grow; a holder that cannot renew regards it as lost shortly before the server grants it to another.

    Limitations: a former holder may not have stopped. Write inside `begin()`, and PostgreSQL rejects what is stale.

    Args:
        engine: an Engine, or a function that returns one. The tables must be there: `pgfence install`.
        name: text, at most 255 characters with its namespace.
        ttl: seconds that it outlives a dead holder, 0.3 to a day (longer ones as a timedelta). Not how long the work takes.
        max_hold: seconds after which it ends even if the holder is alive; None: never.
        min_hold: seconds for which no other holder gets it, also if it is released earlier; at most the TTL.
        lock_delay: seconds for which no holder gets it after it expired without a release.
        heartbeat: "auto" renews it while the process lives; "progress" only while `progress()` is called; "manual" never.
        owner: what operators read of the holder; None: host and process id.
        purpose: what operators read of its purpose.
        metadata: JSON for operators, kept in the row.
        namespace: instead of the configured one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the message says what would do.
    """

    _engines = SYNC_ENGINES
    _handle = HeldLease

    def try_acquire(self) -> HeldLease | None:
        """Try once, without waiting. One round trip on a warm connection.

        Returns None if it is held, also by this same thread: a try cannot deadlock.

        Raises:
            PgfenceError: as `acquire`.
        """
        return run_sync(self._take, 0.0)

    def acquire(self, *, timeout: Seconds | None = None) -> HeldLease:
        """Wait until it is held.

        Args:
            timeout: seconds; None is the configured default, `math.inf` waits without a limit, 0 does not wait. A wait lasts
                through an outage of the server, up to its timeout; with None only once the server has responded that the lease
                is held.

        Raises:
            LockTimeoutError: it was not free in time; names the holder.
            WaitCancelledError: the event of `cancel_waits()` was set.
            SelfDeadlockError: this thread holds it, or waiting would close a cycle inside this process. Not with `timeout=0`.
            UnreachableError: the server cannot be reached; a grant whose response was lost is given back in the background.
            SchemaError: the tables are missing, too old, or not open to this role.
            StandbyError, UnsupportedServerError: no lease can be written on this server.
        """
        return run_sync(self._acquire, timeout)

    @staticmethod
    def adopt(engine: EngineSource, ref: LeaseRef) -> HeldLease:
        """Take over a lease that another process handed over; from now on it is renewed here.

        A reference works once: a second `adopt` raises LockLostError.

        Args:
            engine: an Engine, or a function that returns one.
            ref: what `hand_over()` returned.

        Raises:
            LockLostError: it has expired, was adopted already, or was evicted.
            TypeError, ValueError: it is not a reference.
            PgfenceError: as `acquire`.
        """
        return run_sync(adopt, SYNC_ENGINES, engine, ref, HeldLease, "Lease.adopt")

    def holders(self) -> list[Holder]:
        """Return who holds it at this moment, as the server sees it. Looking never takes a lock.

        Raises:
            UnreachableError: there is no server.
            SchemaError: the tables are missing.
        """
        return run_sync(self._find_holders)
