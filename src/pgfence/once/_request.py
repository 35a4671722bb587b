"""What both twins of a Once know: the arguments, read once."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, overload

from pgfence.keys import qualified_name
from pgfence.lease._request import EngineSourceT, LeaseOptions
from pgfence.once._claim import SlotRequest
from pgfence.once._schedule import schedule_of

if TYPE_CHECKING:
    from datetime import timedelta

    from pgfence._process.clock import Seconds
    from pgfence._sql.storage import TableNames
    from pgfence.once._slots import CatchUp

WHAT = "the name of a Once"


class OnceOptions(LeaseOptions[EngineSourceT]):
    """The arguments of a Once, for both twins."""

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

    def _claim(self, place: TableNames, namespace: str) -> SlotRequest:
        return SlotRequest(
            stored=qualified_name(self._row(), namespace if self._namespace is None else self._namespace, WHAT),
            place=place,
            terms=self._terms,
            identity=self._identity,
            heartbeat=self._heartbeat,
            schedule=self._schedule,
            catch_up=self._catch_up,
        )

    def _row(self) -> str:
        """Return what names its rows: slots that the caller names may run in any order and beside each other."""
        return f"{self._name}@{self._schedule.isoformat()}" if isinstance(self._schedule, datetime) else self._name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._row()!r}>"
