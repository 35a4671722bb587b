"""The page about a webhook's inbox: its program, killed between each pair of its steps, and under a storm of repetitions."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from typing import TYPE_CHECKING

import psycopg
import pytest

from support import pages
from support.processes import Script
from support.servers import database

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = """
import json
from concurrent.futures import ThreadPoolExecutor

from sqlalchemy import event

from webhook_inbox import Base, Order, SessionLocal, app, engine, sign

def send(number):
    body = json.dumps({"id": f"evt_{number}", "order": 1, "amount": 1}).encode()
    headers = {"X-Signature": sign(body).decode()}
    return app.test_client().post("/webhooks/payments", data=body, headers=headers).status_code

def orders():
    Base.metadata.create_all(engine)
    with SessionLocal.begin() as session:
        session.add(Order(id=1, paid=0))
    engine.dispose()
"""
# Each is forked from one process that has the imports, and waits before or after the first or second commit to be killed.
KILLED = (
    PROGRAM
    + """
def at(hook, number):
    left = [number]

    def pause(session):
        left[0] -= 1
        if not left[0]:
            say(os.getpid())
            park()

    event.listen(SessionLocal, hook, pause)

orders()
for number in range(4):
    if not (pid := os.fork()):
        at(("before_commit", "after_commit")[number % 2], 1 + number // 2)
        send(number)
        os._exit(0)
    os.waitpid(pid, 0)
say([send(number) for number in range(4) for again in range(2)])
"""
)
STORM = (
    PROGRAM
    + """
orders()
with ThreadPoolExecutor(6) as pool:
    answers = list(pool.map(send, [number for number in range(10) for again in range(5)]))
say(sorted(set(answers)))
"""
)


@pytest.fixture
def own(dsn: str) -> Iterator[str]:
    """A database with our tables, in which nothing has happened."""
    with database(dsn, "inbox") as made:
        pages.install(made)
        yield made


def books(own: str) -> tuple[int, int]:
    """Return what the order was paid, and how many mails were written."""
    with psycopg.connect(own) as connection:
        found = connection.execute("SELECT (SELECT paid FROM order_paid), (SELECT count(*) FROM mail)").fetchone()
    assert found
    return found[0], found[1]


def test_an_event_is_taken_once_whenever_its_process_dies(own: str) -> None:
    """SIGKILL before and after each consumer's commit: the sender comes again twice, and each consumer has done its work once."""
    with closing(Script(pages.reader(own, KILLED))) as script:
        for taken in ((0, 0), (1, 0), (2, 0), (3, 1)):
            pid = int(script.read_line())
            assert books(own) == taken
            os.kill(pid, signal.SIGKILL)
        assert script.read_line() == str([204] * 8)
    assert books(own) == (4, 4)


def test_a_storm_of_repetitions_has_one_effect_for_each_event(own: str) -> None:
    """Five of each of ten events, six at a time: every response is 204, and order and mails have each event once."""
    with closing(Script(pages.reader(own, STORM))) as script:
        assert script.read_line(60) == "[204]"
    assert books(own) == (10, 10)
