"""Which process this is, and what a forked child must renew before it uses pgfence."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine


_WIPE_ON_FORK = 18
"""MADV_WIPEONFORK, for which Python has no name."""


P = ParamSpec("P")


class Mark(Protocol):
    """What is set in this process and not in a child."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class PidMark:
    """For where the kernel clears no memory at a fork (macOS): asks it for the process id each time."""

    def __init__(self) -> None:
        self._pid = 0

    def __getitem__(self, _: int, /) -> int:
        return self._pid == os.getpid()

    def __setitem__(self, _: int, value: int, /) -> None:
        self._pid = os.getpid() if value else 0


def read_kernel_mark() -> Mark:
    """Return a mark that the kernel clears in every child: 12 ns to look at, where getpid() is a system call."""
    if sys.platform == "linux":
        try:
            page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            page.madvise(_WIPE_ON_FORK)
        except OSError:
            pass
        else:
            return page
    return PidMark()


def finish_fork() -> None:
    """Do what CPython asks of a C program that forks, where the program has left it out: call PyOS_AfterFork_Child.

    Without it a thread of the parent that waited for the GIL at the moment of the fork still counts as waiting in the child, and
    takes the wake-up of the child's second thread. The call counts all threads but its own as dead, so it is omitted if another
    one runs; and CPython has already made it if it knows of only one thread.
    """
    if sys.platform != "linux" or len(sys._current_frames()) == 1:
        return
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - pathlib is not imported yet, and a child had better import little
        return
    import ctypes

    api = ctypes.pythonapi
    for name in ("PyInterpreterState_Get", "PyInterpreterState_Main"):
        getattr(api, name).restype = ctypes.c_void_p
    if api.PyInterpreterState_Get() == api.PyInterpreterState_Main():  # in another one it would end the process
        api.PyOS_AfterFork_Child()


class Process:
    """This process."""

    __slots__ = ("_renewals", "_renewing", "_turns", "ending", "forks", "known_pid", "mark")

    def __init__(self) -> None:
        self.forks = 0
        """Grows with each fork that ran our hooks: a child may have a copy of a socket that was being opened at that moment."""
        self.ending = False
        """The interpreter ends; daemon threads are still about."""
        self.mark = read_kernel_mark()
        self.mark[0] = 1
        self.known_pid = os.getpid()
        """The process id, for code that runs after `notice_fork` or a use of `pid` in the same call."""
        self._renewals: list[Callable[[], None]] = []
        self._renewing = 0
        self._turns: dict[int, threading.RLock] = {}
        """A mutex for each process, because a fork may copy one that is held by a thread that the child does not have."""

    @property
    def pid(self) -> int:
        """The id of this process. In a forked child, the first use renews what must not be shared with the parent."""
        # Looked at by each use, because hooks are not enough: a server in C that calls fork(2) itself runs none of them (uWSGI,
        # by default), and a hook that was registered before ours runs in the child first.
        if not self.mark[0]:
            self._renew()
        return self.known_pid

    def renew_in_child(self, renewal: Callable[[], None]) -> None:
        """Have `renewal` called once in a forked child, before any other code of pgfence; in the order of registration.

        It must not wait: a mutex may be held by a thread that the child does not have.
        """
        self._renewals.append(renewal)

    def notice_fork(self) -> None:
        """Renew what must not be shared with the parent, if this is a forked child that has not done so."""
        if not self.mark[0]:
            self._renew()

    def count_fork(self) -> None:
        """Count a fork of this process, before and after it: each opening of a connection that it meets is noticed."""
        self.forks += 1

    def _renew(self) -> None:
        pid = os.getpid()
        with self._turns.setdefault(pid, threading.RLock()):
            if self.mark[0] or self._renewing == pid:  # a finalizer that runs during the renewal comes in here again
                return
            self._renewing = pid
            try:
                self.known_pid = pid
                for renewal in self._renewals:
                    renewal()
                finish_fork()
                self.mark[0] = 1  # last: other threads of the child wait for the whole renewal
            finally:
                self._renewing = 0


PROCESS = Process()
if hasattr(os, "register_at_fork"):
    # They only make the renewal earlier. None holds a lock across the fork, because hooks of others run in between.
    os.register_at_fork(
        before=PROCESS.count_fork, after_in_parent=PROCESS.count_fork, after_in_child=PROCESS.notice_fork
    )

MUTEX = threading.Lock()
"""The one mutex of pgfence, for what all threads of the process share."""
# A fork while another thread is in here leaves the child a locked mutex. What it protected belongs to the parent.
PROCESS.renew_in_child(MUTEX._at_fork_reinit)  # type: ignore[attr-defined]


def make_weak_method(method: Callable[P, object]) -> Callable[P, object]:
    """Return a call of a bound method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> object:
        target = reference()
        return None if target is None else target(*args, **kwargs)

    return call


def on_disposed(engine: Engine, method: Callable[[Engine], object]) -> None:
    """Have a bound method called after each `engine.dispose()`, without keeping its object alive.

    `event.listen` would mark the engine as one with events, and from then on each statement of each of its connections would
    look for listeners.
    """
    dispatch = engine.dispatch
    collection: Any = dispatch.engine_disposed.for_modify(dispatch)
    # A copy made by execution_options() has its own beside those of the engine it was made from.
    getattr(collection, "local", collection).listeners.append(make_weak_method(method))
