"""`Semaphore`: at most N holders of one name at a time, for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._api.inputs import EngineSource
from pgfence._api.locks import LockBase
from pgfence._process.coroutines import run_sync
from pgfence.lease._engines import SYNC_ENGINES
from pgfence.semaphore._handles import Permit
from pgfence.semaphore._request import SemaphoreOptions

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds
    from pgfence.types import Holder


class Semaphore(SemaphoreOptions[EngineSource, Permit], LockBase[Permit]):
    """Admit at most `permits` holders of one name at a time, across all processes.

    ::

        with Semaphore(engine, "provider", permits=10, ttl=30).hold(timeout=5) as permit:
            call_provider()

    A permit is held like a lease. A dedicated thread renews it at intervals of a third of the TTL, it has a fencing token, and it
    also works through a pooler in transaction mode. Permit `i` of the semaphore `NAME` is the lease row `NAME#i`, with a separate
    token series.

    Guarantees: no more than `permits` permits are held at a time, by the server's clock. The permits of a process that dies
    become free after one TTL at the latest. The permits of one request are acquired together or not at all. With `fair=True`,
    waiters are served in the order of their arrival, even if a later one requests fewer permits.

    Limitations: a former holder may not have stopped, so write inside `permit.begin()`, which fences that permit. The token of a
    permit cannot fence a resource that several holders write. Without `fair=True`, the order of waiters is not guaranteed, and a
    request with a large weight may wait while smaller requests are granted. A fair waiter that sends no request for 3 seconds,
    for example because its process is paused, is overtaken until it sends a request again. A `Lease` with the name `NAME#i`
    blocks that permit. Each fair waiter queries the server once a second and at each release, even if many of them wait in one
    process.

    Args:
        engine: an Engine, or a function that returns one. The tables must exist in version 5 or later; run `pgfence install`.
        name: text, at most 250 characters with its namespace; it must not end in `#` or `/` followed by digits.
        permits: the number of permits, from 1 to 1,000. The first process that requests a permit stores the number; see `resize`.
        ttl: seconds after which a dead holder loses a permit, from 0.3 s to a day (a timedelta may be longer).
        weight: how many permits are acquired at a time, from 1 to `permits`.
        on_mismatch: what to do if another number of permits is stored. "raise" raises ValueError, and "stored" follows the stored
            number.
        fair: whether waiters are served in the order of their arrival. All processes should use the same value. Waiters with
            `fair=False` are served after the fair waiters.
        max_hold: seconds after which a permit ends even if the holder is alive; None means no limit.
        heartbeat: see `Lease`.
        owner: the name that operators see for the holder; None means the host name and the process id.
        purpose: a description of the work, for operators.
        namespace: replaces the configured namespace.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the message gives the range.
    """

    _engines = SYNC_ENGINES
    _handle = Permit

    def try_acquire(self) -> Permit | None:
        """Try once to acquire as many permits as the weight, without waiting. This takes one round trip on an open connection.

        Returns None if too few permits are free.

        Raises:
            PgfenceError, ValueError: the same errors as `acquire`, except LockTimeoutError, SelfDeadlockError and
                WaitCancelledError.
        """
        return run_sync(self._take, 0.0)

    def acquire(self, *, timeout: Seconds | None = None) -> Permit:
        """Acquire as many permits as the weight, waiting until they are free or the timeout has passed.

        Args:
            timeout: the same as for `Lease.acquire`.

        Raises:
            LockTimeoutError: too few permits were free in time. The message names the holder of the permit that expires first.
            ValueError: another number of permits is stored, or the stored number is less than the weight.
            WaitCancelledError: the event of `cancel_waits()` was set.
            SelfDeadlockError: this thread holds and requests more permits in total than the semaphore has. Not raised with
                `timeout=0`.
            UnreachableError: the server cannot be reached, or the call does not wait and all connections for leases are in use. A
                grant whose response was lost is released in the background.
            SchemaError: the tables are missing or too old, or this role may not use them.
            StandbyError, UnsupportedServerError: this server accepts no writes.
        """
        return run_sync(self._acquire, timeout)

    def holders(self) -> list[Holder]:
        """Return the current holders of permits, one entry for each permit, oldest first.

        The name of an entry is that of the permit's row, `NAME#i`, which `monitoring.evict` accepts.

        Raises:
            UnreachableError, SchemaError, StandbyError, UnsupportedServerError: the same as for `acquire`.
        """
        return run_sync(self._find_holders)

    def resize(self, permits: int) -> None:
        """Change the number of permits, for all processes.

        Processes that still use the old number raise ValueError, unless they use `on_mismatch="stored"`. After a reduction,
        holders keep their permits, and no permit is granted until fewer than the new number are in use.

        Args:
            permits: the number of permits from now on, from 1 to 1,000.

        Raises:
            ValueError, TypeError: `permits` is not a valid number.
            UnreachableError: the server did not respond. Resizing again is safe.
            SchemaError, StandbyError, UnsupportedServerError: the same as for `acquire`.
        """
        run_sync(self._resize, permits)
