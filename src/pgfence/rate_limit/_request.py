"""The arguments of a rate limit, and how units are taken, for the sync and async classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple

from pgfence._holds.carriers import Cancelled, build_cancelled_error, expect_uncancelled
from pgfence._leases.answers import is_row_locked
from pgfence._leases.manager import LeaseManager
from pgfence._locks.acquisition import timeout_of
from pgfence._process.clock import between, clock, seconds
from pgfence._sql.rate_limit import rate_sql
from pgfence._sql.storage import LIMITS
from pgfence.errors import LockTimeoutError
from pgfence.keys import qualify_name
from pgfence.lease._engines import EngineSourceT

if TYPE_CHECKING:
    from pgfence._process.clock import Seconds
    from pgfence._sql.storage import TableNames
    from pgfence.lease._engines import EngineKind

HIGHEST_LIMIT = 100_000
LONGEST_PERIOD = 366 * 86_400.0
_CHANGING = 5.0
"""Seconds for which a change is retried while the server does not respond."""


class _Result(NamedTuple):
    """The server's response to one call."""

    outcome: str
    remaining: float
    limit: int
    per: float


class RateLimitOptions(Generic[EngineSourceT]):
    """The arguments of a rate limit and their use, for the sync and async classes."""

    _engines: EngineKind[EngineSourceT]

    def __init__(
        self, engine: EngineSourceT, name: str, *, limit: int, per: Seconds, namespace: str | None = None
    ) -> None:
        if not isinstance(name, str):
            raise TypeError(f"a rate limit is stored under its name, as text: pass a str, not {type(name).__name__}")
        qualify_name(name, namespace or "", "the name of a rate limit")
        self._name = name
        self._limit = _check_limit(limit)
        self._per = _check_period(per)
        self._namespace = namespace
        why = "units are taken in a separate transaction, so pass the engine"
        self._engine = self._engines.bind(engine, type(self).__name__, why)

    async def _try(self, n: int) -> bool:
        return (await self._take(self._check_units(n))).outcome == "taken"

    async def _wait(self, n: int, timeout: Seconds | None) -> None:
        units = self._check_units(n)
        manager, _ = self._find()
        carrier = manager.carrier
        limit = timeout_of(manager.config, timeout, carrier.get_contender())
        ends_at = clock() + limit
        cancel = carrier.cancel_event() if limit else None
        try:
            expect_uncancelled(cancel)
            while (found := await self._take(units)).outcome != "taken":
                if found.remaining > ends_at - clock():
                    raise self._build_timeout_error(units, limit, found.remaining)
                # The pause is jittered, because all waiters get the same time, and only some of them can be allowed then.
                await carrier.make_event().wait(found.remaining + between(0.0, 0.02), cancel)
        except Cancelled:
            raise build_cancelled_error((self._name,)) from None

    async def _change(self, limit: int | None, per: Seconds | None) -> None:
        size = self._limit if limit is None else _check_limit(limit)
        period = self._per if per is None else _check_period(per)
        manager, place = self._find()
        await manager.verify(place, needed=LIMITS)
        args = self._qualify(manager), size, period
        text = rate_sql(place, manager.style).change
        await manager.execute_with_retry(place, text, args, _CHANGING, needed=LIMITS)
        self._limit, self._per = size, period

    async def _take(self, units: int) -> _Result:
        manager, place = self._find()
        args = self._qualify(manager), self._limit, self._per, units
        text = rate_sql(place, manager.style).take
        try:
            found = _Result(*await manager.fetch_row(place, text, args, needed=LIMITS))
        except Exception as error:
            if not is_row_locked(error):
                raise
            return _Result(
                "busy", 0.0, self._limit, self._per
            )  # another session has locked the row, and nothing was taken
        if found.outcome == "mismatch":
            raise ValueError(
                f"the rate limit {self._name!r} is {found.limit} per {found.per:g} s, not {self._limit} per {self._per:g} s,"
                f" because another process has created or changed it. Use limit={found.limit}, per={found.per:g}, or change it for"
                " all processes with change()"
            )
        return found

    def _find(self) -> tuple[LeaseManager, TableNames]:
        return self._engine.find_manager(LeaseManager)

    def _qualify(self, manager: LeaseManager) -> str:
        namespace = manager.config.namespace if self._namespace is None else self._namespace
        return qualify_name(self._name, namespace, "the name of a rate limit")

    def _check_units(self, n: int) -> int:
        if type(n) is not int:
            raise TypeError(f"n must be an int, not {type(n).__name__}")
        if n < 1:
            raise ValueError(f"n must be 1 or more, not {n}")
        if n > self._limit:
            raise ValueError(
                f"n={n} is more than limit={self._limit}, so the request could never be granted: take the units in several calls"
            )
        return n

    def _build_timeout_error(self, units: int, timeout: float, remaining: float) -> LockTimeoutError:
        error = LockTimeoutError(
            f"could not take {units} of the {self._limit} units per {self._per:g} s of the rate limit {self._name!r} within"
            f" {timeout:g} s: retry in {remaining:.1f} s",
            names=(self._name,),
            timeout=timeout,
        )
        error.retry_after = remaining
        return error

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}, {self._limit} per {self._per:g} s>"


def _check_limit(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"limit must be an int, not {type(value).__name__}")
    if not 1 <= value <= HIGHEST_LIMIT:
        why = ": each unit is stored as a row" if value > HIGHEST_LIMIT else ""
        raise ValueError(f"limit must be between 1 and {HIGHEST_LIMIT}, not {value}{why}")
    return value


def _check_period(value: Seconds) -> float:
    period = seconds(value, "per")
    if not 0.001 <= period <= LONGEST_PERIOD:
        raise ValueError(f"per must be between 0.001 s and a year, not {period:g} s")
    return period
