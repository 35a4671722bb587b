"""The measurement of one act, from its start to the comparison of balances and journal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from pgfence._demo.errors import DemoError
from pgfence._demo.faults import Faults
from pgfence._demo.workload import Figures, Verdict
from pgfence._process.clock import clock

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from pgfence._api.handles import Held
    from pgfence._demo.bank import Accounts
    from pgfence._demo.context import Message
    from pgfence._demo.workers import Worker, WorkerPool
    from pgfence._demo.workload import Workload

_TIMES_LONGER = 5.0
_SECONDS_LONGER = 10.0
_LISTEN = 0.1
_LONGEST_END = 60.0


class Reporter(Protocol):
    """The methods through which a demo shows its progress."""

    def step(self, what: str) -> None:
        """Show a step before or after the acts."""

    def progress(self, act: Workload, seconds: float, transfers: int) -> None:
        """Show the progress of an act. This is called several times a second."""

    def result(self, figures: Figures, verdict: Verdict) -> None:
        """Show the result of an act."""


class Measurement:
    """Runs and measures one act. On a slow machine the act may run longer than requested, until it has a result."""

    def __init__(
        self, act: Workload, accounts: Accounts, pool: WorkerPool, engine: Engine, held: Held, *, seconds: float
    ) -> None:
        self._act = act
        self._accounts = accounts
        self._pool = pool
        self._engine = engine
        self._held = held
        self._seconds = seconds
        self._start = clock()
        self._faults = Faults(act.faults, pool, engine, start=self._start, seconds=seconds)
        self._working: set[Worker] = set()
        self._transfers = 0
        self._waits: list[float] = []
        self._retries: Counter[str] = Counter()

    def play(self, reporter: Reporter) -> Figures:
        """Run all processes, stop them, and compare balances with the journal.

        Raises:
            DemoError: a process failed, or does not stop.
            LockLostError: the server is no longer running.
        """
        self._working = set(self._pool.members)
        self._pool.send({"act": self._act.name, "first": self._accounts.first})
        until, longest = self._start + self._seconds, self._seconds * _TIMES_LONGER + _SECONDS_LONGER
        while clock() < until:
            self._listen()
            reporter.progress(self._act, clock() - self._start, self._transfers)
            if clock() >= until and until < self._start + longest and not self._is_shown():
                until += self._seconds
        self._pool.send({"stop": True})
        deadline = clock() + _LONGEST_END
        while self._working & set(self._pool.members):
            self._listen()
            if clock() > deadline:
                raise DemoError(f"the processes did not stop within {_LONGEST_END:.0f} s")
        return self._build_figures(clock() - self._start)

    def _listen(self) -> None:
        # If the demo's own lock is lost, the server has stopped, and no process will send anything.
        self._held.check()
        for member, words in self._pool.listen(_LISTEN):
            self._note(member, words)

    def _note(self, member: Worker, words: Message) -> None:
        self._faults.note(member, words)
        if "transfers" in words:
            self._transfers += words["transfers"]
            self._waits += words["waits"]
            self._retries.update(words["retries"])
        elif "done" in words:
            self._working.discard(member)

    def _is_shown(self) -> bool:
        """Return whether the act has a result, so that it can end."""
        figures = self._build_figures(clock() - self._start)
        return self._faults.done and figures.transfers > 0 and self._act.check(figures) is not Verdict.CONTROL_FAILED

    def _build_figures(self, seconds: float) -> Figures:
        ledger = self._accounts.audit(self._engine)
        return Figures(
            act=self._act.name,
            title=self._act.title,
            seconds=seconds,
            transfers=ledger.transfers,
            cents_lost=ledger.cents_off,
            accounts_off=ledger.accounts_off,
            waits=sorted(self._waits),
            takeovers=self._faults.takeovers,
            retries=dict(self._retries),
        )
