"""What both twins of a lease know: the arguments, read once and refused with the way out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from copy import copy
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar
from uuid import UUID

from pgfence._api.inputs import check_choice, check_text
from pgfence._leases import terms
from pgfence._leases.request import Identity, LeaseRequest, json_text
from pgfence.config import config_of
from pgfence.keys import display_name, qualified_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence._leases.request import AcquireRequest
    from pgfence._leases.terms import Heartbeat
    from pgfence._process.clock import Seconds
    from pgfence._sql.storage import TableNames
    from pgfence.keys import Name
    from pgfence.types import Json

EngineSourceT = TypeVar("EngineSourceT")
"""What gives the engine: of a sync or of an async twin."""


class LeaseOptions(ABC, Generic[EngineSourceT]):
    """The arguments of a lease, for both twins."""

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
        if not isinstance(name, str):
            raise TypeError(f"a lease is kept by its name, as text: give a str, not {type(name).__name__}")
        qualified_name(name, namespace or "", "the name of a lease")
        check_choice("heartbeat", heartbeat, ("auto", "progress", "manual"))
        self._names: Sequence[Name] = (name,)
        self._terms = terms.terms(ttl, max_hold=max_hold, min_hold=min_hold, lock_delay=lock_delay)
        self._heartbeat: Heartbeat = heartbeat
        self._identity = Identity(
            None if owner is None else check_text(owner, "owner"),
            check_text(purpose, "purpose"),
            json_text(metadata, "metadata"),
        )
        self._namespace = namespace
        self._claimed: tuple[object, AcquireRequest] | None = None
        self._engine = self._check_engine(engine, type(self).__name__)

    @staticmethod
    @abstractmethod
    def _check_engine(engine: object, what: str) -> EngineSourceT:
        """Reject what is not a source of an engine of this kind."""

    @property
    def _name(self) -> str:
        (name,) = self._names
        assert isinstance(name, str)
        return name

    def _named(self, names: Sequence[Name]) -> Self:
        other = copy(self)
        other._names = tuple(names)
        return other

    def _claim(self, place: TableNames, namespace: str) -> AcquireRequest:
        """Return what to ask for, created again only where it differs from the last time."""
        asked = place, namespace, self._names
        if self._claimed is None or self._claimed[0] != asked:
            where = namespace if self._namespace is None else self._namespace
            claim = LeaseRequest(
                stored=qualified_name(self._name, where, "the name of a lease"),
                place=place,
                terms=self._terms,
                identity=self._identity,
                heartbeat=self._heartbeat,
            )
            self._claimed = asked, claim
        return self._claimed[1]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}, ttl={self._terms.ttl:g}>"


def claim_of(engine: Any, reference: object, place: TableNames) -> tuple[LeaseRequest, dict[str, Any]]:
    """Return what a reference asks for.

    Raises:
        TypeError: it is no reference.
        ValueError: it is damaged.
    """
    if not isinstance(reference, dict) or not {"name", "lease_id", "token"} <= reference.keys():
        raise TypeError("adopt() needs what hand_over() returned: a dict with name, lease_id and token")
    name, lease_id, token = reference["name"], reference["lease_id"], reference["token"]
    if (
        isinstance(token, bool)
        or not isinstance(token, int)
        or not isinstance(name, str)
        or not isinstance(lease_id, str)
    ):
        raise TypeError("this reference is damaged: name and lease_id are text, token is an int")
    try:
        UUID(lease_id)
    except ValueError:
        raise ValueError(f"this reference is damaged: {lease_id!r} is no lease id") from None
    if not 0 < token < 1 << 63:
        raise ValueError(f"this reference is damaged: {token} is no token")
    _, separator, _ = name.partition("\x1f")
    if not separator:
        qualified_name(name, "", "the name of a lease")
    config_of(engine, pin=True)
    claim = LeaseRequest(stored=name, place=place, terms=terms.LeaseTerms(terms.SHORTEST_TTL))
    assert claim.names == (display_name(name),)
    return claim, {"name": name, "lease_id": lease_id, "token": token}
