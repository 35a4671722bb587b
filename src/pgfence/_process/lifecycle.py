"""Identify this process, and renew what a forked child must not share with its parent."""

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
"""MADV_WIPEONFORK, a constant that Python does not define."""


P = ParamSpec("P")


class Mark(Protocol):
    """A flag that is set in this process and cleared in a forked child."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class PidMark:
    """A mark for systems whose kernel cannot clear memory on fork, such as macOS. It compares process ids on every access."""

    def __init__(self) -> None:
        self._pid = 0

    def __getitem__(self, _: int, /) -> int:
        return self._pid == os.getpid()

    def __setitem__(self, _: int, value: int, /) -> None:
        self._pid = os.getpid() if value else 0


def read_kernel_mark() -> Mark:
    """Return a mark that the kernel clears in every forked child, or else a `PidMark`.

    Reading the kernel's mark takes 12 ns, while getpid() is a system call.
    """
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
    """Call PyOS_AfterFork_Child, which CPython requires, in a child of a C program that forked without calling it.

    Otherwise a thread of the parent that was waiting for the GIL during the fork still counts as waiting in the child, and
    receives the wake-up meant for the child's second thread. PyOS_AfterFork_Child treats all other threads as dead, so it is not
    called if another thread is running. If CPython knows only one thread, it was already called.
    """
    if sys.platform != "linux" or len(sys._current_frames()) == 1:
        return
    # pathlib is not used, because it is not imported yet, and a forked child should import as little as possible.
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208
        return
    import ctypes

    api = ctypes.pythonapi
    for name in ("PyInterpreterState_Get", "PyInterpreterState_Main"):
        getattr(api, name).restype = ctypes.c_void_p
    # In a subinterpreter, PyOS_AfterFork_Child would abort the process.
    if api.PyInterpreterState_Get() == api.PyInterpreterState_Main():
        api.PyOS_AfterFork_Child()


class Process:
    """The state of this process."""

    __slots__ = ("_renewals", "_renewing", "_turns", "ending", "forks", "known_pid", "mark")

    def __init__(self) -> None:
        self.forks = 0
        """Incremented around each fork that ran pgfence's hooks, because a child may have copied a socket that was opening."""
        self.ending = False
        """Whether the interpreter is exiting, while daemon threads may still run."""
        self.mark = read_kernel_mark()
        self.mark[0] = 1
        self.known_pid = os.getpid()
        """The process id, for code that runs after `notice_fork` or `pid` in the same call."""
        self._renewals: list[Callable[[], None]] = []
        self._renewing = 0
        self._turns: dict[int, threading.RLock] = {}
        """One mutex per process id. A fork may copy a mutex that was held by a thread that the child does not have."""

    @property
    def pid(self) -> int:
        """The id of this process. In a forked child, the first access renews what must not be shared with the parent."""
        # This is checked on every access, because fork hooks are not enough. A C server that calls fork(2) directly runs none of
        # them (uWSGI does so by default), and hooks that were registered before pgfence's run first in the child.
        if not self.mark[0]:
            self._renew()
        return self.known_pid

    def renew_in_child(self, renewal: Callable[[], None]) -> None:
        """Register a function to be called once in a forked child, before other code of pgfence, in order of registration.

        The function must not wait for a mutex, which may be held by a thread that the child does not have.
        """
        self._renewals.append(renewal)

    def notice_fork(self) -> None:
        """Renew what must not be shared with the parent, if this is a forked child that has not done so."""
        if not self.mark[0]:
            self._renew()

    def count_fork(self) -> None:
        """Count a fork, once before and once after it, so that every connection being opened in the meantime is discarded."""
        self.forks += 1

    def _renew(self) -> None:
        pid = os.getpid()
        with self._turns.setdefault(pid, threading.RLock()):
            if self.mark[0] or self._renewing == pid:  # a finaliser that runs during the renewal re-enters this method
                return
            self._renewing = pid
            try:
                self.known_pid = pid
                for renewal in self._renewals:
                    renewal()
                finish_fork()
                self.mark[0] = 1  # set last, so that other threads of the child wait for the whole renewal
            finally:
                self._renewing = 0


PROCESS = Process()
if hasattr(os, "register_at_fork"):
    # The hooks only make the renewal happen earlier. No hook holds a lock across the fork, because other hooks run in between.
    os.register_at_fork(
        before=PROCESS.count_fork, after_in_parent=PROCESS.count_fork, after_in_child=PROCESS.notice_fork
    )

MUTEX = threading.Lock()
"""The mutex for the queues, holds, pools and managers of this process."""
# If another thread holds the mutex during a fork, the child gets a locked copy, and the state that the mutex protected belongs to
# the parent.
PROCESS.renew_in_child(MUTEX._at_fork_reinit)  # type: ignore[attr-defined]


def make_weak_method(method: Callable[P, object]) -> Callable[P, object]:
    """Return a function that calls a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> object:
        target = reference()
        return None if target is None else target(*args, **kwargs)

    return call


def on_disposed(engine: Engine, method: Callable[[Engine], object]) -> None:
    """Call a bound method after each `engine.dispose()`, without keeping the method's object alive."""
    # Not `event.listen`, which marks the engine as having events: every statement on its connections would then look for
    # listeners.
    dispatch = engine.dispatch
    collection: Any = dispatch.engine_disposed.for_modify(dispatch)
    # An engine created by execution_options() has its own collection in addition to that of its parent engine.
    getattr(collection, "local", collection).listeners.append(make_weak_method(method))
