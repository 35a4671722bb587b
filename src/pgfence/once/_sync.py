"""Once, for threads."""

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
    """Work that is done once in each slot of time, by whichever process comes first.

    ::

        @Once(engine, "digest", cron="0 7 * * *", tz="Europe/Vienna").wrap()
        def send_digest() -> int: ...

    It does not start jobs: call it from cron, from a scheduler on every host, from anywhere. The server's clock and its
    time zone database determine which slot it is. The clocks of the hosts play no part, and a slot is done however short the
    work was. A slot is held by a lease of that name with its heartbeat and token, see `Lease`; one slot of a name runs at a
    time.

    Guarantees: a slot that was finished never runs again. Of several callers at the same time one gets it. An attempt that
    died partway is reported to the next one (`Slot.resumed`). A slot that was finished while the server's clock was ahead
    raises `pgfence.once.SlotClockError`, which is also logged at WARNING.

    Limitations: a run that died partway may have left something behind, so make the work resumable. Nothing runs unless it
    is called. Hosts with other schedules for the name, or other versions of pgfence or cronsim, may compute other slots. If
    the server's own time zone rules are updated late, the current slot may get another beginning and run again.

    Args:
        engine: an Engine, or a function that returns one. The tables must be there: `pgfence install`.
        name: text, at most 255 characters with its namespace.
        every: the length of a slot. Whole days go from midnight to midnight in `tz`, weeks from Monday; anything else has
            always the same length of real time.
        cron: a crontab line of five fields, or `@hourly`, `@daily`, `@weekly`, `@monthly`, `@yearly`; in `tz`, with cron's
            own rules for daylight saving time.
        at: the slot itself, as a datetime with a time zone or text in ISO 8601 (without a zone it is UTC), for callers that
            have one already. Such slots run in any order and beside each other, each once; their rows have the name
            `name@slot`, and stay.
        tz: the name of a time zone. The server's time zone database decides: a host whose rules differ runs nothing.
        catch_up: what becomes of slots that were not run. "last": the newest one runs late; "all": each of them in its order,
            since the first that was ever run; "none": a slot may be begun within its first minute.
        ttl: seconds after which a host that died partway is given up.
        max_hold: seconds after which a run that hangs is given up; None: never.
        namespace: instead of the configured one.

    Raises:
        TypeError: an argument has the wrong type, or not exactly one of `every`, `cron` and `at` is given.
        ValueError: an argument cannot be used; the message says what would do.
    """

    _engines = SYNC_ENGINES
    _handle = Slot

    def try_acquire(self) -> Slot | None:
        """Ask for the slot that counts, without waiting. Two round trips.

        Returns None if the slot is done, or if it is running, also in this same thread.

        Raises:
            PgfenceError: as `acquire`.
        """
        return run_sync(self._try)

    def acquire(self, *, timeout: Seconds | None = None) -> Slot:
        """Ask for the slot that counts, and wait while another process runs it: that attempt may fail.

        Args:
            timeout: seconds; None is the configured default, `math.inf` waits without a limit, 0 does not wait. A wait lasts
                through an outage of the server, up to its timeout; with None only once the server has responded that the slot
                is held.

        Raises:
            SlotOverError: the slot is done or was missed; raised at once. `retry_after` is the seconds to the next slot.
            SlotClockError: a `SlotOverError`; the slot that is done has not begun by the server's clock.
            SlotZoneError: the server, or the host that ran this slot, has other rules for `tz` than this host.
            LockTimeoutError: another process held it until the timeout; names the holder.
            WaitCancelledError: the event of `cancel_waits()` was set.
            UnreachableError: the server cannot be reached; a grant whose response was lost is given back in the background.
            SchemaError: the tables are missing, too old, or not open to this role.
            StandbyError, UnsupportedServerError: nothing can be written on this server.
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
        """Return a decorator: the function runs once in each slot, and calls beyond that return None.

        With `catch_up="all"` it runs once for each slot that is due, and the last result is returned;
        `pgfence.current(Slot).slot` says which it is at. Otherwise as the `wrap` of a lock, but that `busy="skip"` is the
        default.
        """
        once = super().wrap(timeout=timeout, busy=busy, unreachable=unreachable)  # type: ignore[arg-type]
        if self._catch_up != "all":
            return once
        lenient: Unreachable = "raise" if unreachable == "raise" else "skip"
        further = super().wrap(busy="skip", unreachable=lenient)

        def decorate(fn: Callable[P, R]) -> Callable[P, R | None]:
            once(fn)  # raises now if the function cannot be wrapped

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
        """Return who runs a slot of this name at this moment, as the server sees it. Looking never takes a lock.

        Raises:
            UnreachableError: there is no server.
            SchemaError: the tables are missing.
        """
        return run_sync(self._find_holders)
