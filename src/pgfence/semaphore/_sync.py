"""Semaphore, for threads."""

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
    """At most `permits` holders of one name at a time, across all processes.

    ::

        with Semaphore(engine, "provider", permits=10, ttl=30).hold(timeout=5) as permit:
            call_provider()

    A permit is held like a lease: a dedicated thread renews it every third of the TTL, it has a fencing token, and it works
    through any pooler. Permit `i` of the semaphore `NAME` is the lease row `NAME#i`, with a separate token series.

    Guarantees: never more than `permits` permits are held by the server's clock. A process that dies returns its permits after
    one TTL at the latest. A weight is acquired completely or not at all. With `fair=True` waiters are served in the order of
    their arrival, also if a later one asks for less.

    Limitations: a former holder may not have stopped; write inside `permit.begin()`, which fences that permit. The token of a
    permit cannot fence a resource that several holders write. Without `fair=True` the order of waiters is not guaranteed, and
    a large weight may wait while smaller ones pass. A fair waiter that sends no request for 3 seconds, because its
    process is paused, is overtaken until it asks again. A name of the form `NAME#i` that is held as a `Lease` blocks
    that permit. Each fair waiter asks the server once a second and at each release, also if many of them wait in one
    process.

    Args:
        engine: an Engine, or a function that returns one. Needs the tables of `pgfence install`, version 5 or later.
        name: text, at most 250 characters with its namespace; it must not end in `#` or `/` and digits.
        permits: how many there are, 1 to 1,000. The first contender stores the number; see `resize`.
        ttl: seconds that a permit outlives a dead holder, 0.3 to a day (longer ones as a timedelta).
        weight: how many permits one acquire takes.
        on_mismatch: what to do if another number of permits is stored: "raise" ValueError, or follow the "stored" one.
        fair: whether waiters are served first come, first served. All contenders should agree; those without it come after the
            fair waiters.
        max_hold: seconds after which a permit ends even if the holder is alive; None means no limit.
        heartbeat: as for a `Lease`.
        owner: the name that operators see for the holder; None: host and process id.
        purpose: the purpose that operators see.
        namespace: instead of the configured one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the message gives the range.
    """

    _engines = SYNC_ENGINES
    _handle = Permit

    def try_acquire(self) -> Permit | None:
        """Try once, without waiting. One round trip on a warm connection.

        Returns None if too few permits are free.

        Raises:
            PgfenceError, ValueError: as `acquire`.
        """
        return run_sync(self._take, 0.0)

    def acquire(self, *, timeout: Seconds | None = None) -> Permit:
        """Wait until a permit is free, or as many as the weight.

        Args:
            timeout: seconds; None is the configured default, `math.inf` waits without a limit, 0 does not wait. A wait
                lasts through an outage of the server, as with a `Lease`.

        Raises:
            LockTimeoutError: too few permits were free in time; the message names the holder of the permit that expires
                first.
            ValueError: another number of permits is stored, or fewer than the weight.
            WaitCancelledError: the event of `cancel_waits()` was set.
            SelfDeadlockError: this thread holds and requests more permits than there are. Not with `timeout=0`.
            UnreachableError: the server cannot be reached; a grant whose response was lost is given back in the background.
            SchemaError: the tables are missing, too old, or not open to this role.
            StandbyError, UnsupportedServerError: nothing can be written on this server.
        """
        return run_sync(self._acquire, timeout)

    def holders(self) -> list[Holder]:
        """Return who holds permits at this moment, one entry for each permit, the oldest first.

        The name of an entry is that of the permit's row, `NAME#i`, which `monitoring.evict` takes.

        Raises:
            UnreachableError: the server cannot be reached.
            SchemaError: the tables are missing.
        """
        return run_sync(self._find_holders)

    def resize(self, permits: int) -> None:
        """Store another number of permits, for all processes.

        Contenders that still have the old number get ValueError, unless they use `on_mismatch="stored"`. After a reduction
        the holders keep their permits, and no permit is granted until fewer than the new number are in use.

        Args:
            permits: how many there are from now on, 1 to 1,000.

        Raises:
            ValueError, TypeError: `permits` is not a valid number.
            UnreachableError: there was no response; resizing again is safe.
            SchemaError: the tables are missing, or not open to this role.
        """
        run_sync(self._resize, permits)
