"""The context of a worker: its database, and the pipe to which it reports."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy.orm import sessionmaker

from pgfence._demo.bank import HIGHEST_AMOUNT, Accounts
from pgfence._process.clock import clock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

Message: TypeAlias = "dict[str, Any]"
"""A line of JSON between the demo and its processes."""

_REPORT_EVERY = 0.1


def say(**words: object) -> None:
    """Send one line to the demo."""
    sys.stdout.write(f"{json.dumps(words)}\n")
    sys.stdout.flush()


class WorkerContext:
    """The context in which one process runs one act."""

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

    def pick_amount(self) -> int:
        """Choose an amount in cents at random."""
        return self.chance.randint(1, HIGHEST_AMOUNT)

    def count_move(self) -> None:
        """Count a transfer that is committed."""
        self._transfers += 1
        if clock() - self._reported >= _REPORT_EVERY:
            self.report()

    @contextmanager
    def note_wait(self) -> Iterator[None]:
        """Record the duration of the block, which waits for a lock, for the next report."""
        start = clock()
        yield
        self._waits.append(clock() - start)

    def ask(self, lock: str) -> None:
        """Report that this process requests a lock."""
        say(asks=lock)
        self._asked = clock()

    def note_grant(self, lock: str) -> None:
        """Report that the lock was granted."""
        now = clock()
        self._waits.append(now - self._asked)
        say(granted=lock, at=now)

    def note_release(self, lock: str) -> None:
        """Report that the lock was released."""
        say(released=lock)

    def report(self) -> None:
        """Report transfers, waits and retries since the last report."""
        say(transfers=self._transfers, waits=self._waits, retries=self.retries)
        self._transfers, self._waits, self.retries = 0, [], Counter()
        self._reported = clock()
