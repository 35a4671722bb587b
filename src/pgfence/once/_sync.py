"""`Once`: work that is done once in each slot of time, for threads."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal, ParamSpec, overload

from pgfence._api.inputs import EngineSource
from pgfence._api.locks import LockBase
from pgfence._process.coroutines import run_sync
from pgfence.lease._engines import SYNC_ENGINES
from pgfence.once._handles import Slot
from pgfence.once._request import OnceOptions, R, list_rounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._api.decorators import Busy, Unreachable, Wrap, WrapSkip
    from pgfence._process.clock import Seconds
    from pgfence.errors import LockTimeoutError
    from pgfence.types import Holder

P = ParamSpec("P")


class Once(OnceOptions[EngineSource, Slot], LockBase[Slot]):
    """Run work once in each slot of time, in the process that requests the slot first.

    ::

        @Once(engine, "digest", cron="0 7 * * *", tz="Europe/Vienna").wrap()
        def send_digest() -> int: ...

    `Once` does not start jobs, so call it from cron, or from a scheduler on every host. The server's clock and its time zone
    database determine the current slot, so the clocks of the hosts do not matter, and a slot runs once however short its work is.
    A slot is held by a lease with the given name, which has a heartbeat and a token; see `Lease`. One slot of a name runs at a
    time, except with `at`.

    Guarantees: a slot that was recorded as done never runs again. If several callers request a slot at the same time, one of them
    gets it. An attempt that died partway is reported to the next attempt (`Slot.resumed`). If a slot was finished while the
    server's clock was ahead, `acquire()` raises `pgfence.once.SlotClockError` until the slot begins, and the error is also logged
    at WARNING.

    Limitations: a run that died partway may have left partial work behind, so make the work resumable. If the server cannot be
    reached from the end of the work until the TTL has passed, the slot is not recorded as done and runs again. A slot runs only
    if it is requested. Hosts with different schedules for the name, or different versions of pgfence or cronsim, may compute
    different slots. If the server's own time zone rules are updated late, the current slot may get another beginning and run
    again.

    Args:
        engine: an Engine, or a function that returns one. The tables must exist; run `pgfence install`.
        name: a str, at most 255 characters including its namespace and, with `at`, its slot (26 characters or more).
        every: the length of a slot. Slots of whole days begin at midnight in `tz`, and weeks on Monday. Any other length is a
            fixed amount of elapsed time.
        cron: a crontab line of five fields, or a nickname such as `@hourly` or `@daily`, in `tz`, with the rules of Debian's
            cron for daylight saving time (see its manual page, cron(8)).
        at: the slot itself, as a datetime with a time zone or a str in ISO 8601 (UTC if it has no zone), for callers that choose
            the slot. Such slots may run in any order and at the same time, each of them once. Their rows are named
            `name@slot`, and are never deleted.
        tz: the name of a time zone. The server's time zone database determines the slots, and a host whose rules differ runs
            nothing.
        catch_up: how slots that were not run are handled. With "last", the newest one runs late. With "all", all of them run in
            order, since the first slot that was ever requested. With "none", a slot may be begun only within its first minute.
        ttl: seconds after which the run of a process that died is given up.
        max_hold: seconds after which a run is given up even if its process is alive. None means no limit.
        namespace: replaces the configured namespace.

    Raises:
        TypeError: an argument has the wrong type, or not exactly one of `every`, `cron` and `at` is given.
        ValueError: an argument cannot be used; the message says what is allowed.
    """

    _engines = SYNC_ENGINES
    _handle = Slot

    def try_acquire(self) -> Slot | None:
        """Request the current slot, without waiting. This takes two round trips on an open connection, or one if the slot is done.

        Returns None if the slot is done or was missed, or if it is being run, even by this thread.

        Raises:
            PgfenceError: the same errors as `acquire`, except SlotOverError, LockTimeoutError, SelfDeadlockError and
                WaitCancelledError.
        """
        return run_sync(self._try)

    def acquire(self, *, timeout: Seconds | None = None) -> Slot:
        """Request the current slot, and wait while another process runs it, because that attempt may fail.

        Args:
            timeout: seconds to wait. None means the configured default (at most 60 s while this thread holds a lease or a session
                lock), `math.inf` waits indefinitely, and 0 does not wait. A wait continues through a server outage until its
                timeout. With None, it does so only if the server had already responded that the slot is held.

        Raises:
            SlotOverError: the slot is done or was missed. This error is raised immediately. `retry_after` is the number of
                seconds until the next slot.
            SlotClockError: the slot is done although, by the server's clock, it has not begun. This is a subclass of
                `SlotOverError`.
            SlotZoneError: the server, or the host that ran the last slot, has different rules for `tz` than this host.
            SelfDeadlockError: this thread is running a slot of this name, or waiting would deadlock within this process. Not
                raised with `timeout=0`.
            LockTimeoutError: another holder had the slot until the timeout. The message and `holders` name the holder.
            WaitCancelledError: the event of `cancel_waits()` was set.
            UnreachableError: the server cannot be reached, or the call does not wait and all connections for leases are in use.
                If the response to a grant was lost, that grant is released in the background.
            SchemaError: the tables are missing or too old, or this role may not use them.
            StandbyError, UnsupportedServerError: no slot can be written on this server.
        """
        return run_sync(self._acquire, timeout)

    @overload  # type: ignore[override]  # here skipping is the default
    def wrap(
        self, *, timeout: Seconds | None = None, busy: Literal["skip"] = "skip", unreachable: Unreachable = "raise"
    ) -> WrapSkip: ...
    @overload
    def wrap(
        self,
        *,
        timeout: Seconds | None = None,
        busy: Literal["raise"],
        unreachable: Literal["raise", "run"] = "raise",
    ) -> Wrap: ...
    @overload
    def wrap(
        self,
        *,
        timeout: Seconds | None = None,
        busy: Callable[[LockTimeoutError], BaseException],
        unreachable: Literal["raise", "run"] = "raise",
    ) -> Wrap: ...
    def wrap(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *, timeout: Seconds | None = None, busy: Busy = "skip", unreachable: Unreachable = "raise"
    ) -> object:
        """Return a decorator that runs a function once in each slot. Further calls in the same slot return None.

        With `catch_up="all"`, the function runs once for each slot that is due, and the last result is returned.
        `pgfence.current(Slot).slot` is the slot that is being run. Otherwise, this method works like `wrap` of a lock, except
        that `busy="skip"` is the default.
        """
        once = super().wrap(timeout=timeout, busy=busy, unreachable=unreachable)  # type: ignore[arg-type]
        if self._catch_up != "all":
            return once
        lenient: Unreachable = "raise" if unreachable == "raise" else "skip"
        further = super().wrap(busy="skip", unreachable=lenient)

        def decorate(fn: Callable[P, R]) -> Callable[P, R | None]:
            once(fn)  # This raises an error now if the function cannot be wrapped.

            @functools.wraps(fn)
            def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
                results: list[R] = []

                @functools.wraps(fn)
                def note(*args: P.args, **kwargs: P.kwargs) -> None:
                    results.append(fn(*args, **kwargs))

                for guard in list_rounds(results, once, further):
                    guard(note)(*args, **kwargs)
                return results[-1] if results else None

            return call

        return decorate

    def holders(self) -> list[Holder]:
        """Return the holders that are running slots of this name, as the server reports them, without taking a lock.

        Raises:
            UnreachableError, SchemaError, StandbyError, UnsupportedServerError: the same as for `acquire`.
        """
        return run_sync(self._find_holders)
