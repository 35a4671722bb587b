"""The page about handing over: the lease is acquired in the API's process and released in a Celery worker's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine

from pgfence import Lease, LockLostError
from support import pages
from support.queues import Queue
from support.servers import database
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine

API = """
import json

from fastapi.testclient import TestClient
from exports import app

client = TestClient(app)
print(json.dumps([client.post(f"/exports/{user}").status_code for user in (1, 1, 2)]))
"""
WITHOUT_BROKER = """
from fastapi.testclient import TestClient
import exports
from pgfence import Lease

def fail(ref):
    raise ConnectionRefusedError

exports.export.delay = fail
response = TestClient(exports.app, raise_server_exceptions=False).post("/exports/5")
print(response.status_code, Lease(exports.engine, "export:5", ttl=300).is_held())
"""
pytestmark = pytest.mark.timeout(120)  # workers are started, which takes long where others compute
ASYNC_WORKER = """
import asyncio

from exports import engine, export_in_asyncio
from pgfence import Lease

ref = Lease(engine, "export:3", ttl=300).acquire().hand_over()
asyncio.run(export_in_asyncio(ref))
print(Lease(engine, "export:3", ttl=300).is_held())
"""


@pytest.fixture
def own(dsn: str) -> Iterator[str]:
    """A database with our tables."""
    with database(dsn, "exports") as made:
        pages.install(made)
        yield made


@pytest.fixture
def engine(own: str) -> Iterator[Engine]:
    made = create_engine(f"postgresql+psycopg://{own.split('://', 1)[1]}")
    yield made
    made.dispose()


@pytest.fixture
def queue(own: str, tmp_path: Path) -> Queue:
    return Queue(tmp_path, pages.environment(own))


def held(engine: Engine, user: int) -> bool:
    return Lease(engine, f"export:{user}", ttl=300).is_held()


def test_a_second_request_is_rejected_until_the_worker_is_done(queue: Queue, engine: Engine) -> None:
    """The API's process has ended, its task waits: still held. A worker adopts the lease and releases it."""
    assert json.loads(queue.run(API)) == [202, 409, 202]
    assert held(engine, 1)
    with queue.worker("exports:queue"):
        eventually(lambda: not held(engine, 1) and not held(engine, 2), deadline=50)
        assert json.loads(queue.run(API))[0] == 202
        eventually(lambda: not held(engine, 1), deadline=50)


def test_a_request_whose_task_cannot_be_sent_releases_the_lease(queue: Queue) -> None:
    """A broker that is down does not block the next request for one TTL."""
    assert queue.run(WITHOUT_BROKER) == "500 False\n"


def test_a_message_that_is_delivered_twice_is_adopted_once(queue: Queue, engine: Engine) -> None:
    """The second delivery fails with a typed error that says so, in another process as well."""
    lease = Lease(engine, "export:4", ttl=300).acquire()
    ref = lease.hand_over()
    first, second = (queue.send("exports.export", ref) for _ in range(2))
    with queue.worker("exports:queue"):
        eventually(lambda: first.ready() and second.ready(), deadline=50)
    assert sorted([first.state, second.state]) == ["FAILURE", "SUCCESS"]
    failed = first if first.failed() else second
    with pytest.raises(LockLostError, match="already adopted"):
        failed.get(timeout=1)
    assert not held(engine, 4)


def test_a_worker_in_asyncio_adopts_as_well(queue: Queue) -> None:
    """A reference from a sync lease works for an async one."""
    assert queue.run(ASYNC_WORKER) == "False\n"
