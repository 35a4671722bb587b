"""What both twins of a Once know: the arguments, read once."""

from __future__ import annotations

from copy import copy
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self

from pgfence.keys import qualified_name
from pgfence.lease._request import LeaseOptions
from pgfence.once._claim import SlotRequest
from pgfence.once._schedule import schedule_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from pgfence._process.clock import Seconds
    from pgfence._sql.storage import TableNames
    from pgfence.once._slots import CatchUp

WHAT = "the name of a Once"


class OnceOptions(LeaseOptions):
    """The arguments of a Once."""

    def __init__(
        self,
        name: str,
        *,
        every: timedelta | None,
        cron: str | None,
        at: datetime | str | None,
        tz: str,
        catch_up: CatchUp,
        ttl: Seconds,
        max_hold: Seconds | None,
        namespace: str | None,
    ) -> None:
        super().__init__(
            name,
            ttl=ttl,
            max_hold=max_hold,
            min_hold=0,
            lock_delay=0,
            heartbeat="auto",
            owner=None,
            purpose="",
            metadata=None,
            namespace=namespace,
        )
        self._schedule = schedule_of(every, cron, at, tz, catch_up)
        self._catch_up: CatchUp = catch_up

    def _due(self, place: TableNames, namespace: str) -> SlotRequest:
        return SlotRequest(
            stored=qualified_name(self._row(), namespace if self._namespace is None else self._namespace, WHAT),
            place=place,
            terms=self._terms,
            identity=self._identity,
            heartbeat=self._heartbeat,
            schedule=self._schedule,
            catch_up=self._catch_up,
        )

    def _named(self, names: Sequence[Any]) -> Self:
        other = copy(self)
        other._names = tuple(names)
        return other

    def _row(self) -> str:
        """Return what names its rows: slots that the caller names may run in any order and beside each other."""
        name: str = self._names[0]
        return f"{name}@{self._schedule.isoformat()}" if isinstance(self._schedule, datetime) else name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._row()!r}>"
