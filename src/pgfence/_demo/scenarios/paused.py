"""Stop a worker until its lease has expired, and let it continue while its successor works.

Each worker writes every step twice, to a table without a fence and to a fenced table. The worker that continues late still writes
to the first table, but the second table rejects its writes.
"""

from __future__ import annotations

import os
import signal
from itertools import count
from typing import TYPE_CHECKING

from sqlalchemy import text

from pgfence import schema
from pgfence._demo.bank import SCHEMA
from pgfence._demo.scenario import Scenario, ScenarioResult, create_engine_for, read_part, say, start_processes
from pgfence._demo.workload import Verdict
from pgfence.errors import StaleFencingTokenError
from pgfence.fence import fenced
from pgfence.lease import Lease

if TYPE_CHECKING:
    from sqlalchemy import Engine

TTL = 1.0
STEPS_BEFORE = 5
_TITLE = "a paused worker whose lease has expired"
_TABLES = f"""
    CREATE TABLE {SCHEMA}.steps (token bigint, at timestamptz DEFAULT clock_timestamp());
    CREATE TABLE {SCHEMA}.fenced_steps (token bigint, at timestamptz DEFAULT clock_timestamp());
"""
# Counts the steps of an older token that were written after the first step of a newer token.
_LATE = f"""
    SELECT count(*) FROM {SCHEMA}.{{table}} AS old
    WHERE EXISTS (SELECT FROM {SCHEMA}.{{table}} AS new WHERE new.token > old.token AND new.at < old.at)
"""


def play(engine: Engine) -> ScenarioResult:
    """Stop the first worker, wait until the second has taken over, and resume the first."""
    with engine.begin() as connection:
        connection.exec_driver_sql(_TABLES)
    schema.add_fence(engine, f"{SCHEMA}.fenced_steps", resource="steps")
    with start_processes() as start:
        first, second = (start(__name__, engine.url, name=name) for name in ("first", "second"))
        first.wait_for("ready")
        second.wait_for("ready")
        first.send(stops=True)
        first.wait_for("stops")
        second.send(stops=False)
        second.wait_for("step")
        first.popen.send_signal(signal.SIGCONT)
        refused = first.wait_for("refused")
        told = first.wait_for("told")
    with engine.connect() as connection:
        late = connection.scalar(text(_LATE.format(table="steps"))) or 0
        late_fenced = connection.scalar(text(_LATE.format(table="fenced_steps"))) or 0
    return ScenarioResult(
        scene="paused",
        title=_TITLE,
        verdict=_judge(late, late_fenced),
        lines=(_format_line(late, late_fenced, refused, told),),
        figures={"late": late, "late_fenced": late_fenced},
    )


def _format_line(late: int, late_fenced: int, refused: dict[str, int], told: str) -> str:
    return (
        f"Paused worker: {late} late write{'s' if late != 1 else ''} without a fence, {late_fenced or 'none'} with one"
        f" (token {refused['token']} rejected, newest {refused['newest']}). Lease lost: {told}."
    )


def _judge(late: int, late_fenced: int) -> Verdict:
    if late_fenced:
        return Verdict.GUARD_FAILED
    return Verdict.OK if late else Verdict.CONTROL_FAILED


def main() -> None:
    """Run a worker that never checks whether it still holds its lease."""
    engine = create_engine_for(read_part()["url"])
    with engine.connect():
        say(ready=True)
    stops = read_part().get("stops", False)
    lease = Lease(engine, "steps", ttl=TTL).acquire(timeout=30)
    booking = text(f"INSERT INTO {SCHEMA}.steps (token) VALUES (:token)")
    fenced_booking = text(f"INSERT INTO {SCHEMA}.fenced_steps (token) VALUES (:token)")
    for number in count():
        if stops and number == STEPS_BEFORE:
            # The worker is stopped between two transactions. If it were stopped inside a transaction, its successor would wait at
            # the gate.
            say(stops=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        with engine.begin() as connection:
            connection.execute(booking, {"token": lease.token})
        try:
            with engine.begin() as connection, fenced(connection, "steps", lease.token):
                connection.execute(fenced_booking, {"token": lease.token})
        except StaleFencingTokenError as error:
            say(refused={"token": error.token, "newest": error.newest})
            say(told=lease.loss_reason)
            return
        say(step=lease.token)


SCENE = Scenario(name="paused", title=_TITLE, play=play)

if __name__ == "__main__":
    main()
