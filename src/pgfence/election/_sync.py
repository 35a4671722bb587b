"""`Election`: leader election for threads."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Self

from pgfence._api.inputs import EngineSource, reject_coroutine
from pgfence._api.locks import LockBase
from pgfence._holds.carriers import THREADS
from pgfence._process import threads
from pgfence._process.clock import seconds
from pgfence._process.coroutines import run_sync
from pgfence.election._candidacy import Candidacy
from pgfence.election._handles import Term
from pgfence.election._observer import Observer
from pgfence.election._request import TermOptions
from pgfence.lease._engines import SYNC_ENGINES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import TracebackType

    from pgfence._leases.terms import Heartbeat
    from pgfence._process.clock import Seconds
    from pgfence.types import Holder, OnLoss

_ASYNC = "a Member runs it in a thread. Use AsyncElection"


class _Candidate(TermOptions[EngineSource, Term], LockBase[Term]):
    """The lease that the leader of an election holds."""

    _public_name = "Election"
    _engines = SYNC_ENGINES
    _handle = Term

    def try_acquire(self) -> Term | None:
        return run_sync(self._take, 0.0)

    def acquire(self, *, timeout: Seconds | None = None) -> Term:
        return run_sync(self._acquire, timeout)

    def holders(self) -> list[Holder]:
        return run_sync(self._find_holders)


class Election:
    """Elect one leader at a time among the processes that are candidates for a name.

    ::

        with Election(engine, "scheduler").stand(
            on_gained=scheduler.resume, on_lost=scheduler.pause
        ) as member:
            serve()  # `member.is_leader` says whether this process leads

    The leader holds a lease of that name, which a background thread renews. The fencing token of its term is the number of the
    term. A `Lease`, a `Once` and an `AdvisoryLock(token=True)` of the same name exclude a leader, and are excluded by it.

    Guarantees: at most one leader has the newest token. A transaction of `term.begin()` that begins after a later term was
    granted is rejected, and the next leader waits at the gate for a transaction that was already open. A leader that cannot renew
    its term is notified before another leader is elected, unless its process is paused. A leader that resigns releases the term
    only when `on_lost` and the function of `run` have returned, and another candidate then takes over within moments. After a
    crash, another candidate takes over within about one TTL.

    Limitations: unfenced work of a paused former leader may overlap with that of the new leader, until the former leader checks
    its term. It is not guaranteed which candidate wins.

    Args:
        engine: an Engine, or a function that returns one. The tables must exist; run `pgfence install`.
        name: text, at most 255 characters with its namespace.
        ttl: seconds after which a dead leader loses the term, from 0.3 s to a day.
        heartbeat: "auto" renews the term while the process lives. "progress" renews it only if `term.progress()` was called since
            the last renewal, so that a leader that does nothing loses the term.
        max_hold: seconds after which a term always ends; None means no limit.
        namespace: replaces the configured namespace.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; the message gives the range.
    """

    def __init__(
        self,
        engine: EngineSource,
        name: str,
        *,
        ttl: Seconds = 15,
        heartbeat: Heartbeat = "auto",
        max_hold: Seconds | None = None,
        namespace: str | None = None,
    ) -> None:
        self._candidate = _Candidate(engine, name, ttl=ttl, heartbeat=heartbeat, max_hold=max_hold, namespace=namespace)

    def stand(
        self,
        *,
        owner: str | None = None,
        on_gained: Callable[[], object] | None = None,
        on_lost: Callable[[], object] | None = None,
        on_changed: Callable[[Holder | None], object] | None = None,
    ) -> Member:
        """Stand for election, and return a member, which is a candidate in the background until it resigns.

        If the server is unreachable or the tables are missing, the call raises no error. The problem is logged to
        `pgfence.election`, the member tries again, and `is_leader` is False.

        The callbacks run one after the other in the member's thread. Their exceptions are logged. They must not block for long,
        because a follower cannot be elected while a callback blocks, and a leader releases its term only after `on_lost` has
        returned.

        Args:
            owner: the name that operators see for the leader; None means the host name and the process id.
            on_gained: called when this member becomes the leader.
            on_lost: called after `on_gained` when the member is no longer the leader, for whatever reason. It should stop the
                work, because the term is released when it returns.
            on_changed: called with each new leader that this member sees, which may be the member itself, and with None when it
                sees that there is no leader.

        Raises:
            TypeError: a callback is a coroutine function, or `owner` is not a str.
        """
        for callback in (on_gained, on_lost, on_changed):
            if callback is not None:
                reject_coroutine(callback, _ASYNC)
        return Member(
            Candidacy(
                self._candidate.with_owner(owner),
                THREADS,
                on_gained=on_gained,
                on_lost=on_lost,
                on_changed=on_changed,
            )
        )

    def campaign(self, *, owner: str | None = None, timeout: Seconds | None = None) -> Term:
        """Campaign until this process is the leader, and return its term. Release the term to resign.

        Args:
            owner: the name that operators see for the leader; None means the host name and the process id.
            timeout: the same as for `Lease.acquire`.

        Raises:
            LockTimeoutError: another candidate was still the leader at the timeout; the message names it.
            PgfenceError: the same errors as `Lease.acquire`.
            TypeError: `owner` is not a str.
        """
        return self._candidate.with_owner(owner).acquire(timeout=timeout)

    def lead(
        self, *, owner: str | None = None, timeout: Seconds | None = None, on_loss: OnLoss = "cancel"
    ) -> AbstractContextManager[Term, None]:
        """Lead for the duration of a `with` block; see `campaign`.

        Args:
            owner: the name that operators see for the leader.
            timeout: seconds to wait on entering.
            on_loss: with "cancel", leaving the block after a loss raises LockLostError. With "flag", it does not, so check
                `lost`.

        Raises:
            PgfenceError, TypeError: on entering, the same errors as `campaign`.
            LockLostError: with "cancel", on leaving after a loss, unless the block itself raised an exception.
        """
        return self._candidate.with_owner(owner).hold(timeout=timeout, on_loss=on_loss)

    def observe(self, *, timeout: Seconds | None = None) -> Iterator[Holder | None]:
        """Yield the current leader, then the new leader at each change, or None while there is no leader.

        The observer queries the server when a release is notified, and otherwise once a second, or once per third of the TTL
        while it listens for notifications. It may miss a leader whose term is shorter than the time between two queries.

        Args:
            timeout: seconds to wait for a change, after which the iteration ends; None waits indefinitely.

        Raises:
            UnreachableError: the server cannot be reached. Call `observe` again.
            SchemaError, StandbyError, UnsupportedServerError: the same as for `Lease.acquire`.
        """
        observer = Observer(self._candidate, math.inf if timeout is None else seconds(timeout))
        try:
            while (found := run_sync(observer.find_change))[0]:
                yield found[1]
        finally:
            observer.close()

    def __repr__(self) -> str:
        return f"<Election {self._candidate._name!r}, ttl={self._candidate._terms.ttl:g}>"


class Member:
    """A member of an election, which is a candidate in the background. Call `resign`, or use the member as a context manager."""

    def __init__(self, candidacy: Candidacy[Term]) -> None:
        self._candidacy = candidacy
        self._worker: threading.Thread | None = None
        self._thread = threads.start("pgfence-member", run_sync, candidacy.run_member)

    @property
    def is_leader(self) -> bool:
        """Whether this member is the leader, as far as this process knows. Reading it does no I/O.

        It is False from the moment at which another candidate may be elected, even in a process that was paused.
        """
        return self._candidacy.term is not None

    @property
    def term(self) -> Term | None:
        """The current term, or None while this member is not the leader. Reading it does no I/O."""
        return self._candidacy.term

    def run(self, fn: Callable[[Term], object], /) -> None:
        """Call `fn(term)` in each term of this member, in this thread, until the member resigns.

        When `fn` returns, its term is released, and the member is a candidate again one second later, so that another candidate
        may be elected. When the term is lost or the member resigns, `term.lost` becomes True, `term.check()` raises an error, and
        `fn` must return. The term is released only when `fn` has returned. If `fn` does not return, the term is no longer renewed
        and ends when its TTL has passed.

        Args:
            fn: the leader's work.

        Raises:
            TypeError: `fn` is a coroutine function.
            RuntimeError: `run` is already running for this member.
            Exception: the error that `fn` raises, which also ends its term. A LockLostError or StaleFencingTokenError that `fn`
                raises because the term is lost, also in an exception group, only ends the term. The member stays a candidate
                until it resigns, so call `run` again, or the member may be elected and do nothing.
        """
        reject_coroutine(fn, _ASYNC)

        async def work(term: Term) -> None:
            self._worker = threading.current_thread()
            try:
                fn(term)
            finally:
                self._worker = None

        run_sync(self._candidacy.lead_with, work)

    def resign(self) -> None:
        """Step down if this member leads, and stop being a candidate.

        Returns when the term is released. A second call does nothing.

        Inside a callback or the function of `run`, `resign` returns immediately, and the member steps down afterwards.
        """
        self._candidacy.end()
        if threading.current_thread() not in (self._thread, self._worker):
            self._thread.wait_ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        self.resign()
