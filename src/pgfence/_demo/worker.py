"""The program of one process, `python -m pgfence._demo.worker`. It reads orders as lines of JSON from standard input.

The first line contains the database's URL and the name of the process, and each further line is an order. The program reports its
work on standard output.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from sqlalchemy import create_engine
from sqlalchemy.exc import DBAPIError, OperationalError

from pgfence._demo.bank import Accounts
from pgfence._demo.context import WorkerContext, say
from pgfence._demo.workloads import ACTS
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from pgfence._demo.context import Message
    from pgfence._demo.workload import Workload

_PAUSE = 0.05


class Orders:
    """The orders from standard input, read on a separate thread."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._acts: SimpleQueue[Message] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> Message:
        """Wait for the next act, and return it."""
        return self._acts.get()

    def _listen(self) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if "act" in order:
                self.stopped.clear()
                self._acts.put(order)
            else:
                self.stopped.set()
        # The demo has ended. Exit immediately, because the main thread may be waiting for a lock. The server frees what this
        # process holds.
        os._exit(0)


def is_connection_error(error: Exception) -> bool:
    """Return whether the work can be repeated after an error, such as the loss of the lock or the connection."""
    if isinstance(error, PgfenceError):
        return error.retryable
    return isinstance(error, OperationalError) or (isinstance(error, DBAPIError) and error.connection_invalidated)


def perform(act: Workload, context: WorkerContext, orders: Orders) -> None:
    """Repeat the work of an act until the order to stop arrives."""
    while not orders.stopped.is_set():
        try:
            act.work(context)
        except Exception as error:
            if not is_connection_error(error):
                raise
            context.retries[type(error).__name__] += 1
            orders.stopped.wait(_PAUSE)
    context.report()


def serve() -> None:
    """Carry out orders until the input ends."""
    hello = json.loads(sys.stdin.readline())
    engine = create_engine(hello["url"], pool_size=1, connect_args={"fallback_application_name": hello["name"]})
    orders = Orders()
    with engine.connect():
        say(ready=os.getpid())
    acts = {act.name: act for act in ACTS}
    while order := orders.next():
        perform(acts[order["act"]], WorkerContext(engine, Accounts(order["first"])), orders)
        say(done=order["act"])


def main() -> None:
    """Carry out orders, and report an unexpected error in one line."""
    try:
        serve()
    except Exception as error:
        reason = str(getattr(error, "orig", None) or error).strip() or repr(error)
        say(failed=f"{type(error).__name__}: {reason}")
        raise


if __name__ == "__main__":
    main()
