"""The fixture `pgfence_faults`."""

from __future__ import annotations

import inspect
import threading
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, overload

from sqlalchemy import make_url
from sqlalchemy.exc import DBAPIError

from pgfence._api.contexts import SafeContext
from pgfence._api.handles import AsyncHeld, Held
from pgfence._holds.hold import Hold, format_names
from pgfence._leases.grant import Grant
from pgfence._leases.statements import LeaseStatements
from pgfence._sql import testing as statements
from pgfence._sql.errors import message_of
from pgfence._sql.sqlstate import NO_RIGHT, sqlstate_of
from pgfence._sql.storage import TableNames
from pgfence.advisory import AdvisoryLock
from pgfence.errors import LockNotHeldError
from pgfence.keys import SEPARATOR, LockKey, qualify_name, unqualify_name
from pgfence.lease import Lease
from pgfence.testing import _processes
from pgfence.testing._clock import CLOCKS
from pgfence.testing._elsewhere import Holds, hold_elsewhere
from pgfence.testing._errors import FaultUnavailableError
from pgfence.testing._proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from sqlalchemy import Engine

    from pgfence._api.locks import AsyncLockBase, LockBase
    from pgfence._process.clock import Seconds
    from pgfence.fence.handles import AsyncHeldLease, HeldLease
    from pgfence.keys import Name
    from pgfence.testing._elsewhere import AH, Engines, H

    AnyHeldLease: TypeAlias = HeldLease | AsyncHeldLease

_NOTICE = 10.0
"""The number of seconds in which a holder in this process must notice a loss."""


