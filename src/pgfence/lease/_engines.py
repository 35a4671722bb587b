"""Check what a caller passes as an engine, and find the lease manager for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pgfence._api.inputs import (
    AsyncEngineSource,
    EngineSource,
    check_async_engine_source,
    check_engine_source,
    resolve_async_engine,
    resolve_engine,
)
from pgfence._leases.manager import LeaseManager, get_manager
from pgfence._sql.storage import table_names_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

    from pgfence._sql.storage import TableNames

EngineSourceT = TypeVar("EngineSourceT")
EngineSourceT_co = TypeVar("EngineSourceT_co", covariant=True)
ManagerT = TypeVar("ManagerT", bound=LeaseManager)


class _Check(Protocol[EngineSourceT_co]):
    def __call__(self, given: object, what: str, why: str = ..., /) -> EngineSourceT_co: ...


@dataclass(frozen=True, slots=True)
class EngineFinder:
    """A checked engine source, from which the engine and its manager are found."""

    find: Callable[[], Engine]

    def find_manager(self, kind: type[ManagerT]) -> tuple[ManagerT, TableNames]:
        """Return the engine's manager in this process or on the running loop, and the names of pgfence's tables."""
        engine = self.find()
        return get_manager(engine, kind), table_names_of(engine)


@dataclass(frozen=True, slots=True)
class EngineKind(Generic[EngineSourceT]):
    """The checks that differ between a sync class and its async counterpart."""

    check: _Check[EngineSourceT]
    resolve: Callable[[EngineSourceT, str], Engine]

    def bind(self, given: object, what: str, *why: str) -> EngineFinder:
        """Return a finder for the engine. A function is called at each use, and an engine is resolved once.

        Raises:
            TypeError: the value is not an engine source of this kind.
        """
        source = self.check(given, what, *why)
        if callable(source):
            return EngineFinder(partial(self.resolve, source, what))
        engine = self.resolve(source, what)
        return EngineFinder(lambda: engine)


SYNC_ENGINES: EngineKind[EngineSource] = EngineKind(check_engine_source, resolve_engine)
ASYNC_ENGINES: EngineKind[AsyncEngineSource] = EngineKind(
    check_async_engine_source, lambda source, what: resolve_async_engine(source, what).sync_engine
)
