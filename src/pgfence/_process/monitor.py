"""Run the daemon threads. One detects closed sockets, one runs background jobs, and one runs the application's callbacks."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
import time
import weakref
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeAlias

from pgfence._process.callbacks import call_logged
from pgfence._process.clock import clock
from pgfence._process.lifecycle import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence.errors import LossReason

TICK = 1.0
PAUSE = 5.0
"""A tick that is late by this many seconds means that the process was stopped."""

HAS_HANGUP = hasattr(select, "EPOLLRDHUP")
SocketId: TypeAlias = tuple[int, int]
_CUT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ECONNABORTED}


class Monitored(Protocol):
    """What the monitor uses of a connection."""

    dup: int
    socket: SocketId | None

    @property
    def dead(self) -> object: ...
    def on_connection_lost(self, reason: LossReason) -> None: ...
    def tick(self, now: float, paused: bool) -> None: ...


class IdleReaper(Protocol):
    """What the monitor uses of a pool."""

    def close_idle(self, now: float) -> None: ...


class ConnectionMonitor:
    """Watches connections and runs jobs and callbacks. The threads for sockets and jobs start with the first connection."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # re-entrant, because a finaliser on the same thread may call these methods
        self._epoll: select.epoll | None = None
        self._epoll_id: SocketId | None = None
        self._sessions: dict[int, weakref.ref[Monitored]] = {}
        self._keepers: weakref.WeakSet[IdleReaper] = weakref.WeakSet()
        self._jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._calls: SimpleQueue[Callable[[], object]] | None = None
        self._watches = self._works = False

    def keep(self, keeper: IdleReaper) -> None:
        with self._lock:
            self._keepers.add(keeper)

    def watch(self, session: Monitored, fd: int) -> None:
        """Watch a connection whose socket currently has the descriptor `fd`."""
        with self._lock:
            self._start()
            if fd < 0:
                return
            # Watch a duplicate: the descriptor number may be reused immediately, and epoll forgets a socket when it is closed.
            session.dup = os.dup(fd)
            self._sessions[session.dup] = weakref.ref(session)
            if self._epoll is not None:
                # Only the hang-up event is watched. Responses and notifications do not wake the monitor, TLS does not matter, and
                # the caller's thread may be inside a statement.
                self._epoll.register(session.dup, select.EPOLLRDHUP)

    def unwatch(self, session: Monitored) -> None:
        """Stop watching a connection before it is closed, because the duplicate would keep the socket open."""
        with self._lock:
            dup = session.dup
            if dup < 0 or self._sessions.pop(dup, None) is None:
                return
            try:
                if self._epoll is not None:
                    with contextlib.suppress(OSError):
                        self._epoll.unregister(dup)
            finally:
                session.dup = -1
                os.close(dup)

    def shut_down(self, session: Monitored) -> None:
        """Shut down the socket from any thread. A thread that waits for a response gets an error immediately."""
        with self._lock:
            if session.dup < 0:
                return
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(session.dup)) as ours:
                ours.shutdown(socket.SHUT_RDWR)

    def post(self, job: Callable[[], object]) -> None:
        """Run an internal job in the job thread. This takes no lock, so that a finaliser may call it anywhere."""
        self._jobs.put(job)

    def finish_jobs(self, seconds: float) -> None:
        """Wait until the jobs that were posted so far have run, but at most `seconds`."""
        if self._works:
            done = threading.Event()
            self.post(done.set)
            done.wait(seconds)

    def expect_callbacks(self) -> None:
        """Start the callback thread, if it is not running."""
        PROCESS.notice_fork()
        with self._lock:
            if self._calls is None:
                # This is a separate thread, because a callback that blocks must delay neither the monitor nor the jobs.
                self._calls = SimpleQueue()
                _start_thread("pgfence-callbacks", _serve, self._calls)

    def call(self, callback: Callable[[], object]) -> None:
        """Run a callback of the application in the callback thread."""
        if self._calls is not None:
            self._calls.put(callback)

    def _start(self) -> None:
        if HAS_HANGUP and self._epoll is None:
            self._open_epoll()
        # The flag is set first, because an interrupt during the start of a thread must neither start that thread twice nor skip
        # the next thread.
        if not self._watches:
            self._watches = True
            _start_thread("pgfence-watcher", self._watch)
        if not self._works:
            self._works = True
            _start_thread("pgfence-jobs", _serve, self._jobs)

    def _watch(self) -> None:
        before = clock()
        while True:
            epoll = self._epoll
            events: list[tuple[int, int]] = []
            if epoll is None:  # macOS, Windows: `tick` checks each connection with a round trip
                time.sleep(TICK)
            else:
                events = epoll.poll(TICK)
            now = clock()  # this clock includes a suspend, which must be noticed as a pause
            paused = now - before > TICK + PAUSE
            # After a pause, the hang-ups that happened during the pause are more reliable than a query to each server.
            if paused and epoll is not None:
                events += epoll.poll(0)
            for dup, _ in events:
                self._on_hangup(dup)
            if paused or now - before >= TICK:
                before = now
                self._tick(time.monotonic(), paused)

    def _on_hangup(self, dup: int) -> None:
        with self._lock:
            reference = self._sessions.get(dup)
            session = reference() if reference is not None else None
            if session is None or session.dup != dup or not is_hung_up(dup):
                self._renew()
                return
            if self._epoll is not None:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(dup)
            reason = reason_of(dup)
        call_logged(lambda: session.on_connection_lost(reason))

    def _renew(self) -> None:
        """Replace the epoll object with one that watches only the current connections."""
        # An interrupt inside `unwatch` can close a descriptor whose event stays registered: epoll reports a socket as long as any
        # copy of it is open, and cannot remove one whose number is closed. Every poll would return immediately.
        assert self._epoll is not None
        self._epoll.close()
        self._open_epoll()
        for dup, reference in self._sessions.items():
            session = reference()
            if session is not None and session.dead is None:
                self._epoll.register(dup, select.EPOLLRDHUP)

    def _open_epoll(self) -> None:
        self._epoll = select.epoll()
        self._epoll_id = identify_socket(self._epoll.fileno())

    def _tick(self, now: float, paused: bool) -> None:
        with self._lock:
            sessions = [session for reference in self._sessions.values() if (session := reference()) is not None]
            keepers = list(self._keepers)
        # A tick finds what a socket does not show: a statement that hangs, a connection that was idle too long, a pause of this
        # process.
        for session in sessions:
            call_logged(lambda session=session: session.tick(now, paused))  # type: ignore[misc]
        for keeper in keepers:
            call_logged(lambda keeper=keeper: keeper.close_idle(now))  # type: ignore[misc]

    def forget(self) -> None:
        """Release the parent's connections in a forked child, without sending anything on their sockets."""
        # The child may have closed the descriptors before, and opened other files under the same numbers.
        for dup, reference in self._sessions.items():
            session = reference()
            with contextlib.suppress(OSError):
                if session is not None and identify_socket(dup) == session.socket:
                    os.close(dup)
        if self._epoll is not None:
            with contextlib.suppress(OSError):
                if identify_socket(self._epoll.fileno()) == self._epoll_id:
                    self._epoll.close()
            _LEAKED_AFTER_FORK.append(self._epoll)  # its finaliser would close a descriptor that may be reused
        self._reset()


