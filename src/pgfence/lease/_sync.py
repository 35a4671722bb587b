"""`Lease`: locks that expire and have a fencing token, for threads."""

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
    """Hold a lock that expires and has a fencing token. The lock is stored in a row and does not depend on a connection.

    By default, a dedicated thread renews it at intervals of a third of the TTL. A lease also works through a pooler in
    transaction mode.

    Guarantees: a name has one holder until `expires_at`, by the server's clock. A holder that dies loses the lease after at most
    one TTL. Tokens only grow. A holder that cannot renew the lease considers it lost shortly before the server can grant it to
    another holder.

    Limitations: a former holder may still be running. Write inside `begin()`: once a newer token was granted, PostgreSQL rejects
    every transaction that begins with an older one.

    Args:
        engine: an Engine, or a function that returns one. The tables must exist; run `pgfence install`.
        name: a str, at most 255 characters including its namespace.
        ttl: seconds after which a dead holder loses the lease, from 0.3 s to a day (a timedelta may be longer). The ttl does not
            limit how long the work takes.
        max_hold: seconds after which the lease ends even if the holder is alive. None means no limit.
        min_hold: seconds from the grant during which the lease is not granted again, even if it is released earlier; at most the
            TTL.
        lock_delay: seconds for which the lease is not granted again, even to the last holder, after it has expired without a
            release.
        heartbeat: "auto" renews the lease while the process lives, "progress" only if `progress()` was called since the last
            renewal, and "manual" never.
        owner: the name that operators see for the holder. None means the host name and the process id.
        purpose: a description of the work, for operators.
        metadata: a JSON value for operators, such as a dict, which is stored in the row.
        namespace: replaces the configured namespace.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the message gives the range.
    """

    _engines = SYNC_ENGINES
    _handle = HeldLease

    def try_acquire(self) -> HeldLease | None:
        """Try once to acquire the lease, without waiting. This takes one round trip on an open connection.

        Returns None if the lease is held, even by this thread, or if a `min_hold` or a `lock_delay` has not passed. A try never
        waits for the lease, so it cannot deadlock.

        Raises:
            PgfenceError: the same errors as `acquire`, except LockTimeoutError, SelfDeadlockError and WaitCancelledError.
        """
        return run_sync(self._take, 0.0)

    def acquire(self, *, timeout: Seconds | None = None) -> HeldLease:
        """Acquire the lease, waiting until it is free or the timeout has passed.

        Args:
            timeout: seconds to wait. None means the configured default (at most 60 s while this thread holds another lease or a
                session lock), `math.inf` waits indefinitely, and 0 does not wait. A wait continues through a server outage
                until its timeout. With None, it does so only if the server had already responded that the lease is held.

        Raises:
            LockTimeoutError: the lease did not become free in time, and the message and `holders` name the holder, if there is
                one; or all connections for leases were in use.
            WaitCancelledError: the event of `cancel_waits()` was set.
            SelfDeadlockError: this thread holds the lease, or waiting would deadlock within this process. Not raised with
                `timeout=0`.
            UnreachableError: the server cannot be reached, or the call does not wait and all connections for leases are in use.
                If the response to a grant was lost, that grant is released in the background.
            SchemaError: the tables are missing or too old, or this role may not use them.
            StandbyError, UnsupportedServerError: no lease can be written on this server.
        """
        return run_sync(self._acquire, timeout)

    @staticmethod
    def adopt(engine: EngineSource, ref: LeaseRef) -> HeldLease:
        """Adopt a lease that another process handed over. This process renews the lease from now on.

        A reference can be used only once, and a second `adopt` raises LockLostError.

        Args:
            engine: an Engine, or a function that returns one.
            ref: the reference that `hand_over()` returned.

        Raises:
            LockLostError: the lease has expired, was evicted or already adopted, or its `max_hold` has passed.
            TypeError, ValueError: `ref` is not a valid reference.
            UnreachableError, SchemaError, StandbyError, UnsupportedServerError: the same as for `acquire`.
        """
        return run_sync(adopt, SYNC_ENGINES, engine, ref, HeldLease, "Lease.adopt")

    def holders(self) -> list[Holder]:
        """Return the current holder, as the server reports it, or an empty list if there is none. This takes no lock.

        During a `min_hold` after a release, and during a `lock_delay`, there is no holder, although no process can acquire the
        lease.

        Raises:
            UnreachableError, SchemaError, StandbyError, UnsupportedServerError: the same as for `acquire`.
        """
        return run_sync(self._find_holders)