class HasPid(Protocol):
    """A `subprocess.Popen`, `multiprocessing.Process` or `asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int | None:
        """The process id."""
        ...


Process: TypeAlias = "int | HasPid"
Row: TypeAlias = "tuple[str, int | None]"
"""The stored name and the token of a lease; None means any token."""


class PgfenceFaults:
    """The type of the fixture `pgfence_faults`, which injects faults in tests.

    The methods block, usually for a few milliseconds, and can be called in async tests, too. A str is a name in the namespace of
    the test, as for `pgfence_holds`. The helpers connect with the URL of the handle's engine, or with that of `pgfence_server` if
    there is no handle.
    """

    def __init__(self, url: Callable[[], str], namespace: str, engines: Engines) -> None:
        self._url = url
        self._namespace = namespace
        self._engines = engines
        self._holds = Holds(lambda: engines.get(url()), namespace)
        self._proxy: Proxy | None = None

    # ------------------------------------------------------------ busy

    @overload
    def busy(self, lock: LockBase[H], /) -> AbstractContextManager[H, None]: ...
    @overload
    def busy(self, lock: AsyncLockBase[AH], /) -> AbstractContextManager[AH, None]: ...
    @overload
    def busy(self, *names: Name, shared: bool = False) -> AbstractContextManager[Held, None]: ...
    def busy(self, *names: Any, shared: bool = False) -> AbstractContextManager[Any, None]:
        """Hold names or a lock as another contender inside a `with` block; see `PgfenceHolds`.

        Args:
            lock: the lock to hold, as for `pgfence_holds`.
            names: the names to hold, as for `pgfence_holds`.
            shared: whether to hold one name in shared mode, as for `pgfence_holds`.
        """
        return self._holds(*names, shared=shared)

    # ------------------------------------------------------------ processes and sessions

    def pause(self, *processes: Process) -> AbstractContextManager[None, None]:
        """Stop processes inside a `with` block, with SIGSTOP. They stay alive and connected, but do not respond.

        Args:
            processes: processes that the test has started, or process ids. To test the effects of a pause of a holder in the
                test's own process, use `expire` or `steal`.

        Raises:
            FaultUnavailableError: on entering, if this platform has no SIGSTOP, or a process belongs to another user.
            ProcessLookupError: on entering, if there is no such process.
            ValueError: a process object has not been started.
        """
        return SafeContext(_processes.pause(*map(_get_pid, processes)))

    def kill(self, target: Held | AsyncHeld | Name | Process) -> None:
        """End a process, or the session that holds a lock.

        For a handle in this process, the call returns when the handle is lost, with the reason "killed". A lease does not
        depend on a session: use `expire` or `steal`.

        Args:
            target: the handle or the name of a session or transaction lock, whose server session is terminated; or a process, or
                its id, which is ended with SIGKILL. The call waits until the process has ended, unless only its id is given or it
                is an asyncio process, whose `wait()` you must await.

        Raises:
            LockNotHeldError: no session holds the lock.
            TypeError: the handle belongs to a lease.
            TimeoutError: the holder did not notice the loss within 10 s.
            FaultUnavailableError: this role may not end the session, or the process belongs to another user.
            ProcessLookupError: there is no such process.
            ValueError: a process object has not been started.
        """
        if isinstance(target, (Held, AsyncHeld)):
            self._kill_holder(target)
        elif isinstance(target, (str, LockKey)):
            self._kill_sessions(target)
        else:
            _processes.kill(_get_pid(target))
            wait = getattr(target, "wait", None) or getattr(target, "join", None)
            if wait is not None and not inspect.iscoroutinefunction(wait):
                wait()

    def _kill_holder(self, held: Held | AsyncHeld) -> None:
        hold = held._hold
        if not isinstance(hold, Hold):
            raise TypeError(f"{hold.noun} {format_names(hold.names)} has no session to end: use expire() or steal()")
        if hold.state in ("lost", "released"):
            raise hold.not_held_error()
        with _notice(held):
            _terminate(self._engine_of(held), hold.session.pid)

    def _kill_sessions(self, name: Name) -> None:
        engine = self._engines.get(self._url())
        holders = AdvisoryLock(engine, name, namespace=self._namespace).holders()
        pids = [holder.backend_pid for holder in holders if holder.backend_pid is not None]
        if not pids:
            raise LockNotHeldError(f"no session holds {name!r}", names=(str(name),))
        for pid in pids:
            _terminate(engine, pid)

    # ------------------------------------------------------------ connections

    @property
    def url(self) -> str:
        """The URL of `pgfence_server` through a proxy. `cut` breaks the connections that use this URL.

        Raises:
            FaultUnavailableError: the URL of `pgfence_server` has no host, so its connections do not use TCP.
        """
        if self._proxy is None:
            url = self._url()
            if make_url(url).host is None:
                raise FaultUnavailableError(
                    "only TCP connections can be cut, and the URL of pgfence_server has no host: set PGFENCE_TEST_DSN to a URL"
                    " with a host"
                )
            self._proxy = Proxy(url)
        return self._proxy.dsn

    def cut(self, *, silent: bool = False) -> AbstractContextManager[None, None]:
        """Break the connections through `url` inside a `with` block.

        At the end of the block, new connections work again. A connection that was broken inside the block stays broken.

        Args:
            silent: False resets the connections and rejects new ones. True drops everything that is sent, without an error, as a
                firewall does, so a client detects the failure only by its own time limits. The operating system still answers TCP
                keepalives for the proxy.

        Raises:
            FaultUnavailableError: as for `url`.
        """
        _ = self.url
        assert self._proxy is not None
        return SafeContext(_cut(self._proxy, silent=silent))

    # ------------------------------------------------------------ leases

    def expire(self, target: AnyHeldLease | str) -> None:
        """Let a lease expire, as if its holder had been paused for longer than its TTL.

        For a handle, the call returns when the handle is lost, with the reason "expired". If a name is passed, the holder is
        notified at its next renewal.

        Args:
            target: a handle; or the name of a lease, slot, permit, partition or term, in the tables with the default schema and
                prefix.

        Raises:
            LockNotHeldError: the lease is not held.
            TypeError: the handle belongs to a session lock, which does not expire; use `kill`.
            TimeoutError: the holder did not notice the loss within 10 s.
        """
        _expire(*self._find_lease(target))
        if isinstance(target, (Held, AsyncHeld)):
            _request_renewal(target)

    @overload
    def steal(self, target: AnyHeldLease | str) -> AbstractContextManager[HeldLease, None]: ...
    @overload
    def steal(self, target: Held | AsyncHeld) -> AbstractContextManager[Held, None]: ...
    def steal(self, target: Any) -> AbstractContextManager[Any, None]:
        """Let another holder take over a lock inside a `with` block, and yield the other holder's handle.

        A lease expires and is granted to another contender, with the next token. A transaction with the old token that enters the
        gate after that is rejected, and one that is already inside may commit. The former holder is not notified: it considers
        the lease held until its next renewal, as after a pause. The session of a session lock is terminated as by `kill`, and
        another session then holds the lock.

        Args:
            target: a handle; or the name of a lease, as for `expire`.

        Raises:
            LockNotHeldError: on entering, if the lock is not held.
            LockTimeoutError: on entering, if a third contender acquired the lock first and kept it for 10 s.
            TimeoutError, FaultUnavailableError: for a session lock, as for `kill`.
        """
        return SafeContext(self._steal(target))

    @contextmanager
    def _steal(self, target: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            if isinstance(target, (Held, AsyncHeld)) and isinstance(target._hold, Hold):
                self._kill_holder(target)
                lock: LockBase[Any] = AdvisoryLock(self._engine_of(target), *target.keys)
                yield stack.enter_context(hold_elsewhere(lock))
                return
            engine, place, (row, *_) = self._find_lease(target)
            namespace, _, name = row[0].rpartition(SEPARATOR)
            _expire(engine, place, [row])
            yield stack.enter_context(hold_elsewhere(Lease(engine, name, ttl=60, namespace=namespace)))

    # ------------------------------------------------------------ the server's clock

    def skew(self, ahead: Seconds) -> AbstractContextManager[None, None]:
        """Move the clock of the server inside a `with` block.

        The fault needs the temporary server of `pgfence_server`, libfaketime, and `pgfence_skew = true` in pytest's
        configuration, so that the server is started with libfaketime.

        Args:
            ahead: seconds, or a timedelta; a negative value sets the clock back. The values of nested blocks are added.

        Raises:
            FaultUnavailableError: the clock of this server cannot be moved; the message says why.
        """
        clock = CLOCKS.get(self._url())
        if clock is None:
            raise FaultUnavailableError(
                "the clock of this server cannot be moved: set `pgfence_skew = true` in pytest's configuration, so that"
                " pgfence_server starts a temporary server with libfaketime"
            )
        return SafeContext(clock.move(ahead.total_seconds() if isinstance(ahead, timedelta) else ahead))

    # ------------------------------------------------------------ helpers

    def _close(self) -> None:
        if self._proxy is not None:
            self._proxy.close()

    def _engine_of(self, held: Held | AsyncHeld) -> Engine:
        place: TableNames = getattr(held._hold, "place", TableNames())
        return self._engines.get(_get_engine(held).url, place.schema, place.prefix)

    def _find_lease(self, target: Any) -> tuple[Engine, TableNames, Sequence[Row]]:
        if isinstance(target, (Held, AsyncHeld)):
            grant = target._hold
            if not isinstance(grant, Grant):
                raise TypeError(f"{grant.noun} {format_names(grant.names)} does not expire: use kill()")
            if grant.state in ("lost", "released"):
                raise grant.not_held_error()
            return self._engine_of(target), grant.place, grant.rows
        place = TableNames()
        return self._engines.get(self._url()), place, [(qualify_name(target, self._namespace), None)]


def _get_engine(held: Held | AsyncHeld) -> Engine:
    engine: Engine = held._manager.engine  # type: ignore[attr-defined]
    return engine


def _get_pid(process: Process) -> int:
    pid = process if isinstance(process, int) else process.pid
    if pid is None:
        raise ValueError("the process has not been started: start it before you pass it")
    return pid


@contextmanager
def _cut(proxy: Proxy, *, silent: bool) -> Iterator[None]:
    if silent:
        proxy.black_hole()
    else:
        proxy.refuse()
        proxy.cut()
    try:
        yield
    finally:
        proxy.cut()
        proxy.heal()


def _terminate(engine: Engine, pid: int | None) -> None:
    try:
        with engine.connect() as connection:
            connection.execute(statements.TERMINATE, {"pid": pid})
    except DBAPIError as error:
        if sqlstate_of(error) != NO_RIGHT:
            raise
        raise FaultUnavailableError(
            f"this role may not end the session of backend {pid}: {message_of(error)}. Run GRANT pg_signal_backend TO <role>, or"
            " connect as the session's own role (only a superuser can end the session of a superuser)"
        ) from error


def _expire(engine: Engine, place: TableNames, rows: Sequence[Row]) -> None:
    names, tokens = zip(*rows, strict=True)
    with engine.begin() as connection:
        done = connection.execute(statements.build_expiry(place), {"names": [*names], "tokens": [*tokens]})
        if done.rowcount == 0:
            shown = tuple(map(unqualify_name, names))
            raise LockNotHeldError(f"no lease {format_names(shown)} is held", names=shown)


def _request_renewal(held: Held | AsyncHeld) -> None:
    """Renew a lease now and ignore the result, so that its holder notices the state of the lease on the server."""
    leases, grant, done = held._manager, held._hold, threading.Event()
    assert isinstance(leases, LeaseStatements)
    assert isinstance(grant, Grant)
    leases.heartbeat.renew(grant, None, lambda _: done.set())
    _wait_for_notice(done, held)


def _wait_for_notice(event: threading.Event, held: Held | AsyncHeld) -> None:
    if not event.wait(_NOTICE):
        raise TimeoutError(f"the holder of {format_names(held.names)} did not notice the fault within {_NOTICE:g} s")


@contextmanager
def _notice(held: Held | AsyncHeld) -> Iterator[None]:
    """At the end of the block, wait until a handle of this process is lost."""
    over = threading.Event()
    held._hold.add_end_callback(over.set)
    try:
        yield
        _wait_for_notice(over, held)
    finally:
        held._hold.remove_end_callback(over.set)
