"""What a worker of the demo works with: its database, and the pipe on which it reports."""

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

    def pick_amount(self) -> int:
        """Choose an amount, in cents."""
        return self.chance.randint(1, HIGHEST_AMOUNT)

    def count_move(self) -> None:
        """Count a transfer that is committed."""
        self._transfers += 1
        if clock() - self._reported >= _REPORT_EVERY:
            self.report()

    @contextmanager
    def note_wait(self) -> Iterator[None]:
        """Measure a wait for a lock that is over too soon to tell of it."""
        start = clock()
        yield
        self._waits.append(clock() - start)

    def ask(self, lock: str) -> None:
        """Tell that this process wants a lock."""
        say(asks=lock)
        self._asked = clock()

    def note_grant(self, lock: str) -> None:
        """Tell that it has it."""
        now = clock()
        self._waits.append(now - self._asked)
        say(granted=lock, at=now)

    def note_release(self, lock: str) -> None:
        """Tell that it has given it back."""
        say(released=lock)

    def report(self) -> None:
        """Tell what was done since the last report."""
        say(transfers=self._transfers, waits=self._waits, retries=self.retries)
        self._transfers, self._waits, self.retries = 0, [], Counter()
        self._reported = clock()
