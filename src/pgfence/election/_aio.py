"""`AsyncElection`: leader election for asyncio."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Self

from pgfence._api.cancel_on_loss import await_work
from pgfence._api.inputs import AsyncEngineSource
from pgfence._api.locks import AsyncLockBase
from pgfence._holds.carriers import TaskCarrier, keep_task
from pgfence._process.clock import seconds
from pgfence.election._candidacy import Candidacy
from pgfence.election._handles import AsyncTerm
from pgfence.election._observer import Observer
from pgfence.election._request import TermOptions
from pgfence.lease._engines import ASYNC_ENGINES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from pgfence._leases.terms import Heartbeat
    from pgfence._process.clock import Seconds
    from pgfence.types import Holder, OnLoss


class _AsyncCandidate(TermOptions[AsyncEngineSource, AsyncTerm], AsyncLockBase[AsyncTerm]):
    """The lease that the leader of an election holds."""

    _public_name = "AsyncElection"
    _engines = ASYNC_ENGINES
    _handle = AsyncTerm

    async def try_acquire(self) -> AsyncTerm | None:
        return await self._take(0.0)

    async def acquire(self, *, timeout: Seconds | None = None) -> AsyncTerm:
        return await self._acquire(timeout)

    async def holders(self) -> list[Holder]:
        return await self._find_holders()


class AsyncElection:
    """Elect one leader at a time among the processes that are candidates for a name; see `Election`.

    Guarantees, limitations, arguments and errors are the same as for `Election`, except that the engine is an AsyncEngine. A
    loss cancels the task of `AsyncMember.run` and the block of `lead()`.
    """

    def __init__(
        self,
        engine: AsyncEngineSource,
        name: str,
        *,
        ttl: Seconds = 15,
        heartbeat: Heartbeat = "auto",
        max_hold: Seconds | None = None,
        namespace: str | None = None,
    ) -> None:
        self._candidate = _AsyncCandidate(
            engine, name, ttl=ttl, heartbeat=heartbeat, max_hold=max_hold, namespace=namespace
        )

    def stand(
        self,
        *,
        owner: str | None = None,
        on_gained: Callable[[], object] | None = None,
        on_lost: Callable[[], object] | None = None,
        on_changed: Callable[[Holder | None], object] | None = None,
    ) -> AsyncMember:
        """Stand for election, and return a member, which is a candidate in a task of the running loop until it resigns.

        Arguments are the same as for the sync class. The callbacks may be coroutine functions, and run one after the other in the
        member's task.

        Raises:
            RuntimeError: no event loop is running.
            TypeError: `owner` is not a str.
        """
        carrier = TaskCarrier(asyncio.get_running_loop())
        return AsyncMember(
            Candidacy(
                self._candidate.with_owner(owner),
                carrier,
                on_gained=on_gained,
                on_lost=on_lost,
                on_changed=on_changed,
            )
        )

    async def campaign(self, *, owner: str | None = None, timeout: Seconds | None = None) -> AsyncTerm:
        """Campaign until this process is the leader, and return its term; arguments and errors are those of the sync class."""
        return await self._candidate.with_owner(owner).acquire(timeout=timeout)

    def lead(
        self, *, owner: str | None = None, timeout: Seconds | None = None, on_loss: OnLoss = "cancel"
    ) -> AbstractAsyncContextManager[AsyncTerm, None]:
        """Lead for the duration of an `async with` block, which a loss cancels by default.

        Arguments and errors are the same as for the sync class.
        """
        return self._candidate.with_owner(owner).hold(timeout=timeout, on_loss=on_loss)

    async def observe(self, *, timeout: Seconds | None = None) -> AsyncIterator[Holder | None]:
        """Yield the current leader, then the new leader at each change; see `Election.observe`."""
        observer = Observer(self._candidate, math.inf if timeout is None else seconds(timeout))
        try:
            while (found := await observer.find_change())[0]:
                yield found[1]
        finally:
            observer.close()

    def __repr__(self) -> str:
        return f"<AsyncElection {self._candidate._name!r}, ttl={self._candidate._terms.ttl:g}>"


class AsyncMember:
    """A member of an election, which is a candidate in a task; see `Member`.

    Call `resign`, or use the member as an async context manager.
    """

    def __init__(self, candidacy: Candidacy[AsyncTerm]) -> None:
        self._candidacy = candidacy
        self._worker: asyncio.Task[object] | None = None
        self._task = asyncio.get_running_loop().create_task(candidacy.run_member(), name="pgfence-member")
        keep_task(self._task)

    @property
    def is_leader(self) -> bool:
        """Whether this member is the leader, as far as this process knows. Reading it does no I/O."""
        return self._candidacy.term is not None

    @property
    def term(self) -> AsyncTerm | None:
        """The current term, or None while this member is not the leader. Reading it does no I/O."""
        return self._candidacy.term

    async def run(self, fn: Callable[[AsyncTerm], Awaitable[object]], /) -> None:
        """Await `fn(term)` in each term of this member, until the member resigns. A loss or `resign()` cancels the call.

        When `fn` returns, its term is released, and the member is a candidate again one second later, so that another candidate
        may be elected.

        Args:
            fn: the leader's work.

        Raises:
            RuntimeError: `run` is already running for this member.
            Exception: the error that `fn` raises, which also ends its term. A LockLostError or StaleFencingTokenError that `fn`
                raises because the term is lost, also in an exception group, only ends the term. The member stays a candidate
                until it resigns, so call `run` again, or the member may be elected and do nothing.
        """

        async def work(term: AsyncTerm) -> None:
            task = self._worker = asyncio.get_running_loop().create_task(_run_work(fn, term))
            try:
                await await_work(task, term)
            finally:
                self._worker = None

        await self._candidacy.lead_with(work)

    async def resign(self) -> None:
        """Step down if this member leads, and stop being a candidate.

        Returns when the term is released. A second call does nothing.

        Inside a callback or the function of `run`, `resign` returns immediately, and the member steps down afterwards.
        """
        self._candidacy.end()
        if asyncio.current_task() not in (self._task, self._worker):
            await asyncio.wait((self._task,))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self.resign()


async def _run_work(fn: Callable[[AsyncTerm], Awaitable[object]], term: AsyncTerm) -> object:
    return await fn(term)
