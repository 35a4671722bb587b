"""Native threads: whether there are any here, how ours begin, and how they end with the interpreter."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from pgfence._process.clock import clock
from pgfence._process.lifecycle import PROCESS
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_BUDGET = 1.0
"""Seconds that the end of the interpreter may wait for all of our connections' farewells, and for those being opened."""
LAST_PAUSE = 5.0
"""Seconds after which a daemon thread goes on although the interpreter ends: somebody must be waiting for it."""


class Closable(Protocol):
    """What wants to hear of the end."""

    def end(self, seconds: float) -> None: ...


_ALL: weakref.WeakSet[Closable] = weakref.WeakSet()
_LEAKED_AFTER_FORK: list[Closable] = []


def register(one: Closable) -> None:
    """Have `one.end(seconds)` called when the interpreter ends; a forked child keeps its copy and never touches it."""
    _ALL.add(one)


def end_all() -> None:
    """Tell everybody that the interpreter ends. A second time finds nobody at work."""
    PROCESS.notice_fork()
    PROCESS.ending = True
    end = clock() + EXIT_BUDGET
    for one in list(_ALL):
        one.end(max(0.0, end - clock()))


def block_during_shutdown() -> None:
    """Keep a daemon thread from entering a driver while the interpreter ends.

    It would be in C code there, and exit() takes OpenSSL down under it. If the end does not come, for a hook of atexit waits
    for this very thread, it goes on.
    """
    if PROCESS.ending and threading.current_thread().daemon:
        time.sleep(LAST_PAUSE)


def _forget_threads_in_child() -> None:
    # Finalising an event loop here would take the parent's sockets out of the epoll that both have.
    _LEAKED_AFTER_FORK.extend(_ALL)
    _ALL.clear()


atexit.register(end_all)
PROCESS.renew_in_child(_forget_threads_in_child)


def start(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread of ours."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


_GEVENT = ("threading", "select", "queue")
_EVENTLET = ("thread", "select", "socket")
"""What our threads use and cannot share with the greenlets of a hub: without it they end, hang, or never run."""


def require_native_threads() -> None:
    """Raise where our native threads do not run: no loss would be noticed, and no lease renewed.

    Raises:
        PgfenceError: gevent or eventlet has replaced what they need, or uWSGI runs without --enable-threads.
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
                "pgfence needs threads to notice the loss of a lock and to renew leases, and this uWSGI runs none: start it"
                " with --enable-threads"
            )


def _is_replaced(who: str, names: list[str], call: str) -> PgfenceError:
    return PgfenceError(
        "pgfence needs native threads to notice the loss of a lock and to renew leases, and they cannot run here because"
        f" {who} has replaced {', '.join(f'`{name}`' for name in names)}. Call {call}, or hold locks and leases in a process"
        " without monkey-patching; a TransactionLock needs no thread"
    )
