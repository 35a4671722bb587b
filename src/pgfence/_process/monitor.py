"""Daemon threads of this process: one detects closed sockets, one runs background jobs, one runs the users' callbacks."""

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
"""A tick that comes this late means that the process stood still."""

HAS_HANGUP = hasattr(select, "EPOLLRDHUP")
SocketId: TypeAlias = tuple[int, int]
_CUT = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.ECONNABORTED}


class Monitored(Protocol):
    """What the watcher needs of a session."""

    dup: int
    socket: SocketId | None

    @property
    def dead(self) -> object: ...
    def on_connection_lost(self, reason: LossReason) -> None: ...
    def tick(self, now: float, paused: bool) -> None: ...


class IdleReaper(Protocol):
    """What the watcher needs of those who keep sessions."""

    def close_idle(self, now: float) -> None: ...


class ConnectionMonitor:
    """The threads; the first two start with the first session."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()  # a finaliser may come in here while its own thread is inside
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
        """Watch a session whose socket has the number `fd` at this moment."""
        with self._lock:
            self._start()
            if fd < 0:
                return
            # A duplicate: the next connection may reuse the number at once, and epoll forgets a socket that its owner closes.
            session.dup = os.dup(fd)
            self._sessions[session.dup] = weakref.ref(session)
            if self._epoll is not None:
                # Only the hang-up: answers and notifications do not wake the watcher, TLS does not matter, and the user's
                # thread may be inside a statement.
                self._epoll.register(session.dup, select.EPOLLRDHUP)

    def unwatch(self, session: Monitored) -> None:
        """Forget a session, before its connection is closed: the duplicate would keep the socket open."""
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
        """End the conversation from any thread; whoever waits for an answer gets an error at once."""
        with self._lock:
            if session.dup < 0:
                return
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(session.dup)) as ours:
                ours.shutdown(socket.SHUT_RDWR)

    def post(self, job: Callable[[], object]) -> None:
        """Run a job of ours on its thread. Takes no lock: a finaliser may call it from anywhere."""
        self._jobs.put(job)

    def expect_callbacks(self) -> None:
        """Start the thread for users' callbacks, if it does not run."""
        PROCESS.notice_fork()
        with self._lock:
            if self._calls is None:
                # A separate thread: a callback that blocks must delay neither the watcher nor the jobs.
                self._calls = SimpleQueue()
                _start_thread("pgfence-callbacks", _serve, self._calls)

    def call(self, callback: Callable[[], object]) -> None:
        """Run a user's callback on its thread."""
        if self._calls is not None:
            self._calls.put(callback)

    def _start(self) -> None:
        if HAS_HANGUP and self._epoll is None:
            self._open_epoll()
        # Noted before: an interrupt in the wait for a thread to begin must neither start it twice nor leave out the next one.
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
            if epoll is None:  # macOS, Windows: each session is asked by a round trip from its tick
                time.sleep(TICK)
            else:
                events = epoll.poll(TICK)
            now = clock()  # it runs through a suspend, which must be noticed too
            paused = now - before > TICK + PAUSE
            if paused and epoll is not None:  # what happened meanwhile says more than what a question would
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
        """Watch again only what is to be watched.

        Where an interrupt came into `unwatch`, a number is closed and its event stays: epoll hears of a socket as long as
        there is a copy of it anywhere, and has no way to forget one whose number is gone. Each poll would return at once.
        """
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
        # What no socket shows: a statement that hangs, a session that has been idle for too long, a pause of this process.
        for session in sessions:
            call_logged(lambda session=session: session.tick(now, paused))  # type: ignore[misc]
        for keeper in keepers:
            call_logged(lambda keeper=keeper: keeper.close_idle(now))  # type: ignore[misc]

    def forget(self) -> None:
        """In a forked child: give up everything of the parent without a word on its sockets.

        The child may have closed the descriptors before it came here, and opened others under their numbers.
        """
        for dup, reference in self._sessions.items():
            session = reference()
            with contextlib.suppress(OSError):
                if session is not None and identify_socket(dup) == session.socket:
                    os.close(dup)
        if self._epoll is not None:
            with contextlib.suppress(OSError):
                if identify_socket(self._epoll.fileno()) == self._epoll_id:
                    self._epoll.close()
            _LEAKED_AFTER_FORK.append(self._epoll)  # its finalizer would close the number
        self._reset()


_LEAKED_AFTER_FORK: list[object] = []


def identify_socket(fd: int) -> SocketId:
    """Return the identity of the open socket (or file) behind a descriptor at this moment."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def is_hung_up(dup: int) -> bool:
    """Ask again: the event may be about a session that was closed since, and the number another one's by now."""
    now = select.poll()
    now.register(dup, select.POLLRDHUP)
    return bool(now.poll(0))


def reason_of(dup: int) -> LossReason:
    """Say why a socket ended: the peer closed it, or the kernel gave up on a peer that was silent.

    The socket's error is told once, and the driver may have read it before us; but the kernel also remembers probes and
    retransmissions that nobody answered.
    """
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
