"""The program of one process: `python -m pgfence._demo.worker`, told what to do by lines of JSON on its standard input.

The first line has the database's URL; each further one is an order. It answers on standard output with what it has done.
When the input ends, whoever gave the orders is gone, and so is this process, in whatever it is.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.orm import sessionmaker

from pgfence._demo.bank import HIGHEST_AMOUNT, Accounts
from pgfence._demo.workloads import ACTS
from pgfence._process.clock import clock
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._demo.workload import Act

_REPORT_EVERY = 0.1
_PAUSE = 0.05


def say(**words: Any) -> None:
    """Send one line to whoever gives the orders."""
    sys.stdout.write(f"{json.dumps(words)}\n")
    sys.stdout.flush()


class Desk:
    """Where one process does the work of one act.

    Attributes:
        engine: of the application; an AdvisoryLock takes its sessions beside its pool.
        sessions: makes its Sessions.
        accounts: those of the act.
        chance: where its choices come from.
    """

    def __init__(self, engine: Engine, accounts: Accounts) -> None:
        self.engine = engine
        self.sessions = sessionmaker(engine)
        self.accounts = accounts
        self.chance = random.Random()
        self.retries: Counter[str] = Counter()
        self._transfers = 0
        self._waits: list[float] = []
        self._asked = 0.0
        self._reported = clock()

    def amount(self) -> int:
        """Choose an amount, in cents."""
        return self.chance.randint(1, HIGHEST_AMOUNT)

    def moved(self) -> None:
        """Count a transfer that is committed."""
        self._transfers += 1
        if clock() - self._reported >= _REPORT_EVERY:
            self.report()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure a wait for a lock that is over too soon to tell of it."""
        start = clock()
        yield
        self._waits.append(clock() - start)

    def ask(self, lock: str) -> None:
        """Tell that this process wants a lock."""
        say(asks=lock)
        self._asked = clock()

    def granted(self, lock: str) -> None:
        """Tell that it has it."""
        now = clock()
        self._waits.append(now - self._asked)
        say(granted=lock, at=now)

    def released(self, lock: str) -> None:
        """Tell that it has given it back."""
        say(released=lock)

    def report(self) -> None:
        """Tell what was done since the last report."""
        say(transfers=self._transfers, waits=self._waits, retries=self.retries)
        self._transfers, self._waits, self.retries = 0, [], Counter()
        self._reported = clock()


class Orders:
    """What the standard input says, read on a thread of its own."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._acts: SimpleQueue[dict[str, Any]] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def next(self) -> dict[str, Any]:
        """Wait for the next act."""
        return self._acts.get()

    def _listen(self) -> None:
        for line in sys.stdin:
            order = json.loads(line)
            if "act" in order:
                self.stopped.clear()
                self._acts.put(order)
            else:
                self.stopped.set()
        # At once: the main thread may be waiting for a lock, and the server frees what this process holds.
        os._exit(0)


def lost(error: Exception) -> bool:
    """Say whether an error means: lock or connection are lost, begin anew with others."""
    if isinstance(error, PgfenceError):
        return error.retryable
    return isinstance(error, OperationalError) or (isinstance(error, DBAPIError) and error.connection_invalidated)


def perform(act: Act, desk: Desk, orders: Orders) -> None:
    """Do the work of an act until the order to stop comes."""
    while not orders.stopped.is_set():
        try:
            act.work(desk)
        except Exception as error:
            if not lost(error):
                raise
            desk.retries[type(error).__name__] += 1
            orders.stopped.wait(_PAUSE)
    desk.report()


def serve() -> None:
    """Follow orders until the input ends."""
    hello = json.loads(sys.stdin.readline())
    engine = create_engine(hello["url"], pool_size=1, connect_args={"fallback_application_name": hello["name"]})
    orders = Orders()
    with engine.connect():
        say(ready=os.getpid())
    acts = {act.name: act for act in ACTS}
    while order := orders.next():
        perform(acts[order["act"]], Desk(engine, Accounts(order["first"])), orders)
        say(done=order["act"])


def main() -> None:
    """Serve; a mistake that nobody foresaw is one line to whoever gives the orders."""
    try:
        serve()
    except Exception as error:
        reason = str(getattr(error, "orig", None) or error).strip() or repr(error)
        say(failed=f"{type(error).__name__}: {reason}")
        raise


if __name__ == "__main__":
    main()
