"""Run the acts: server, tables and processes, and after each act the comparison of balances and journal.

Guarantees: all objects are in a separate schema, which is dropped at the end unless it is kept, and nothing else in the database
is changed. No process outlives this one. Transfers and losses are read from the ledger, and the processes measure their waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy import text

from pgfence import schema
from pgfence._demo import load
from pgfence._demo.bank import NAMESPACE, Accounts
from pgfence._demo.measurement import Measurement
from pgfence._demo.scenario import create_engine_for
from pgfence._demo.scenarios import SCENES
from pgfence._demo.workers import WorkerPool
from pgfence._demo.workload import Verdict
from pgfence._demo.workloads import ACTS
from pgfence.advisory import AdvisoryLock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Engine

    from pgfence._api.handles import Held
    from pgfence._demo.measurement import Reporter
    from pgfence._demo.scenario import Scenario, ScenarioResult
    from pgfence._demo.workload import Figures, Workload

LEAST_PROCESSES = 3
"""One process is killed, and another must take over while a third waits."""
_ACCOUNTS_APART = 1000


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of all acts and scenes.

    `server` is, for example, "PostgreSQL 18.6", and `loaded_by` is pgbench with its version, or "SQL".
    """

    server: str
    loaded_by: str
    processes: int
    acts: tuple[tuple[Figures, Verdict], ...]
    scenes: tuple[ScenarioResult, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all acts and scenes. A guard that failed is worse than a control that failed."""
        verdicts = {verdict for _, verdict in self.acts} | {shown.verdict for shown in self.scenes}
        verdicts -= {Verdict.OK}
        return min(verdicts, default=Verdict.OK)

    def as_data(self) -> dict[str, object]:
        """Return the outcome for JSON."""
        return {
            "server": self.server,
            "loaded_by": self.loaded_by,
            "processes": self.processes,
            "acts": [figures.as_data(verdict) for figures, verdict in self.acts],
            "scenes": [shown.as_data() for shown in self.scenes],
            "verdict": self.verdict.name.lower(),
        }


def play(
    engine: Engine,
    reporter: Reporter,
    *,
    seconds: float,
    processes: int,
    keep: bool,
    acts: Sequence[Workload] = ACTS,
    scenes: Sequence[Scenario] = SCENES,
) -> Outcome:
    """Play the acts and scenes in the database of an engine.

    Each act takes `seconds` or, on a slow machine, longer. The number of processes is at least `LEAST_PROCESSES`.

    Raises:
        DemoError: the schema cannot be created, or a process failed.
        LockTimeoutError: another demo is running in this database.
        LockLostError: the server stopped during the demo.
        PoolerError, StandbyError, UnsupportedServerError, UnreachableError: the same errors as `AdvisoryLock.acquire`.
    """
    demo = AdvisoryLock(engine, "demo", namespace=NAMESPACE)
    with demo.hold(timeout=0) as held, WorkerPool(engine.url, processes) as pool:
        with engine.connect() as connection:
            server = f"PostgreSQL {connection.scalar(text('SHOW server_version')).split()[0]}"
        reporter.step(f"{server}: loading pgbench's tables, starting {processes} processes")
        pool.start()
        # The inner `pool` ends the processes before the tables are dropped.
        with load.create_tables(engine, keep=keep) as loaded_by, pool:
            reporter.step(f"loaded by {loaded_by}")
            played = []
            for number, act in enumerate(acts):
                pool.fill()
                # Each act has separate accounts, so that the rows of all acts can be inspected afterwards.
                accounts = Accounts(1 + number * _ACCOUNTS_APART)
                figures = Measurement(act, accounts, pool, engine, held, seconds=seconds).play(reporter)
                played.append((figures, act.check(figures)))
                reporter.result(*played[-1])
            pool.close()
            shown = _show(engine, reporter, held, scenes)
    return Outcome(server, loaded_by, processes, tuple(played), shown)


def _show(engine: Engine, reporter: Reporter, held: Held, scenes: Sequence[Scenario]) -> tuple[ScenarioResult, ...]:
    """Play the scenes with an engine that finds pgfence's tables in the demo's schema."""
    own = create_engine_for(engine.url)
    try:
        if scenes:
            schema.create_all(own)
        shown = []
        for scene in scenes:
            held.check()
            reporter.step(f"{scene.title} ...")
            shown.append(scene.play(own))
    finally:
        own.dispose()
    return tuple(shown)
