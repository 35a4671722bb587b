"""The page about elections: its web application leads, works, and resigns when it ends."""

from __future__ import annotations

import json

import psycopg
from sqlalchemy import create_engine

from pgfence import schema
from support import pages
from support.processes import Script
from support.servers import database
from support.waiting import eventually

SERVE = """
import json, os, time

import psycopg

from fastapi.testclient import TestClient
import leader

os.environ["POD_NAME"] = "pod-7"

def count_unsent():
    with psycopg.connect() as connection:
        return connection.execute("SELECT count(*) FROM outbox WHERE NOT sent").fetchone()[0]

with TestClient(leader.app) as client:
    end = time.monotonic() + 20
    while not (health := client.get("/healthz").json())["leader"]:
        assert time.monotonic() < end
        time.sleep(0.01)
    while count_unsent():
        assert time.monotonic() < end
        time.sleep(0.01)
print(json.dumps(health))
"""

RUN = """
from fastapi.testclient import TestClient
import leader

os.environ["POD_NAME"] = "pod-7"
with TestClient(leader.app):
    park()
"""


def test_the_application_leads_works_and_resigns(dsn: str) -> None:
    """It is elected, drains the outbox in fenced transactions, and its shutdown releases the term."""
    with database(dsn, "leader") as own:
        engine = create_engine(f"postgresql+psycopg://{own.split('://', 1)[1]}")
        schema.create_all(engine)
        engine.dispose()
        with psycopg.connect(own, autocommit=True) as connection:
            connection.execute("CREATE TABLE outbox (id bigserial PRIMARY KEY, sent boolean NOT NULL DEFAULT false)")
            connection.execute("INSERT INTO outbox (sent) SELECT false FROM generate_series(1, 25)")
            script = Script(pages.reader(own, SERVE))
            assert json.loads(script.read_line()) == {"leader": True, "term": 1}
            script.close()
            assert connection.execute("SELECT count(*) FROM outbox WHERE NOT sent").fetchall() == [(0,)]
            term = "SELECT owner, token, released_at IS NOT NULL FROM pgfence_lease"
            assert connection.execute(term).fetchall() == [("pod-7", 1, True)]


def test_the_application_works_again_after_an_error(dsn: str) -> None:
    """An error ends the term, and the same member drains the outbox in a later one."""
    with database(dsn, "leader") as own:
        engine = create_engine(f"postgresql+psycopg://{own.split('://', 1)[1]}")
        schema.create_all(engine)
        engine.dispose()
        with psycopg.connect(own, autocommit=True) as connection:
            script = Script(pages.reader(own, RUN))
            term = "SELECT FROM pgfence_lease WHERE token > 1 OR released_at IS NOT NULL"
            eventually(lambda: connection.execute(term).rowcount == 1, deadline=20)
            connection.execute("CREATE TABLE outbox (id bigserial PRIMARY KEY, sent boolean NOT NULL DEFAULT false)")
            connection.execute("INSERT INTO outbox (sent) VALUES (false)")
            eventually(lambda: connection.execute("SELECT FROM outbox WHERE sent").rowcount == 1, deadline=20)
            script.close()
