"""Call the application's callbacks and log their exceptions."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")

log = logging.getLogger("pgfence.advisory")

OWN_THREADS = "pgfence-"
"""The prefix of the names of pgfence's own threads."""


def call_logged(listener: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call a listener. If it raises an exception, log it, because it must affect neither the lock nor the other listeners."""
    try:
        listener(*args, **kwargs)
    except BaseException as error:
        if must_propagate(error):
            raise
        log.exception("a callback of a lock failed")


def must_propagate(error: BaseException) -> bool:
    """Return whether an exception of a callback may end the thread that called it.

    In a thread of pgfence, SystemExit would not end the process. It would silently end the thread, which also serves other locks.
    """
    own = threading.current_thread().name.startswith(OWN_THREADS)
    return not isinstance(error, Exception) and not own
