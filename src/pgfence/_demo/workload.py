"""An act, and the rules it is judged by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgfence._demo.context import WorkerContext


class Fault(StrEnum):
    """A fault that is injected into a process while it holds a lock that another process waits for."""

    KILL = "SIGKILL"
    TERMINATE = "pg_terminate_backend"


class Verdict(IntEnum):
    """The verdict on an act or a scene. The numbers are exit codes of `pgfence demo`."""

    OK = 0
    GUARD_FAILED = 1
    """A guarded act lost money, no process took over the lock of a dead holder, or a scene had a wrong result."""
    CONTROL_FAILED = 3
    """Nothing went wrong without a guard, so the guarded results prove nothing."""


class TakeOver(NamedTuple):
    """One fault, and the seconds until another process was granted the lock, or None if no process was."""

    fault: Fault
    lock: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one act. Times are in seconds, and money is in cents.

    Attributes:
        seconds: the duration of the act, until all processes have stopped.
        transfers: transfers in the journal.
        cents_lost: the sum of the differences between balances and journal, without their signs.
        accounts_off: balances that differ.
        waits: each wait for a lock, as its process measured it, sorted.
        takeovers: one for each fault.
        retries: the number of retries after a lost lock or connection, by the error's name.
    """

    act: str
    title: str
    seconds: float = 0.0
    transfers: int = 0
    cents_lost: int = 0
    accounts_off: int = 0
    waits: Sequence[float] = field(default=(), repr=False)
    takeovers: tuple[TakeOver, ...] = ()
    retries: dict[str, int] = field(default_factory=dict)

    @property
    def per_second(self) -> float:
        """Transfers per second."""
        return self.transfers / self.seconds if self.seconds else 0.0

    def wait(self, percent: float) -> float | None:
        """Return the wait that this percentage of the waits did not exceed (nearest rank), or None if there was no wait."""
        return self.waits[max(0, math.ceil(len(self.waits) * percent / 100) - 1)] if self.waits else None

    def as_data(self, verdict: Verdict) -> dict[str, object]:
        """Return the figures for JSON."""
        return {
            "act": self.act,
            "title": self.title,
            "verdict": verdict.name.lower(),
            "seconds": round(self.seconds, 3),
            "transfers": self.transfers,
            "per_second": round(self.per_second, 1),
            "cents_lost": self.cents_lost,
            "accounts_off": self.accounts_off,
            "waits": len(self.waits),
            "wait_p50": self.wait(50),
            "wait_p99": self.wait(99),
            "wait_longest": self.wait(100),
            # Other programs read these keys, so they must not change.
            "takeovers": [{"blow": each.fault, "lock": each.lock, "seconds": each.seconds} for each in self.takeovers],
            "retries": self.retries,
        }


def keeps_every_cent(figures: Figures) -> Verdict:
    """Judge a guarded act.

    Money must have moved, no money may be lost, and after each fault another process must have got the lock.
    """
    taken_over = all(each.seconds is not None for each in figures.takeovers)
    fine = figures.transfers > 0 and figures.cents_lost == 0 and figures.accounts_off == 0 and taken_over
    return Verdict.OK if fine else Verdict.GUARD_FAILED


def loses_money(figures: Figures) -> Verdict:
    """Judge the control, which must have lost something."""
    return Verdict.OK if figures.cents_lost > 0 else Verdict.CONTROL_FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A way of transferring money, which all processes run at the same time.

    Attributes:
        name: the name for programs.
        title: the title for people.
        work: the function that does one piece of work; each process repeats it.
        faults: the faults injected into holders, in this order.
    """

    name: str
    title: str
    work: Callable[[WorkerContext], None]
    check: Callable[[Figures], Verdict] = keeps_every_cent
    faults: tuple[Fault, ...] = ()
