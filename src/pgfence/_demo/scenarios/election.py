"""Elect a leader among three processes, kill the leader, and ask the next leader to resign.

Each leader writes into a fenced table during its term. The table shows which process led when, and whether a former leader wrote
during a later term.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import text

from pgfence import schema
from pgfence._demo.bank import SCHEMA
from pgfence._demo.scenario import (
    Scenario,
    ScenarioResult,
    create_engine_for,
    fork_process,
    read_part,
    say,
    start_processes,
)
from pgfence._demo.workload import Verdict
from pgfence._process.clock import clock
from pgfence.election import Election
from pgfence.errors import LockLostError, StaleFencingTokenError
from pgfence.monitoring import ask_to_resign

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from sqlalchemy import Engine

    from pgfence.election import Term

CANDIDATES = 3
TTL = 1.0
_BETWEEN_WRITES = 0.01
_LOOK = 0.02
_PATIENCE = 20.0
# How long the second leader writes before it is asked to resign.
_FIRST_SECOND = 1.1
_TITLE = f"an election among {CANDIDATES} processes, whose leader is killed"
_TABLE = f"CREATE TABLE {SCHEMA}.led (term bigint, leader text, at timestamptz DEFAULT clock_timestamp())"
_WRITE = text(f"INSERT INTO {SCHEMA}.led (term, leader) VALUES (:term, :leader)")
_FIRST = text(f"SELECT term, leader, at FROM {SCHEMA}.led WHERE term > :term ORDER BY term, at LIMIT 1")
_NOW = text("SELECT clock_timestamp()")
# Counts the writes of a term that were made after the first write of a later term.
_COUNT = text(f"""
    SELECT count(DISTINCT term), count(*), count(*) FILTER (WHERE at > ends)
    FROM (
        SELECT term, at, (SELECT min(later.at) FROM {SCHEMA}.led AS later WHERE later.term > led.term) AS ends
        FROM {SCHEMA}.led
    ) AS written
""")


class Leader(NamedTuple):
    """The leader of a term, which is a fencing token. `at` is the time of its first write, by the server's clock."""

    term: int
    name: str
    at: datetime


def play(engine: Engine) -> ScenarioResult:
    """Start the candidates, kill the first leader, and ask the second leader to resign."""
    with engine.begin() as connection:
        connection.exec_driver_sql(_TABLE)
    schema.add_fence(engine, f"{SCHEMA}.led", resource="leader")
    with start_processes() as start:
        candidates = start(__name__, engine.url).wait_for("candidates")
        first = _wait_for_leader(engine, after=0)
        second, killed = _hand_over(engine, first, lambda leader: os.kill(candidates[leader.name], signal.SIGKILL))
        time.sleep(_FIRST_SECOND)
        _, resigned = _hand_over(engine, second, lambda _: ask_to_resign(engine, "leader", reason="the demo"))
    with engine.connect() as connection:
        terms, writes, overlapping = connection.execute(_COUNT).one()
    return _describe(killed, resigned, terms=terms, writes=writes, overlapping=overlapping)


def _describe(killed: int | None, resigned: int | None, *, terms: int, writes: int, overlapping: int) -> ScenarioResult:
    after_kill, after_resign = (f"after {ms} ms" if ms is not None else "never" for ms in (killed, resigned))
    line = (
        f"Election among {CANDIDATES} processes. Leader killed: the next one writes {after_kill} (TTL {TTL:.0f} s)."
        f" Leader asked to resign: {after_resign}. {writes} writes in {terms} terms, {overlapping or 'none'} by a former leader."
    )
    return ScenarioResult(
        scene="election",
        title=_TITLE,
        verdict=_judge(killed, resigned, overlapping),
        lines=(line,),
        figures={
            "terms": terms,
            "writes": writes,
            "overlapping": overlapping,
            "after_kill_ms": -1 if killed is None else killed,
            "after_resign_ms": -1 if resigned is None else resigned,
        },
    )


def _judge(killed: int | None, resigned: int | None, overlapping: int) -> Verdict:
    return Verdict.GUARD_FAILED if killed is None or resigned is None or overlapping else Verdict.OK


def _hand_over(
    engine: Engine, leader: Leader | None, end: Callable[[Leader], object]
) -> tuple[Leader | None, int | None]:
    """End a leader's term, and return the next leader and the milliseconds until its first write."""
    if leader is None:
        return None, None
    with engine.connect() as connection:
        began: datetime = connection.execute(_NOW).scalar_one()
    end(leader)
    following = _wait_for_leader(engine, after=leader.term)
    return following, None if following is None else round((following.at - began).total_seconds() * 1000)


def _wait_for_leader(engine: Engine, *, after: int) -> Leader | None:
    """Return the leader of a later term than `after`, or None if no process led within `_PATIENCE`."""
    deadline = clock() + _PATIENCE
    while clock() < deadline:
        with engine.connect() as connection:
            row = connection.execute(_FIRST, {"term": after}).one_or_none()
        if row is not None:
            return Leader(*row)
        time.sleep(_LOOK)
    return None


def main() -> None:
    """Fork the candidates, and report their process ids."""
    url = read_part()["url"]
    say(candidates={str(number): fork_process(partial(_stand, str(number), url)) for number in range(CANDIDATES)})
    read_part()


def _stand(name: str, url: str) -> None:
    engine = create_engine_for(url)

    def lead(term: Term) -> None:
        while not term.lost:
            with suppress(LockLostError, StaleFencingTokenError), term.begin(engine) as connection:
                connection.execute(_WRITE, {"term": term.token, "leader": name})
            time.sleep(_BETWEEN_WRITES)

    member = Election(engine, "leader", ttl=TTL).stand(owner=name)
    threading.Thread(target=member.run, args=(lead,), daemon=True).start()


SCENE = Scenario(name="election", title=_TITLE, play=play)

if __name__ == "__main__":
    main()
