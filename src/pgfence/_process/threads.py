"""Start native threads, check that they can run here, and end them with the interpreter."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from pgfence._process.clock import clock
from pgfence._process.lifecycle import PROCESS
from pgfence._process.monitor import MONITOR
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_BUDGET = 1.0
"""The seconds for which the exit of the interpreter may wait until connections are closed or have finished opening."""
LAST_PAUSE = 5.0
"""Seconds after which a daemon thread continues although the interpreter exits: another thread may be waiting for it."""


class Closable(Protocol):
    """An object to be closed when the interpreter exits."""

    def end(self, seconds: float) -> None: ...


_ALL: weakref.WeakSet[Closable] = weakref.WeakSet()
_LEAKED_AFTER_FORK: list[Closable] = []


def register(one: Closable) -> None:
    """Call `one.end(seconds)` when the interpreter exits. A forked child never touches its copy."""
    _ALL.add(one)


def end_all() -> None:
    """Close all registered objects, because the interpreter exits."""
    PROCESS.notice_fork()
    end = clock() + EXIT_BUDGET
    # A lease whose handle was dropped a moment ago is released below, after the job of its finaliser has run.
    MONITOR.finish_jobs(EXIT_BUDGET)
    PROCESS.ending = True
    for one in list(_ALL):
        one.end(max(0.0, end - clock()))


def block_during_shutdown() -> None:
    """Keep a daemon thread from entering a driver while the interpreter exits."""
    # Inside a driver, the thread would run C code while exit() shuts OpenSSL down. If the interpreter does not exit, because an
    # atexit hook waits for this thread, the thread continues after the pause.
    if PROCESS.ending and threading.current_thread().daemon:
        time.sleep(LAST_PAUSE)


def _forget_threads_in_child() -> None:
    # The objects are kept, because finalising an event loop in the child would remove the parent's sockets from the epoll object
    # that both processes share.
    _LEAKED_AFTER_FORK.extend(_ALL)
    _ALL.clear()


atexit.register(end_all)
PROCESS.renew_in_child(_forget_threads_in_child)


class DaemonThread(threading.Thread):
    """A daemon thread whose end can be awaited again after an interrupted wait."""

    def __init__(self, name: str, target: Callable[..., object], args: tuple[object, ...]) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._has_ended = threading.Event()

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._has_ended.set()

    def wait_ended(self) -> None:
        """Wait until the thread has ended, even if an exception has interrupted an earlier wait.

        `join()` does not guarantee that: after a KeyboardInterrupt in `join()`, Python 3.11 regards a running thread as
        finished.
        """
        # A forked child does not have this thread, and nothing sets its copy of the event.
        while self.is_alive() and not self._has_ended.wait(0.5):
            pass


def start(name: str, target: Callable[..., object], *args: object) -> DaemonThread:
    thread = DaemonThread(name, target, args)
    thread.start()
    return thread


_GEVENT = ("threading", "select", "queue")
_EVENTLET = ("thread", "select", "socket")
"""The modules that must not be patched. If pgfence's threads were greenlets of a hub, they would end, hang, or never run."""


def require_native_threads() -> None:
    """Raise PgfenceError if native threads cannot run here, because losses would not be noticed and leases not renewed.

    This is so if gevent or eventlet has patched modules that the threads need, or if uWSGI runs without --enable-threads.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and (names := [name for name in _GEVENT if monkey.is_module_patched(name)]):
        raise _is_replaced("gevent", names, "monkey.patch_all(thread=False, select=False, queue=False)")
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and (names := [name for name in _EVENTLET if patcher.is_monkey_patched(name)]):
        raise _is_replaced("eventlet", names, "eventlet.monkey_patch(thread=False, select=False, socket=False)")
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is not None:
        options = {name.decode() if isinstance(name, bytes) else str(name) for name in getattr(uwsgi, "opt", ())}
        if not options & {"enable-threads", "threads"}:
            raise PgfenceError(
                "pgfence needs threads to notice the loss of a lock and to renew leases, but this uWSGI server has threads"
                " disabled. Start it with --enable-threads"
            )


def _is_replaced(who: str, names: list[str], call: str) -> PgfenceError:
    return PgfenceError(
        "pgfence needs native threads to notice the loss of a lock and to renew leases, but they cannot run here because"
        f" {who} has replaced {', '.join(f'`{name}`' for name in names)}. Call {call}, or hold locks and leases in a process"
        " without monkey-patching. A TransactionLock needs no thread"
    )
