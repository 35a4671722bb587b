"""The sync and async handles with a fencing token, for leases and for advisory locks with `token=True`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, overload

from pgfence._api.handles import AsyncHeld, Held, _Handle
from pgfence._leases.json_text import encode_json
from pgfence._process.coroutines import run_sync
from pgfence.fence._entering import (
    begin_fenced,
    begin_fenced_async,
    enter,
    save_checkpoint,
    unwrap_async,
    unwrap_sync,
)
from pgfence.keys import SEPARATOR, qualify_name

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager, AbstractContextManager
    from datetime import datetime
    from uuid import UUID

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
    from sqlalchemy.orm import Session, sessionmaker
    from typing_extensions import TypeVar

    from pgfence._api.inputs import AsyncWork, SyncWork
    from pgfence._leases.grant import Grant
    from pgfence._leases.manager import LeaseManager
    from pgfence._process.clock import Seconds
    from pgfence.types import Json, LeaseRef

    S = TypeVar("S", bound=Session)
    AS = TypeVar("AS", bound=AsyncSession)


def _collect_tokens(handle: FencedHeld | AsyncFencedHeld, resources: tuple[str, ...]) -> Mapping[str, int]:
    """Return the token for each gate to enter, by its stored name: those of the given resources, or else the handle's own."""
    handle.check()
    if not resources:
        return handle._own_tokens
    handle._check_resources(resources)
    own = handle._hold.stored
    namespace, separator, _ = own.partition(SEPARATOR)
    return {qualify_name(each, namespace if separator else "", "a resource"): handle.token for each in resources}


class _HasToken(_Handle):
    """The common part of the sync and async handles with a token."""

    __slots__ = ()

    @property
    def token(self) -> int:
        """The fencing token of this grant. Reading it does no I/O."""
        token = self._hold.token
        assert token is not None
        return token

    @property
    def _own_tokens(self) -> dict[str, int]:
        """The token for each gate of this grant itself, by its stored name."""
        return {self._hold.stored: self.token}

    def _check_resources(self, resources: tuple[str, ...]) -> None:
        """Raise an error if this token must not be compared with those of other resources."""


class _Leased(_HasToken):
    """The common part of the sync and async handles of a lease."""

    __slots__ = ()

    @property
    def _grant(self) -> Grant:
        return cast("Grant", self._hold)

    @property
    def _leases(self) -> LeaseManager:
        return cast("LeaseManager", self._manager)

    @property
    def lease_id(self) -> UUID:
        """The id of this grant. Reading it does no I/O."""
        return self._grant.lease_id

    @property
    def expires_at(self) -> datetime:
        """The time until which the lease is held, by the server's clock, as of the last renewal. Reading it does no I/O."""
        return self._grant.expires_at

    @property
    def last_checkpoint(self) -> Json:
        """The last checkpoint that had been committed when this lease was granted, or None. Reading it does no I/O."""
        return self._grant.checkpoint

    def remaining(self) -> float:
        """Return for how many seconds this process considers the lease held, less the safety margin, or 0.0 if it is not held.

        The call does no I/O.
        """
        return self._grant.get_remaining()

    def progress(self) -> None:
        """Report progress of the work. The call does no I/O.

        With `heartbeat="progress"`, the lease is renewed only if progress was reported since the last renewal.
        """
        self._grant.progress()

    def abandon(self) -> None:
        """Stop renewing without releasing, so that the lease expires after its TTL. The call does no I/O.

        Raises:
            LockNotHeldError: the handle was already released.
        """
        self._leases.let_lapse(self._grant)


class FencedHeld(_HasToken, Held):
    """A lock or lease that is held and has a fencing token, a number that only grows for its name.

    Limitations: the token alone does not stop any writer. Only a transaction that enters a gate with a stale token is rejected,
    so use `begin`, or `fence` as the first statement.
    """

    __slots__ = ()

    def fence(self, session: SyncWork, *resources: str) -> None:
        """Enter the gate in a transaction that you began, as its first statement. The transaction stays inside until it ends.

        Args:
            session: a Session or Connection.
            resources: the resources whose gates are entered, in the namespace of the lock or lease; by default, the resource
                that has the name of the lock or lease.

        Raises:
            StaleFencingTokenError: another token is valid now. No change of the transaction can be committed. In REPEATABLE READ
                and SERIALIZABLE, PostgreSQL may raise a serialization failure (SQLSTATE 40001) instead.
            LockTimeoutError: a transaction of an older holder, or the first one with this token, was still inside the gate after
                the session's own `lock_timeout` or, if none is set, the configured `default_timeout`. PostgreSQL has aborted this
                transaction, so roll back.
            TransactionStateError: the connection is in autocommit or a pipeline, or another statement was already sent.
            LockLostError, LockNotHeldError: the lock or lease is no longer held, as far as this process knows.
            SchemaError, CapacityError, StandbyError, UnreachableError: see `pgfence.fence`.
            TypeError: `session` is an engine, a factory or async; or a resource is not a str.
            ValueError: the session is configured for another schema or prefix, whose installation has not issued this token; or a
                resource is not usable.
        """
        enter(unwrap_sync(session), _collect_tokens(self, resources), issued=self._hold.place)

    @overload
    def begin(self, factory: sessionmaker[S], *resources: str) -> AbstractContextManager[S, None]: ...
    @overload
    def begin(self, factory: Engine, *resources: str) -> AbstractContextManager[Connection, None]: ...
    def begin(self, factory: object, *resources: str) -> AbstractContextManager[object, None]:
        """Open a transaction, enter the gate, yield the Session or Connection, and commit at the end of the block.

        Guarantees: a transaction that enters the gate after a newer token was granted is rejected. A transaction that is already
        inside may still commit, and the newer holder waits for it at the gate.

        Limitations: nothing is guaranteed about what was read before the block. If the block catches an error of a statement that
        it did not send in a savepoint, PostgreSQL has aborted the transaction: nothing is committed, and no error is raised at
        the end of the block, as with SQLAlchemy's own `begin()`.

        Args:
            factory: a sessionmaker, which yields a Session; or an Engine, which yields a Connection.
            resources: the resources whose gates are entered, in the namespace of the lock or lease; by default, the resource
                that has the name of the lock or lease.

        Raises:
            PgfenceError, ValueError: on entering, the same errors as `fence`; inside the block, the errors of fences that reject
                a statement.
            CommitOutcomeUnknownError: on leaving, if the connection was lost during COMMIT.
            TypeError: the factory is neither a sessionmaker nor an Engine, or a resource is not a str.
        """
        return begin_fenced(factory, _collect_tokens(self, resources), self._hold.place)


