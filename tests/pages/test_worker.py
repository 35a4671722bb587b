"""The page about long jobs: its asyncio worker, overtaken in the middle of its work."""

from __future__ import annotations

from contextlib import ExitStack, closing, nullcontext
from typing import TYPE_CHECKING

import psycopg
import pytest

from support import pages
from support.processes import Script, frozen
from support.servers import database

if TYPE_CHECKING:
    from collections.abc import Iterator

# The worker of the page, with a TTL that a test can wait for. The first one hangs before its second chunk: its event loop and
# its heartbeat go on, its work does not.
WORKER = """
import asyncio

from sqlalchemy import create_engine

import worker
from pgfence import AsyncHeldLease, AsyncLease, LockLostError, StaleFencingTokenError, current

worker.Base.metadata.create_all(create_engine("postgresql+psycopg://"))
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
        await worker.main("2026-04")
    except LockLostError as error:
        say("lost:", error.reason)
    park()
    try:
        await worker.write_in_own_transaction("2026-04", lease)
    except StaleFencingTokenError as error:
        say("refused:", error.token, error.newest)

asyncio.run(work())
"""
)
SECOND = (
    WORKER
    + """
say("waits")
asyncio.run(worker.main("2026-04"))
say("done")
"""
)


@pytest.fixture
def own(dsn: str) -> Iterator[str]:
    """A database with our tables, in which nothing has happened."""
    with database(dsn, "worker") as made:
        pages.install(made)
        yield made


@pytest.mark.parametrize("how", ["hung", "stopped"])
def test_a_worker_that_was_overtaken_writes_nothing_more(own: str, how: str) -> None:
    """The next one continues after the last committed chunk; the first is notified, and its late write is rejected."""
    with ExitStack() as stack:
        first = stack.enter_context(closing(Script(pages.reader(own, FIRST))))
        first.wait_for("hangs")
        with frozen(first.pid) if how == "stopped" else nullcontext():
            second = stack.enter_context(closing(Script(pages.reader(own, SECOND))))
            second.wait_for("done")
        assert first.go_on() == 0
        assert [first.read_line(), first.read_line()] == ["lost: expired", "refused: 1 2"]
    with psycopg.connect(own) as connection:
        written = connection.execute("SELECT id, fence_token FROM entry ORDER BY id").fetchall()
    assert written == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2), (6, 2)]
