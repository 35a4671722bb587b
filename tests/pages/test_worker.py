"""The page about long jobs: its programs, overtaken in the middle of their work."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy import Engine, create_engine, text

from pgfence import Lease
from pgfence.testing._processes import pause
from support import pages
from support.processes import Script
from support.servers import database
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "long-job.md"
# The page's first program, which creates the tables and the fence, and closes a book of its own.
SYNC = next(block.code for block in pages.blocks(PAGE) if block.kind == "python")
CLOSE = """
say("waits")
close("2026-05", [[1, 2], [3, 4]])
"""
CLOSE_IN_ASYNCIO = """
import asyncio
import worker

say("waits")
asyncio.run(worker.main("2026-05"))
"""
CANCEL_ON_SIGTERM = """
import asyncio
import signal

import worker

async def hang(after):
    yield [1, 2]
    say("hangs")
    await asyncio.Event().wait()

async def work():
    task = asyncio.create_task(worker.main("2026-05"))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])
    say("cancelled:", task.cancelled())

worker.chunks = hang
asyncio.run(work())
"""
# The worker of the page, with a TTL that a test can wait for. The first one hangs before its second chunk: its event loop and
# its heartbeat go on, its work does not.
WORKER = """
import asyncio

import worker
from pgfence import AsyncHeldLease, AsyncLease, LockLostError, StaleFencingTokenError, current

worker.AsyncLease = lambda engine, name, **options: AsyncLease(engine, name, **options | {"ttl": 1})
"""
FIRST = (
    WORKER
    + """
whole = worker.chunks
lease = None

async def until_it_hangs(after):
    global lease
    lease = current(AsyncHeldLease)
    async for chunk in whole(after):
        if chunk[0] > 1:
            say("hangs")
            await asyncio.Event().wait()
        yield chunk

async def work():
    worker.chunks = until_it_hangs
    try:
        await worker.main("2026-05")
    except LockLostError as error:
        say("lost:", error.reason)
    park()
    try:
        await worker.write_in_own_transaction("2026-05", lease)
    except StaleFencingTokenError as error:
        say("refused:", error.token, error.newest)

asyncio.run(work())
"""
)
SECOND = (
    WORKER
    + """
say("waits")
asyncio.run(worker.main("2026-05"))
say("done")
"""
)


@pytest.fixture
def own(dsn: str) -> Iterator[str]:
    """A database in which the page's first program has run, for the book 2026-04."""
    with database(dsn, "worker") as made, closing(Script(pages.reader(made, SYNC))) as setup:
        assert setup.go_on() == 0
        yield made


@pytest.fixture
def engine(own: str) -> Iterator[Engine]:
    made = create_engine(f"postgresql+psycopg://{own.split('://', 1)[1]}")
    yield made
    made.dispose()


def read_written(own: str) -> list[int]:
    """Return the ids that were written for the book 2026-05."""
    with psycopg.connect(own) as connection:
        rows = connection.execute("SELECT id FROM entry WHERE book = '2026-05' ORDER BY id").fetchall()
    return [row[0] for row in rows]


@pytest.mark.parametrize("how", ["hung", "stopped"])
def test_a_worker_that_was_overtaken_writes_nothing_more(own: str, how: str) -> None:
    """The next one continues after the last committed chunk; the first is notified, and its late write is rejected."""
    with ExitStack() as stack:
        first = stack.enter_context(closing(Script(pages.reader(own, FIRST))))
        first.wait_for("hangs")
        with pause(first.pid) if how == "stopped" else nullcontext():
            second = stack.enter_context(closing(Script(pages.reader(own, SECOND))))
            second.wait_for("done")
        assert first.go_on() == 0
        assert [first.read_line(), first.read_line()] == ["lost: expired", "refused: 1 2"]
    assert read_written(own) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("program", "checkpoint", "written"),
    [(SYNC.replace('close("2026-04"', "# ") + CLOSE, 1, [1, 2, 3, 4]), (CLOSE_IN_ASYNCIO, 2, [1, 2, 3, 4, 5, 6])],
    ids=["sync", "asyncio"],
)
def test_a_chunk_committed_during_the_wait_is_not_repeated(
    own: str, engine: Engine, program: str, checkpoint: int, written: list[int]
) -> None:
    """The previous holder commits its chunk while the next one, which has read an older checkpoint, waits at the gate."""
    previous = Lease(engine, "close:2026-05", ttl=1, heartbeat="manual").acquire()
    with ExitStack() as stack:
        with previous.begin(engine) as connection:
            connection.execute(text("INSERT INTO entry (book, id) VALUES ('2026-05', 1), ('2026-05', 2)"))
            previous.checkpoint(connection, checkpoint)
            following = stack.enter_context(closing(Script(pages.reader(own, program))))
            eventually(lambda: count_waiters(own))
        assert following.go_on() == 0
    assert read_written(own) == written


def count_waiters(own: str) -> int:
    """Return how many sessions of the database wait for a lock on the server."""
    with psycopg.connect(own) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_sigterm_cancels_the_worker_and_frees_its_lease(own: str, engine: Engine) -> None:
    """The handler of the page cancels the task; its chunk was committed, and the next worker need not wait for the TTL."""
    with closing(Script(pages.reader(own, CANCEL_ON_SIGTERM))) as script:
        script.wait_for("hangs")
        script.kill(signal.SIGTERM)
        script.wait_for("cancelled: True")
        assert script.go_on() == 0
    assert not Lease(engine, "close:2026-05", ttl=60).is_held()
    assert read_written(own) == [1, 2]
