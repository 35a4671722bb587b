"""RateLimit, for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._api.inputs import EngineSource
from pgfence._process.coroutines import run_sync
from pgfence.lease._engines import SYNC_ENGINES
from pgfence.rate_limit._request import RateLimitOptions

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds


class RateLimit(RateLimitOptions[EngineSource]):
    """At most `limit` takes in any window of `per` seconds, across all processes.

    ::

        limit = RateLimit(engine, "provider", limit=100, per=60)
        limit.wait(timeout=5)
        call_provider()

    The moments of the last `limit` takes are stored, so that the limit is exact: there is no refill that lets a second burst
    into the same window, and no window that begins again with the clock's minute.

    Guarantees: no window of `per` seconds holds more than `limit` takes, by the server's clock. A take counts as soon
    as it is made, whether or not the caller then does anything. No take is lost if the server crashes. If the server's
    clock is set back, the stored moments move back with it.

    Limitations: the order of waiters is not guaranteed. Only the moment of the take counts; calls that you make
    afterwards may reach their destination later, and therefore closer together. A take whose response was lost may have
    counted. A limit that was lowered and raised again within one window forgets takes; see `change`.

    Each take writes one small row for each unit in place, so a take of `n` is O(n), whatever the limit. Takes of one name are
    serialized by its row in the database.

    Args:
        engine: an Engine, or a function that returns one. Needs the tables of `pgfence install`, version 5 or later.
        name: text, at most 255 characters with its namespace.
        limit: how many units a window may hold, 1 to 100,000. The first process stores limit and period; see `change`.
        per: the length of the window: seconds or a timedelta, 1 ms to a year.
        namespace: instead of the configured one.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    _engines = SYNC_ENGINES

    def try_take(self, n: int = 1) -> bool:
        """Take `n` units if they are allowed now, and return whether they were. One round trip on a warm connection.

        Args:
            n: how many units, 1 to `limit`; all of them or none.

        Raises:
            ValueError: `n` is out of range, or another limit is stored.
            TypeError: `n` is not an int.
            UnreachableError: there was no response: the take may have counted.
            SchemaError: the tables are missing, too old, or not open to this role.
            StandbyError, UnsupportedServerError: nothing can be written on this server.
        """
        return run_sync(self._try, n)

    def wait(self, n: int = 1, *, timeout: Seconds | None = None) -> None:
        """Take `n` units, waiting until they are allowed.

        Args:
            n: how many units, 1 to `limit`; all of them or none.
            timeout: seconds; None is the configured default, `math.inf` waits without a limit, 0 does not wait.

        Raises:
            LockTimeoutError: the units are not allowed in time; raised as soon as this is known, usually immediately.
                `retry_after` is the number of seconds until they may be allowed.
            WaitCancelledError: the event of `cancel_waits()` was set.
            PgfenceError, ValueError, TypeError: as `try_take`.
        """
        run_sync(self._wait, n, timeout)

    def change(self, *, limit: int | None = None, per: Seconds | None = None) -> None:
        """Store another limit or period, for all processes.

        Processes that still have the old values get ValueError. Earlier takes count for the new limit as far as they
        are stored: the last ones, up to the smaller of both limits.

        Args:
            limit: how many units a window may hold from now on; None does not change it.
            per: the length of the window from now on; None does not change it.

        Raises:
            ValueError, TypeError: a value is out of range or of the wrong type.
            UnreachableError: there was no response; changing again is safe.
            SchemaError: the tables are missing, or not open to this role.
        """
        run_sync(self._change, limit, per)
