"""`RateLimit`: rate limits for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._api.inputs import EngineSource
from pgfence._process.coroutines import run_sync
from pgfence.lease._engines import SYNC_ENGINES
from pgfence.rate_limit._request import RateLimitOptions

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds


class RateLimit(RateLimitOptions[EngineSource]):
    """Allow at most `limit` units in any window of `per` seconds, across all processes.

    ::

        limit = RateLimit(engine, "provider", limit=100, per=60)
        limit.wait(timeout=5)
        call_provider()

    The times of the last `limit` units are stored, so the limit is exact. There is no refill that allows a second burst in the
    same window, and no window that begins again with the clock's minute.

    Guarantees: no more than `limit` units are taken in any window of `per` seconds, by the server's clock. A unit counts as soon
    as it is taken, whether or not the caller then does anything. No unit is forgotten if the server crashes. If the server's
    clock is set back, the stored times are moved back too.

    Limitations: the order of waiters is not guaranteed. Only the time at which a unit is taken counts. Calls that you make
    afterwards may reach their destination later, and therefore closer together. If a response is lost, the units of that call may
    count nevertheless. If a limit is lowered and raised again within one window, units are forgotten; see `change`.

    Taking `n` units updates `n` small rows, whatever the limit. Calls for one name are serialized by the row of the name in the
    database.

    Args:
        engine: an Engine, or a function that returns one. The tables must exist in version 5 or later; run `pgfence install`.
        name: text, at most 255 characters with its namespace.
        limit: how many units may be taken in a window, from 1 to 100,000. The first process stores limit and period; see
            `change`.
        per: the length of the window, in seconds or as a timedelta, from 1 ms to a year.
        namespace: replaces the configured namespace.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    _engines = SYNC_ENGINES

    def try_take(self, n: int = 1) -> bool:
        """Take `n` units if they are allowed now, and return whether they were. This takes one round trip on an open connection.

        Args:
            n: how many units to take, from 1 to `limit`. Either all of them are taken or none.

        Raises:
            ValueError: `n` is out of range, or another limit or period is stored.
            TypeError: `n` is not an int.
            UnreachableError: the server did not respond, and the units may have been taken; or all connections for leases were in
                use.
            SchemaError: the tables are missing or too old, or this role may not use them.
            StandbyError, UnsupportedServerError: this server accepts no writes.
        """
        return run_sync(self._try, n)

    def wait(self, n: int = 1, *, timeout: Seconds | None = None) -> None:
        """Take `n` units, waiting until they are allowed.

        Args:
            n: how many units to take, from 1 to `limit`. Either all of them are taken or none.
            timeout: seconds to wait. None means the configured default (at most 60 s while this thread holds a lease or a session
                lock), `math.inf` waits indefinitely, and 0 does not wait. A server outage ends the wait.

        Raises:
            LockTimeoutError: the units will not be allowed in time. The error is raised as soon as this is known, usually
                immediately. `retry_after` is the number of seconds until they may be allowed.
            WaitCancelledError: the event of `cancel_waits()` was set.
            PgfenceError, ValueError, TypeError: the same errors as `try_take`.
        """
        run_sync(self._wait, n, timeout)

    def change(self, *, limit: int | None = None, per: Seconds | None = None) -> None:
        """Change the limit or the period, for all processes.

        Processes that still use the old values raise ValueError. The newest of the units that were taken before count towards the
        new limit, up to the smaller of the old and the new limit.

        Args:
            limit: how many units may be taken in a window from now on; None does not change it.
            per: the length of the window from now on; None does not change it.

        Raises:
            ValueError, TypeError: a value is out of range or of the wrong type.
            UnreachableError: the server did not respond. Changing again is safe.
            SchemaError, StandbyError, UnsupportedServerError: the same as for `try_take`.
        """
        run_sync(self._change, limit, per)
