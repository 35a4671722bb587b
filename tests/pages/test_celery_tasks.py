"""The page about Celery: its program in a real prefork worker, with tasks that meet each other."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pytest
from sqlalchemy import Engine, create_engine

from pgfence import Lease, monitoring
from support import pages
from support.queues import Queue
from support.servers import database
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

# The parent of the worker has used its pool before it forks, as an application that reads its settings at import has.
WORKER = """
from sqlalchemy import text

from celery_tasks import Base, app, engine, reopen_books
from pgfence import schema

Base.metadata.create_all(engine)
schema.create_all(engine)

@app.task
def backend():
    with engine.connect() as connection:
        return connection.scalar(text("SELECT pg_backend_pid()"))

parents = backend()

@app.task
def backend_of_the_parent():
    return parents

patient = reopen_books.retry
reopen_books.retry = lambda **options: patient(**options | {"countdown": 0.2})
"""


class Books(NamedTuple):
    """A worker that runs the program, and the database it works in."""

    queue: Queue
    engine: Engine
    admin: psycopg.Connection[Any]

    def send(self, task: str, *arguments: Any) -> Any:
        return self.queue.send(f"celery_tasks.{task}", *arguments)

    def get(self, result: Any) -> Any:
        """Return what a task returned, or raise what it raised."""
        eventually(result.ready, deadline=20)
        return result.get(timeout=1)

    def lease(self, tenant: int) -> Lease:
        return Lease(self.engine, f"close:{tenant}", ttl=60)

    def entries(self, tenant: int) -> int:
        (count,) = self.admin.execute("SELECT count(*) FROM entry WHERE book = %s", [str(tenant)]).fetchone() or (0,)
        return count

    @contextmanager
    def blocked_tasks(self) -> Iterator[None]:
        """Let no task get past its first look at the entries."""
        with psycopg.connect(self.admin.info.dsn, password=self.admin.info.password) as connection:
            connection.execute("LOCK TABLE entry IN ACCESS EXCLUSIVE MODE")
            yield

    def waiting(self) -> bool:
        here = "datname = current_database() AND wait_event_type = 'Lock'"
        return self.admin.execute(f"SELECT FROM pg_stat_activity WHERE {here}".encode()).rowcount == 1


BY_HAND = """
from pgfence import LockTimeoutError
from celery_tasks import close_books, reopen_books

print(close_books(12))
try:
    reopen_books(12)
except LockTimeoutError as error:
    print(error.holders[0].name)
"""


@pytest.fixture(scope="module")
def books(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Books]:
    with database(dsn, "celery") as own:
        queue = Queue(tmp_path_factory.mktemp("queue"), pages.environment(own))
        queue.write("books_worker", WORKER)
        engine = create_engine(f"postgresql+psycopg://{own.split('://', 1)[1]}")
        with queue.worker("books_worker:app"), psycopg.connect(own, autocommit=True) as admin:
            found = Books(queue, engine, admin)
            found.get(queue.send("books_worker.backend"))
            yield found
        engine.dispose()


def test_a_task_is_skipped_while_its_twin_runs(books: Books) -> None:
    """Two tasks with one argument: the second returns at once, without a result, and only the first has written."""
    with books.blocked_tasks():
        first = books.send("close_books", 7)
        eventually(books.waiting, deadline=20)
        assert books.get(books.send("close_books", 7)) is None
        assert not first.ready()
    assert books.get(first) is None
    assert books.entries(7) == 1


def test_tasks_with_other_arguments_run_beside(books: Books) -> None:
    """The name has the argument in it: a lease on one tenant keeps no task of another away."""
    with books.lease(8).hold(timeout=5):
        assert books.get(books.send("close_books", 8)) is None
        assert books.get(books.send("close_books", 9)) is None
    assert (books.entries(8), books.entries(9)) == (0, 1)


def test_a_busy_task_goes_back_to_the_queue(books: Books) -> None:
    """With a callable for `busy` the task is retried until it gets its turn, more often than Celery's three times."""
    with books.lease(10).hold(timeout=5):
        result = books.send("reopen_books", 10)
        eventually(lambda: books.queue.log().count(f"[{result.id}] retry") > 4, deadline=20)
        assert result.state == "RETRY"
    assert books.get(result) == 10


def test_a_task_that_is_called_directly_has_no_queue_to_go_back_to(books: Books) -> None:
    """Outside of a worker the busy error itself is raised; a task that skips still skips."""
    with books.lease(12).hold(timeout=5):
        assert books.queue.run(BY_HAND) == "None\nclose:12\n"


def test_a_task_whose_process_was_killed_is_delivered_again(books: Books) -> None:
    """The redelivered task finds the dead one's lease and waits in the queue; it is not lost."""
    with books.blocked_tasks():
        result = books.send("reopen_books", 11)
        eventually(books.waiting, deadline=20)
        (dead,) = books.lease(11).holders()
        os.kill(dead.pid or 0, signal.SIGKILL)
        eventually(lambda: result.state == "RETRY", deadline=45)
    monitoring.evict(books.engine, "close:11", reason="its process was killed")
    assert books.get(result) == 11


def test_a_forked_child_opens_its_own_connections(books: Books) -> None:
    """The parent's pooled connection is used by no child and is as the parent left it."""
    parents = books.get(books.queue.send("books_worker.backend_of_the_parent"))
    children = {books.get(books.queue.send("books_worker.backend")) for _ in range(4)}
    assert parents not in children
    left = books.admin.execute("SELECT state FROM pg_stat_activity WHERE pid = %s", [parents]).fetchall()
    assert left == [("idle",)]