_LEAKED_AFTER_FORK: list[object] = []


def identify_socket(fd: int) -> SocketId:
    """Return the identity of the socket or file that a descriptor currently refers to."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def is_hung_up(dup: int) -> bool:
    # The socket is checked again after the event, which may concern a closed connection whose descriptor number was reused.
    now = select.poll()
    now.register(dup, select.POLLRDHUP)
    return bool(now.poll(0))


def reason_of(dup: int) -> LossReason:
    """Return the reason for a closed socket: the peer closed it, or the kernel did because the peer was silent."""
    # SO_ERROR is reported only once, and the driver may have read it first. The kernel also counts probes and retransmissions
    # that were not acknowledged.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(dup)) as ours:
        if ours.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _CUT:
            return "cut off"
        if ours.family in (socket.AF_INET, socket.AF_INET6) and hasattr(socket, "TCP_INFO"):
            _state, _congestion, retransmissions, probes = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 4)
            return "cut off" if retransmissions or probes else "killed"
    return "killed"


def _start_thread(name: str, target: Callable[..., None], *args: object) -> None:
    threading.Thread(target=target, args=args, name=name, daemon=True).start()


def _serve(jobs: SimpleQueue[Callable[[], object]]) -> None:
    while True:
        call_logged(jobs.get())


MONITOR = ConnectionMonitor()
