"""Elections under faults: one leader by token, how long hand-overs take, and what a follower costs."""

from __future__ import annotations

import random
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence import Election, monitoring
from pgfence.config import configure
from support.crews import FULL, Crew, crew, find_quantile, report
from support.proxy import CountingProxy
from support.waiting import blocking

if TYPE_CHECKING:
    from pathlib import Path

    import psycopg

CANDIDATES, TERMS = (50, 200) if FULL else (5, 7)
TTL = 1.5 if FULL else 0.8

# A leader writes with its token all the time. Two of three terms end because the leader's function returns, the others by a fault.
WORK = """
from pgfence import Election
from pgfence.fence import fence

name, ttl = arguments[0], float(arguments[1])
write = text("INSERT INTO term_ledger (name, token, pid) VALUES (:name, :token, :pid)")

def work(number):
    engine = create_engine(url, pool_size=1)
    member = Election(engine, name, ttl=ttl).stand(on_gained=lambda: note("gained", member.term.token, time.monotonic()))
    while True:
        try:
            member.run(lambda term: lead(engine, term))
        except Exception as error:
            note("error", type(error).__name__)

def lead(engine, term):
    returns = random.random() < 0.66
    until = time.monotonic() + random.uniform(0.02, 0.2)
    if not returns:
        note("stays", term.token, os.getpid())
    values = {"name": name, "token": term.token, "pid": os.getpid()}
    while not term.lost:
        try:
            with term.begin(engine) as connection:
                connection.execute(write, values)
        except LockLostError:
            break
        time.sleep(0.005)
        if returns and time.monotonic() > until:
            note("returns", term.token, time.monotonic())
            return
    # As one that does not know that it has lost its term.
    with contextlib.suppress(StaleFencingTokenError), engine.begin() as connection:
        fence(connection, name, term.token)
        connection.execute(write, values)
        note("late", term.token)
"""


class Blows:
    """The faults that end the terms whose leaders stay."""

    def __init__(self, workers: Crew, dsn: str, name: str, admin: psycopg.Connection[Any]) -> None:
        self.workers = workers
        self.admin = admin
        self.name = name
        self.engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
        self.done: dict[int, tuple[str, float]] = {}

    def strike(self) -> None:
        """Cause a fault for each leader that stays and has had none."""
        for found in self.workers.read("stays")[len(self.done) :]:
            token, pid = map(int, found)
            kind, moment = random.choice(["killed", "stopped", "asked to resign", "terminated"]), time.monotonic()
            self.done[token] = kind, moment
            if kind == "killed":
                self.workers.kill(pid)
            elif kind == "stopped":
                self.workers.stop(2 * TTL, pid)
            else:
                if kind == "terminated":  # the leader connects again, and keeps its term
                    self.workers.end_backends_of(self.admin, pid)
                monitoring.ask_to_resign(self.engine, self.name, reason="test")
                self.workers.faults[kind] += 1


@pytest.mark.usefixtures("tables")
@pytest.mark.timeout(900 if FULL else 120)
def test_one_leader_by_token_at_every_write(
    name: str, dsn: str, admin: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """Leaders return, are killed, stopped, disconnected and asked to resign: no write under an older token follows a newer one."""
    admin.execute("CREATE TABLE IF NOT EXISTS term_ledger (id bigserial, name text, token bigint, pid int)")
    with crew(dsn, tmp_path, WORK, CANDIDATES, name, TTL) as workers:
        blows = Blows(workers, dsn, name, admin)
        took = workers.run_until(lambda: workers.count("gained") > TERMS, blows.strike, 0.05, 800)
        blows.engine.dispose()
    ledger = "SELECT token, pid, max(token) OVER (ORDER BY id) AS newest FROM term_ledger WHERE name = %s"
    assert admin.execute(f"SELECT * FROM ({ledger}) AS l WHERE token < newest".encode(), [name]).fetchall() == []
    pids = "SELECT token FROM term_ledger WHERE name = %s GROUP BY token HAVING count(DISTINCT pid) > 1"
    assert admin.execute(pids.encode(), [name]).fetchall() == []
    writes = admin.execute("SELECT count(*), count(DISTINCT token) FROM term_ledger WHERE name = %s", [name]).fetchone()
    assert writes is not None
    assert writes[1] > TERMS / 2
    show(workers, blows, writes[0], took)


def show(workers: Crew, blows: Blows, writes: int, took: float) -> None:
    """Report how long the hand-overs took: from the end of a term, or the fault, to the next leader."""
    gained = {int(token): float(moment) for token, moment in workers.read("gained")}
    ends = {int(token): ("returned", float(moment)) for token, moment in workers.read("returns")} | blows.done
    times: dict[str, list[float]] = {}
    for token, (kind, moment) in ends.items():
        if (following := gained.get(token + 1)) is not None:
            times.setdefault(kind, []).append(following - moment)
    figures = {
        f"{kind}_({len(found)})": f"p50 {find_quantile(found, 0.5):.3f} p99 {find_quantile(found, 0.99):.3f} max {max(found):.3f} s"
        for kind, found in times.items()
    }
    report(
        f"election of {CANDIDATES} with ttl {TTL} s",
        terms=len(gained),
        fenced_writes=writes,
        leaders_at_once=1,
        **figures,
        errors=workers.count("error"),
        seconds=took,
    )


@pytest.mark.usefixtures("tables")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("pooler", "pause"), [("auto", 1.2), ("transaction", 1.0)])
def test_a_follower_asks_seldom(name: str, dsn: str, pooler: Any, pause: float) -> None:
    """With notifications a follower asks once in a third of the TTL, and without them once a second: its round trips are counted."""
    questions, ttl = (10 if FULL else 2), 3.6
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with closing(CountingProxy(dsn)) as proxy:
        far = create_engine(f"postgresql+psycopg://{proxy.dsn.split('://', 1)[1]}")
        configure(far, pooler=pooler)
        with Election(engine, name, ttl=ttl).lead(), Election(far, name, ttl=ttl).stand() as member:
            for _ in range(20):  # until it is connected and follows
                before = proxy.trips
                try:
                    blocking(lambda: proxy.trips > before, 0.5)  # noqa: B023
                except AssertionError:
                    break
            began = time.monotonic()
            blocking(lambda: proxy.trips > before, 60)
            first = time.monotonic()
            blocking(lambda: proxy.trips >= before + 1 + questions, 60)
            took, trips = time.monotonic() - first, proxy.trips - before - 1
            assert not member.is_leader
        far.dispose()
    engine.dispose()
    # The clock of this test begins after the first question was seen, which may have been late by as much as a look.
    assert trips <= took / pause + 0.5
    report(f"follower, pooler={pooler}", round_trips=trips, seconds=took, first_after=first - began)
