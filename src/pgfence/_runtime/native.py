"""Native threads: whether there are any here, how ours begin, and how they end with the interpreter."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Protocol

from pgfence._runtime.process import PROCESS
from pgfence.errors import PgfenceError
from pgfence.timing import clock

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_BUDGET = 1.0
"""Seconds that the end of the interpreter may wait for all of our connections' farewells, and for those being opened."""
LAST_PAUSE = 5.0
"""Seconds after which a daemon thread goes on although the interpreter ends: somebody must be waiting for it."""


class Ends(Protocol):
    """What wants to hear of the end."""

    def end(self, seconds: float) -> None: ...


_ALL: weakref.WeakSet[Ends] = weakref.WeakSet()
_GRAVEYARD: list[Ends] = []


def register(one: Ends) -> None:
    """Have `one.end(seconds)` called when the interpreter ends; a forked child keeps its copy and never touches it."""
    _ALL.add(one)


def end_all() -> None:
    """Tell everybody that the interpreter ends. A second time finds nobody at work."""
    PROCESS.notice_fork()
    PROCESS.ending = True
    end = clock() + EXIT_BUDGET
    for one in list(_ALL):
        one.end(max(0.0, end - clock()))


def pause_at_the_end() -> None:
    """Keep a daemon thread from entering a driver while the interpreter ends.

    It would be in C code there, and exit() takes OpenSSL down under it. If the end does not come, for a hook of atexit waits
    for this very thread, it goes on.
    """
    if PROCESS.ending and threading.current_thread().daemon:
        time.sleep(LAST_PAUSE)


def _bury_in_child() -> None:
    # Finalising an event loop here would take the parent's sockets out of the epoll that both have.
    _GRAVEYARD.extend(_ALL)
    _ALL.clear()


atexit.register(end_all)
PROCESS.renew_in_child(_bury_in_child)


def start(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a daemon thread of ours."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    thread.start()
    return thread


def refuse_without_threads() -> None:
    """Raise where native threads do not run: no heartbeat could beat there.

    Raises:
        PgfenceError: gevent or eventlet has patched `threading`, or uWSGI runs without --enable-threads.
    """
    patched = (
        "a lease needs a native thread for its heartbeat, and {0} has replaced `threading`: a task that computes would"
    )
    patched += " keep it from beating. Call {1}, or hold leases in a process of their own"
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise PgfenceError(patched.format("gevent", "monkey.patch_all(thread=False)"))
    patcher = sys.modules.get("eventlet.patcher")
    if patcher is not None and patcher.is_monkey_patched("thread"):
        raise PgfenceError(patched.format("eventlet", "eventlet.monkey_patch(thread=False)"))
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is not None:
        options = {name.decode() if isinstance(name, bytes) else str(name) for name in getattr(uwsgi, "opt", ())}
        if not options & {"enable-threads", "threads"}:
            raise PgfenceError(
                "a lease needs a thread for its heartbeat, and this uWSGI runs none: start it with --enable-threads"
            )