class HeldLease(_Leased, FencedHeld):
    """A lease that is held. Call `release`, or use the handle as a context manager, which releases the lease at the end.

    `state`, `lost` and `check()` use the clock of this process, so after a pause they report a loss before any I/O.
    """

    __slots__ = ()

    def renew(self, ttl: Seconds | None = None) -> None:
        """Renew the lease now. If a TTL (in seconds) is given, it applies from now on.

        With `heartbeat="manual"`, you must call this method yourself. Otherwise, it is rarely needed.

        Raises:
            LockLostError: the lease is lost.
            LockNotHeldError: the handle was released.
            UnreachableError: the server did not respond. The lease is held until its deadline, and the heartbeat keeps trying.
            ValueError, TypeError: the TTL is not usable; see `Lease`.
        """
        run_sync(self._leases.renew, self._grant, ttl_of(ttl))

    def checkpoint(self, session: SyncWork, data: Json) -> None:
        """Save a checkpoint in your transaction. The next holder can resume from it.

        The transaction enters the gate of this lease, even if other statements were already sent.

        Args:
            session: a Session or Connection, preferably the one from `begin()`.
            data: JSON, which replaces the previous checkpoint.

        Raises:
            PgfenceError: the same errors as `fence`, except that other statements may precede the call.
            TypeError: `data` contains an object that JSON cannot represent, or `session` is an engine, a factory or async.
            ValueError: `data` contains NaN, infinity, NUL, a lone surrogate or a circular reference; or the session is configured
                for another schema or prefix.
        """
        work = unwrap_sync(session)
        self.check()
        save_checkpoint(work, self._hold.stored, self.token, encode_json(data, "a checkpoint"), self._hold.place)

    def hand_over(self) -> LeaseRef:
        """Renew the lease a last time, and return a reference with which another process can adopt it.

        This handle is then released, and the other process has one TTL to adopt the lease.

        Raises:
            LockLostError, LockNotHeldError, UnreachableError: the lease could not be renewed, and is not handed over; see
                `renew`.
        """
        return run_sync(self._leases.hand_over, self._grant)


def ttl_of(ttl: Seconds | None) -> float | None:
    """Return a checked TTL in seconds, or None."""
    from pgfence._leases import terms

    return None if ttl is None else terms.ttl_of(ttl)


class AsyncFencedHeld(_HasToken, AsyncHeld):
    """A lock or lease that is held and has a fencing token; see `FencedHeld`."""

    __slots__ = ()

    async def fence(self, session: AsyncWork, *resources: str) -> None:
        """Enter the gate in a transaction that you began, as its first statement. The transaction stays inside until it ends.

        Arguments and errors are the same as for `FencedHeld.fence`, with an AsyncSession or AsyncConnection.
        """
        target = unwrap_async(session)
        tokens, issued = _collect_tokens(self, resources), self._hold.place
        await target.run_sync(lambda work: enter(work, tokens, issued=issued))

    @overload
    def begin(self, factory: async_sessionmaker[AS], *resources: str) -> AbstractAsyncContextManager[AS, None]: ...
    @overload
    def begin(self, factory: AsyncEngine, *resources: str) -> AbstractAsyncContextManager[AsyncConnection, None]: ...
    def begin(self, factory: object, *resources: str) -> AbstractAsyncContextManager[object, None]:
        """Open a transaction, enter the gate, yield the AsyncSession or AsyncConnection, and commit at the end of the block.

        Guarantees, arguments and errors are the same as for `FencedHeld.begin`, with an async_sessionmaker or AsyncEngine.
        """
        return begin_fenced_async(factory, _collect_tokens(self, resources), self._hold.place)


class AsyncHeldLease(_Leased, AsyncFencedHeld):
    """A lease that is held; see `HeldLease`."""

    __slots__ = ()

    async def renew(self, ttl: Seconds | None = None) -> None:
        """Renew the lease now; arguments and errors are the same as for `HeldLease.renew`."""
        await self._leases.renew(self._grant, ttl_of(ttl))

    async def checkpoint(self, session: AsyncWork, data: Json) -> None:
        """Save a checkpoint; arguments and errors are the same as for `HeldLease.checkpoint`."""
        target = unwrap_async(session)
        self.check()
        name, token, text = self._hold.stored, self.token, encode_json(data, "a checkpoint")
        issued = self._grant.place
        await target.run_sync(lambda work: save_checkpoint(work, name, token, text, issued))

    async def hand_over(self) -> LeaseRef:
        """Return a reference with which another process can adopt the lease; see `HeldLease.hand_over`."""
        return await self._leases.hand_over(self._grant)
