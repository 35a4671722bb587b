"""The requests to the server for a term, and the arguments of an election, for the sync and async classes, without I/O."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from pgfence._api.inputs import check_text
from pgfence._leases.request import Busy, Identity, LeaseRequest
from pgfence.keys import qualify_name
from pgfence.lease._engines import EngineSourceT
from pgfence.lease._request import HandleT, LeaseOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._leases.manager import LeaseManager
    from pgfence._leases.request import Steps
    from pgfence._leases.terms import Heartbeat
    from pgfence._process.clock import Seconds
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames


@dataclass(frozen=True, kw_only=True)
class TermRequest(LeaseRequest):
    """The request for the term of a leader. `on_busy` is called with the server's response about the current leader."""

    on_busy: Callable[[Busy], None] | None = None

    kind = "term"

    def run_steps(self, style: ParamStyle, lease_id: str) -> Steps:
        outcome = yield from super().run_steps(style, lease_id)
        if isinstance(outcome, Busy) and self.on_busy is not None:
            self.on_busy(outcome)
        return outcome


class TermOptions(LeaseOptions[EngineSourceT, HandleT]):
    """The options of one candidate in an election, which are those of the lease whose holder is the leader."""

    def __init__(
        self,
        engine: EngineSourceT,
        name: str,
        *,
        ttl: Seconds,
        heartbeat: Heartbeat,
        max_hold: Seconds | None,
        namespace: str | None,
    ) -> None:
        if heartbeat == "manual":
            raise ValueError('heartbeat must be "auto" or "progress": with "manual", a term would not be renewed')
        super().__init__(engine, name, ttl=ttl, heartbeat=heartbeat, max_hold=max_hold, namespace=namespace)

    def with_owner(self, owner: str | None) -> Self:
        """Return a copy of these options with the name of the candidate that operators see. None changes nothing."""
        if owner is None:
            return self
        other = copy(self)
        other._identity = Identity(check_text(owner, "owner"))
        other._request = None
        return other

    def build(self, on_busy: Callable[[Busy], None]) -> tuple[LeaseManager, TermRequest]:
        manager, request = self._prepare()
        assert isinstance(request, TermRequest)
        return manager, replace(request, on_busy=on_busy)

    def _create_request(self, place: TableNames, namespace: str) -> TermRequest:
        return TermRequest(
            stored=qualify_name(self._name, namespace, "the name of an election"),
            place=place,
            terms=self._terms,
            identity=self._identity,
            heartbeat=self._heartbeat,
        )
