"""The options of leases, and the references with which a lease is adopted."""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, ClassVar, Generic, Self, TypeVar
from uuid import UUID

from pgfence._api.inputs import check_choice, check_text
from pgfence._leases import terms
from pgfence._leases.json_text import encode_json
from pgfence._leases.manager import LeaseManager
from pgfence._leases.request import Identity, LeaseRequest, holder_of
from pgfence.errors import UnreachableError
from pgfence.keys import SEPARATOR, qualify_name, unqualify_name
from pgfence.lease._engines import EngineSourceT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgfence._leases.grant import Grant
    from pgfence._leases.request import AcquireRequest
    from pgfence._leases.terms import Heartbeat
    from pgfence._process.clock import Seconds
    from pgfence._sql.storage import TableNames
    from pgfence.keys import Name
    from pgfence.lease._engines import EngineKind
    from pgfence.types import Holder, Json

HandleT = TypeVar("HandleT")


class LeaseOptions(Generic[EngineSourceT, HandleT]):
    """The options of a lease and its acquisition, for the sync and async classes."""

    _public_name: ClassVar[str] = ""
    _engines: EngineKind[EngineSourceT]
    _handle: Callable[[LeaseManager, Grant], HandleT]

    def __init__(
        self,
        engine: EngineSourceT,
        name: str,
        *,
        ttl: Seconds,
        max_hold: Seconds | None = None,
        min_hold: Seconds = 0,
        lock_delay: Seconds = 0,
        heartbeat: Heartbeat = "auto",
        owner: str | None = None,
        purpose: str = "",
        metadata: Json = None,
        namespace: str | None = None,
    ) -> None:
        qualify_name(name, namespace or "", "the name")
        check_choice("heartbeat", heartbeat, ("auto", "progress", "manual"))
        self._names: Sequence[Name] = (name,)
        self._terms = terms.build_terms(ttl, max_hold=max_hold, min_hold=min_hold, lock_delay=lock_delay)
        self._heartbeat: Heartbeat = heartbeat
        self._identity = Identity(
            None if owner is None else check_text(owner, "owner"),
            check_text(purpose, "purpose"),
            encode_json(metadata, "metadata"),
        )
        self._namespace = namespace
        self._request: tuple[object, AcquireRequest] | None = None
        self._engine = self._engines.bind(engine, self._public_name or type(self).__name__)

    @property
    def _name(self) -> str:
        (name,) = self._names
        assert isinstance(name, str)
        return name

    def _rename(self, names: Sequence[Name]) -> Self:
        other = copy(self)
        other._names = tuple(names)
        return other

    async def _take(self, timeout: Seconds | None, *, lasts: bool = False) -> HandleT | None:
        """Return a handle, or None if the lease is held and `timeout` is 0."""
        manager, request = self._prepare()
        return await manager.acquire(request, timeout, self._handle, lasts=lasts)

    async def _acquire(self, timeout: Seconds | None) -> HandleT:
        handle = await self._take(timeout, lasts=timeout is not None)
        if handle is not None:
            return handle
        manager, request = self._prepare()
        try:
            holders = await self._find_holders()
        except UnreachableError:
            # The server became unreachable after it reported the lease as held, so the timeout still counts.
            holders = []
        raise manager.begin_call(request, 0.0).build_timeout_error(holders)

    async def _find_holders(self) -> list[Holder]:
        manager, request = self._prepare()
        row = await manager.look(request.place, request.stored)
        return [] if row is None else [holder_of(request, row)]

    def _prepare(self) -> tuple[LeaseManager, AcquireRequest]:
        manager, place = self._engine.find_manager(LeaseManager)
        return manager, self._build_request(place, manager.config.namespace)

    def _build_request(self, place: TableNames, namespace: str) -> AcquireRequest:
        """Return the request for a lease, rebuilt only if tables, namespace or name have changed."""
        asked, known = (place, namespace, self._names), self._request
        if known is None or known[0] != asked:
            request = self._create_request(place, namespace if self._namespace is None else self._namespace)
            # The local value is returned, because another thread may set `_request` for another engine's tables in between.
            self._request = known = asked, request
        return known[1]

    def _create_request(self, place: TableNames, namespace: str) -> AcquireRequest:
        return LeaseRequest(
            stored=qualify_name(self._name, namespace, "the name"),
            place=place,
            terms=self._terms,
            identity=self._identity,
            heartbeat=self._heartbeat,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}, ttl={self._terms.ttl:g}>"


async def adopt(
    engines: EngineKind[EngineSourceT],
    engine: EngineSourceT,
    reference: object,
    make: Callable[[LeaseManager, Grant], HandleT],
    what: str,
) -> HandleT:
    """Take over a lease by its reference; `what` is the name of the calling method in messages."""
    manager, place = engines.bind(engine, what).find_manager(LeaseManager)
    name, lease_id, token = _check_reference(reference)
    request = LeaseRequest(stored=name, place=place, terms=terms.LeaseTerms(terms.SHORTEST_TTL))
    assert request.names == (unqualify_name(name),)
    return await manager.adopt(request, {"name": name, "lease_id": lease_id, "token": token}, make)


def _check_reference(reference: object) -> tuple[str, str, int]:
    """Return name, id and token.

    Raises:
        TypeError: the value is not a reference.
        ValueError: the reference is damaged.
    """
    if not isinstance(reference, dict) or not {"name", "lease_id", "token"} <= reference.keys():
        raise TypeError("adopt() needs the dict that hand_over() returned, with 'name', 'lease_id' and 'token'")
    name, lease_id, token = reference["name"], reference["lease_id"], reference["token"]
    if type(token) is not int or not isinstance(name, str) or not isinstance(lease_id, str):
        raise TypeError(
            "this lease reference is damaged: 'name' and 'lease_id' must be str, and 'token' must be an int"
        )
    try:
        UUID(lease_id)
    except ValueError:
        raise ValueError(f"this lease reference is damaged: {lease_id!r} is not a lease id") from None
    if not 0 < token < 1 << 63:
        raise ValueError(f"this lease reference is damaged: {token} is not a fencing token")
    if SEPARATOR not in name:
        qualify_name(name, "", "the name of a lease")
    return name, lease_id, token
