"""Check the options of a Once, for the sync and async classes."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, TypeVar, overload

from pgfence._leases.request import Refused
from pgfence.keys import qualify_name
from pgfence.lease._engines import EngineSourceT
from pgfence.lease._request import HandleT, LeaseOptions
from pgfence.once._claim import SlotOverError, SlotRequest
from pgfence.once._schedule import schedule_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from pgfence._process.clock import Seconds
    from pgfence._sql.storage import TableNames
    from pgfence.once._slots import CatchUp

R = TypeVar("R")
W = TypeVar("W")

WHAT = "the name of a Once"


def list_rounds(results: list[R], once: W, further: W) -> Iterator[W]:
    """Yield a guard for each call while slots are caught up.

    A call that adds no result is the last, because it found no slot that is due.
    """
    yield once
    before = 0
    while len(results) > before:
        before = len(results)
        yield further


class OnceOptions(LeaseOptions[EngineSourceT, HandleT]):
    """The options of a Once and its acquisition, for the sync and async classes."""

    @overload
    def __init__(
        self,
        engine: EngineSourceT,
        name: str,
        *,
        every: timedelta,
        tz: str = "UTC",
        catch_up: CatchUp = "last",
        ttl: Seconds = 60,
        max_hold: Seconds | None = None,
        namespace: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        engine: EngineSourceT,
        name: str,
        *,
        cron: str,
        tz: str = "UTC",
        catch_up: CatchUp = "last",
        ttl: Seconds = 60,
        max_hold: Seconds | None = None,
        namespace: str | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        engine: EngineSourceT,
        name: str,
        *,
        at: datetime | str,
        ttl: Seconds = 60,
        max_hold: Seconds | None = None,
        namespace: str | None = None,
    ) -> None: ...
    def __init__(
        self,
        engine: EngineSourceT,
        name: str,
        *,
        every: timedelta | None = None,
        cron: str | None = None,
        at: datetime | str | None = None,
        tz: str = "UTC",
        catch_up: CatchUp = "last",
        ttl: Seconds = 60,
        max_hold: Seconds | None = None,
        namespace: str | None = None,
    ) -> None:
        super().__init__(engine, name, ttl=ttl, max_hold=max_hold, namespace=namespace)
        self._schedule = schedule_of(every, cron, at, tz, catch_up)
        self._catch_up: CatchUp = catch_up
        self._qualify(namespace or "")

    async def _take(self, timeout: Seconds | None, *, lasts: bool = False) -> HandleT | None:
        try:
            return await super()._take(timeout, lasts=lasts)
        except Refused as refused:
            raise refused.__cause__ or refused from None

    async def _try(self) -> HandleT | None:
        try:
            return await self._take(0.0)
        except SlotOverError:
            return None

    def _build_request(self, place: TableNames, namespace: str) -> SlotRequest:
        return SlotRequest(
            stored=self._qualify(namespace if self._namespace is None else self._namespace),
            place=place,
            terms=self._terms,
            identity=self._identity,
            heartbeat=self._heartbeat,
            schedule=self._schedule,
            catch_up=self._catch_up,
        )

    def _qualify(self, namespace: str) -> str:
        what = f"{WHAT}, including its slot," if isinstance(self._schedule, datetime) else WHAT
        return qualify_name(self._get_row_name(), namespace, what)

    def _get_row_name(self) -> str:
        """Return the name of the row.

        Slots given by `at=` may run in any order and at the same time, so each has a separate row.
        """
        return f"{self._name}@{self._schedule.isoformat()}" if isinstance(self._schedule, datetime) else self._name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._get_row_name()!r}>"
