"""Lease, for tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pgfence._api.inputs import AsyncEngineSource, check_async_engine_source, resolve_async_engine
from pgfence._api.locks import AsyncLockBase
from pgfence._leases import manager as leases
from pgfence._leases.manager import LeaseManager
from pgfence._leases.request import holder_of
from pgfence._sql.storage import table_names
from pgfence.config import config_of
from pgfence.fence.handles import AsyncHeldLease
from pgfence.lease._request import LeaseOptions, claim_of

if TYPE_CHECKING:
    from pgfence._leases.request import AcquireRequest
    from pgfence._process.clock import Seconds
    from pgfence._sql.storage import TableNames
    from pgfence.types import Holder, LeaseRef


ManagerT = TypeVar("ManagerT", bound=LeaseManager)


class AsyncLease(LeaseOptions[AsyncEngineSource], AsyncLockBase[AsyncHeldLease]):
    """A lock that expires: it lives in a row of the database, not in a connection, and brings a fencing token; see `Lease`.

    Promises, arguments and errors are those of the sync twin, with an AsyncEngine. The heartbeat is a thread of its own, so
    a blocked loop cannot lose the lease; a loss cancels the block of `hold()`.
    """

    _check_engine = staticmethod(check_async_engine_source)

    async def try_acquire(self) -> AsyncHeldLease | None:
        """Try once, without waiting. One round trip on a warm connection.

        Returns None if it is held, also by this very task: a try cannot deadlock.

        Raises:
            PgfenceError: as `acquire`.
        """
        manager, claim = self._place()
        return await manager.acquire(claim, 0.0, AsyncHeldLease)

    async def acquire(self, *, timeout: Seconds | None = None) -> AsyncHeldLease:
        """Wait until it is held.

        Args:
            timeout: seconds; None is the configured default, `math.inf` waits without a limit, 0 does not wait. A wait lasts
                through an outage of the server, up to its timeout; with None only once the server has responded that the lease
                is held.

        Raises:
            LockTimeoutError: it was not free in time; names the holder.
            SelfDeadlockError: this task holds it, or waiting would close a cycle inside this process. Not with `timeout=0`.
            UnreachableError: the server cannot be reached; a grant whose response was lost is given back in the background.
            SchemaError: the tables are missing, too old, or not open to this role.
            StandbyError, UnsupportedServerError: no lease can be written on this server.
        """
        manager, claim = self._place()
        handle = await manager.acquire(claim, timeout, AsyncHeldLease, lasts=timeout is not None)
        if handle is None:
            raise manager.begin_call(claim, 0.0).timed_out(await self._seen())
        return handle

    @staticmethod
    async def adopt(engine: AsyncEngineSource, ref: LeaseRef) -> AsyncHeldLease:
        """Take over a lease that another process handed over; from now on it is renewed here.

        A reference works once: whoever comes second is refused.

        Args:
            engine: an AsyncEngine, or a function that returns one.
            ref: what `hand_over()` returned.

        Raises:
            LockLostError: it has expired, was adopted already, or was evicted.
            TypeError, ValueError: it is no reference.
            PgfenceError: as `acquire`.
        """
        manager, place = manager_for(
            check_async_engine_source(engine, "AsyncLease.adopt"), "AsyncLease.adopt", LeaseManager
        )
        claim, reference = claim_of(manager.engine, ref, place)
        return await manager.adopt(claim, reference, AsyncHeldLease)

    async def holders(self) -> list[Holder]:
        """Return who holds it at this moment, as the server sees it. Looking never takes a lock.

        Raises:
            UnreachableError: there is no server.
            SchemaError: the tables are missing.
        """
        manager, claim = self._place()
        row = await manager.look(claim.place, claim.stored)
        return [] if row is None else [holder_of(claim, row)]

    def _place(self) -> tuple[LeaseManager, AcquireRequest]:
        manager, place = manager_for(self._engine, type(self).__name__, LeaseManager)
        return manager, self._claim(place, manager.config.namespace)


def manager_for(source: AsyncEngineSource, what: str, kind: type[ManagerT]) -> tuple[ManagerT, TableNames]:
    """Return the leases, or the like, of an engine on the running loop, and where its tables are."""
    engine = resolve_async_engine(source, what)
    return leases.manager_for(engine.sync_engine, config_of(engine, pin=True), kind), table_names(engine)
