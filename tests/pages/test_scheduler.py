"""The pages about schedulers: their programs on two replicas, each with its own running scheduler."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from support import pages
from support.processes import Script
from support.servers import database
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

# The program tries at seven: its scheduler is told that it is seven now.
REPLICA = """
import queue
from datetime import datetime, timezone

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from scheduler import scheduler, send_once

answers = queue.Queue()
scheduler.add_listener(lambda event: answers.put(event.exception or event.retval), EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
(job,) = scheduler.get_jobs()
job.modify(next_run_time=datetime.now(timezone.utc))
say(answers.get(timeout=20), send_once())
scheduler.shutdown()
"""

# The program's job is due every 50 ms.
LED = """
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.triggers.interval import IntervalTrigger
from leading_scheduler import member, scheduler

scheduler.add_listener(lambda event: say("ran", member.term and member.term.token), EVENT_JOB_EXECUTED)
(job,) = scheduler.get_jobs()
job.reschedule(IntervalTrigger(seconds=0.05))
say("standing")
park()
member.resign()
scheduler.shutdown()
"""

EVERY_SECOND = """
from datetime import timedelta

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger
from sqlalchemy import create_engine, text

from pgfence import Once, Slot, current

engine = create_engine("postgresql+psycopg://")

def job():
    slot = current(Slot)
    with slot.begin(engine) as connection:
        connection.execute(text("INSERT INTO ran VALUES (:slot)"), {"slot": slot.slot})

scheduler = BackgroundScheduler()
guarded = Once(engine, "tick", every=timedelta(seconds=1)).wrap()(job)
scheduler.add_job(guarded, IntervalTrigger(seconds=0.2), max_instances=2)
scheduler.start()
park()
scheduler.shutdown()
"""


@pytest.fixture(scope="module")
def own(dsn: str) -> Iterator[str]:
    """A database with our tables: the program's job has run in none of its slots."""
    with database(dsn, "scheduler") as made:
        pages.install(made)
        yield made


@contextmanager
def replicas(own: str, code: str) -> Iterator[tuple[Script, Script]]:
    both = Script(pages.reader(own, code)), Script(pages.reader(own, code))
    try:
        yield both
    finally:
        for one in both:
            one.close()


def test_one_replica_sends_the_digest_of_the_day(own: str) -> None:
    """Both schedulers fire; one job runs, the other is skipped, and a manual run afterwards is skipped too."""
    with replicas(own, REPLICA) as both:
        assert sorted(one.read_line() for one in both) == ["3 None", "None None"]


def test_only_the_scheduler_of_the_leader_runs(own: str) -> None:
    """A follower's scheduler runs no job. When the leader resigns, the follower's scheduler starts, in the next term."""
    with ExitStack() as ends:
        leader = Script(pages.reader(own, LED))
        ends.callback(leader.close)
        leader.wait_for("ran 1")
        follower = Script(pages.reader(own, LED))
        ends.callback(follower.close)
        follower.wait_for("standing")
        for _ in range(5):
            leader.wait_for("ran 1")
        assert leader.go_on() == 0
        assert follower.read_line() == "ran 2"


def test_each_slot_is_run_by_one_replica(own: str) -> None:
    """Schedulers that ask more often than there are slots run a short job once in each second."""
    ran = "SELECT slot, count(*) FROM ran GROUP BY slot ORDER BY slot"
    with psycopg.connect(own, autocommit=True) as admin:
        admin.execute("CREATE TABLE ran (slot timestamptz)")
        with replicas(own, EVERY_SECOND) as both:
            eventually(lambda: admin.execute(ran).rowcount > 2, deadline=20)
            assert [one.go_on() for one in both] == [0, 0]
        assert {times for _, times in admin.execute(ran).fetchall()} == {1}
