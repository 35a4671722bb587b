"""Crews: many worker processes under faults, and the notes that they write for a checker.

The workers are forked, because a process costs milliseconds that way, and one that dies is replaced. All are one process group.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from support.processes import Script, children_of
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import psycopg

FULL = bool(os.environ.get("PGFENCE_TEST_FAULTS"))
"""Whether to run with the full counts."""

_PROGRAM = """
import contextlib, logging, os, random, signal, sys, threading, time
from sqlalchemy import create_engine, text
from pgfence.errors import *

logging.disable()
url, notes, processes, *arguments = sys.argv[1:]
log = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(*words):
    os.write(log, (" ".join(map(str, words)) + chr(10)).encode())

def start(number):
    pid = os.fork()
    if pid == 0:
        random.seed()
        os.environ["PGAPPNAME"] = f"worker {os.getpid()}"
        try:
            work(number)
        except BaseException as error:
            note("error", type(error).__name__)
        finally:
            os._exit(0)
    crew[pid] = number

def run_threads(count, turn):
    "Repeat `turn()` in so many threads of this process."
    def repeat():
        while True:
            try:
                turn()
            except Exception as error:  # of a fault
                note("error", type(error).__name__)
                time.sleep(0.01)
    threads = [threading.Thread(target=repeat, daemon=True) for _ in range(count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

crew = {}
{work}
create_engine(url)  # loads the driver, once for all
os.setpgrp()
for number in range(int(processes)):
    start(number)
say("started")
while True:
    pid, _ = os.waitpid(-1, 0)
    start(crew.pop(pid))
"""


class Crew:
    """Worker processes that run `work(number)`, and their notes.

    Attributes:
        faults: how many faults of each kind they had.
    """

    def __init__(self, dsn: str, folder: Path, work: str, processes: int, *arguments: object) -> None:
        """Start the workers.

        Args:
            dsn: the database, which they know as `url`, for SQLAlchemy.
            folder: where to keep the notes.
            work: the program, which defines `work(number)`. It has `note(*words)` and `run_threads(count, turn)`.
            processes: how many.
            *arguments: the strings in its list `arguments`.
        """
        self._notes = folder / "notes"
        self._notes.touch()
        self._read = 0
        self._counts: Counter[str] = Counter()
        self._stopped: dict[int, float] = {}
        self.faults: Counter[str] = Counter()
        url = f"postgresql+psycopg://{dsn.split('://', 1)[1]}"
        code = _PROGRAM.replace("{work}", work)
        self._script = Script(code, url, str(self._notes), str(processes), *map(str, arguments))
        self._script.wait_for("started", 60)

    def count(self, what: str) -> int:
        """Return how many notes begin with a word."""
        with self._notes.open("rb") as notes:
            notes.seek(self._read)
            found, _, rest = notes.read().rpartition(b"\n")
            self._read = notes.tell() - len(rest)  # the last line may not be complete
        self._counts.update(line.partition(b" ")[0].decode() for line in found.splitlines())
        return self._counts[what]

    def read(self, what: str) -> list[list[str]]:
        """Return the words of each note that begins with a word."""
        lines = map(str.split, self._notes.read_text().splitlines())
        return [words[1:] for words in lines if words and words[0] == what]

    def members(self) -> list[int]:
        """Return the process ids of the workers."""
        return children_of(self._script.pid)

    # ------------------------------------------------------------ faults

    def kill(self, pid: int | None = None) -> int:
        """Kill a worker, by default any, and return its process id."""
        pid = pid or random.choice(self.members())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.faults["SIGKILL"] += 1
        return pid

    def stop(self, seconds: float, pid: int | None = None) -> None:
        """Stop a worker, by default any, for so long; `resume` lets it continue."""
        pid = pid or random.choice(self.members())
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._stopped[pid] = time.monotonic() + seconds
            self.faults["SIGSTOP"] += 1

    def resume(self, *, everyone: bool = False) -> None:
        """Let the stopped workers continue whose time is over, or all of them."""
        for pid, until in list(self._stopped.items()):
            if everyone or until <= time.monotonic():
                del self._stopped[pid]
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def end_backend(self, admin: psycopg.Connection[Any]) -> None:
        """Terminate any server process of the workers."""
        found = admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND backend_type = 'client backend' AND application_name NOT IN ('admin', 'monitor') ORDER BY random() LIMIT 1"
        ).fetchone()
        if found is not None:
            self.faults["backend terminated"] += 1

    def end_backends_of(self, admin: psycopg.Connection[Any], pid: int) -> None:
        """Terminate the server processes of one worker, which knows itself as application_name."""
        found = admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s", [f"worker {pid}"]
        ).fetchall()
        self.faults["backend terminated"] += len(found)

    def inject(self, admin: psycopg.Connection[Any], longest_stop: float) -> None:
        """Cause a fault of a random kind."""
        kind = random.random()
        if kind < 0.4:
            self.kill()
        elif kind < 0.7:
            self.stop(random.uniform(0.3, 1.0) * longest_stop)
        else:
            self.end_backend(admin)

    def run_until(self, done: Callable[[], bool], fault: Callable[[], object], every: float, deadline: float) -> float:
        """Cause a fault every so many seconds on average, until the condition is true. Return how long that took.

        Raises:
            AssertionError: the deadline was not met.
        """
        began, due = time.monotonic(), time.monotonic() + every

        def ask() -> bool:
            nonlocal due
            self.resume()
            if time.monotonic() >= due:
                fault()
                due = time.monotonic() + random.uniform(0.5, 1.5) * every
            return done()

        blocking(ask, deadline, 0.02)
        return time.monotonic() - began

    def close(self) -> None:
        """Kill them all."""
        with suppress(ProcessLookupError):
            os.killpg(self._script.pid, signal.SIGKILL)
        self._script.close()


@contextmanager
def crew(dsn: str, folder: Path, work: str, processes: int, *arguments: object) -> Iterator[Crew]:
    """Run a crew, see `Crew`, and kill it at the end."""
    running = Crew(dsn, folder, work, processes, *arguments)
    try:
        yield running
    finally:
        running.close()


def find_most_at_once(uses: list[tuple[float, float]]) -> int:
    """Return how many of the intervals overlap at most. An interval that ends when another one begins does not overlap it."""
    moments = sorted([(start, 1) for start, _ in uses] + [(end, -1) for _, end in uses])
    most = now = 0
    for _, step in moments:
        now += step
        most = max(most, now)
    return most


def find_quantile(values: list[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def report(what: str, **figures: object) -> None:
    """Print the figures of a run; pytest shows them with -s."""
    shown = ", ".join(
        f"{name.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
        for name, value in figures.items()
    )
    print(f"\n{what}: {shown}", flush=True)
