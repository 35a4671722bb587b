"""cancel_waits(): another thread cancels a thread's wait, wherever it waits, and nothing is left behind."""

from __future__ import annotations

import math
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence import AdvisoryLock, Lease, RateLimit, Semaphore, WaitCancelledError, cancel_waits, configure
from support.locking import elsewhere, freed, standing, waits
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg
    from sqlalchemy import Engine

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    """An engine for threads."""
    made = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield made
    made.dispose()


@pytest.fixture
def other() -> Iterator[ThreadPoolExecutor]:
    """Another thread."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def cancelled(
    other: ThreadPoolExecutor, work: Callable[[], Any], stands: Callable[[], object], name: str
) -> None:
    """Let another thread wait indefinitely, cancel the wait once it has begun, and expect the error to name the lock."""
    stop = threading.Event()

    def waits_for_ever() -> None:
        with cancel_waits(stop):
            work()

    waiter = other.submit(waits_for_ever)
    await eventually(stands)
    stop.set()
    with pytest.raises(WaitCancelledError, match=f"wait for '{name}' was cancelled") as caught:
        waiter.result(20)
    assert caught.value.names == (name,)


@pytest.mark.parametrize("kind", [AdvisoryLock, Lease])
async def test_a_waiter_in_this_process_is_cancelled(
    engine: Engine, other: ThreadPoolExecutor, name: str, kind: type
) -> None:
    """A cancelled waiter leaves the queue, and the next contender gets the lock at the holder's release."""
    one = kind(engine, name, **({"ttl": 60} if kind is Lease else {}))
    with one.hold():
        await cancelled(other, lambda: one.acquire(timeout=math.inf), lambda: standing(engine) == 1, name)
        assert standing(engine) == 0
    with one.hold(timeout=20):
        pass


async def test_a_waiter_in_the_server_is_cancelled(
    engine: Engine, other: ThreadPoolExecutor, name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """C040: a cancelled waiter for another process's lock no longer waits in the server, and gets no lock later."""
    with elsewhere(dsn, name):
        await cancelled(other, lambda: AdvisoryLock(engine, name).acquire(timeout=math.inf), waits(admin, name), name)
    await freed(admin, name)


async def test_a_waiter_for_a_lease_of_another_process_is_cancelled(
    engine: Engine, other: ThreadPoolExecutor, name: str, dsn: str
) -> None:
    """The waiter polls until the event is set, and then raises WaitCancelledError."""
    elsewhere = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    asked: list[Any] = []
    with Lease(elsewhere, name, ttl=60).hold():
        one = Lease(engine, name, ttl=60)
        assert one.try_acquire() is None
        await cancelled(other, lambda: (asked.append(1), one.acquire(timeout=math.inf)), lambda: bool(asked), name)
    with one.hold(timeout=20):
        pass
    elsewhere.dispose()


async def test_a_waiter_for_a_permit_is_cancelled(engine: Engine, other: ThreadPoolExecutor, name: str) -> None:
    """The waiter leaves the queue of the semaphore, also one in which the order is kept."""
    began = threading.Event()
    for fair in (False, True):
        one = Semaphore(engine, name, permits=1, ttl=60, fair=fair)
        with one.hold():
            await cancelled(other, lambda one=one: (began.set(), one.acquire(timeout=math.inf)), began.is_set, name)
        with one.hold(timeout=20):
            pass


async def test_a_waiter_for_a_rate_limit_is_cancelled(engine: Engine, other: ThreadPoolExecutor, name: str) -> None:
    """The call does not count, because it was never allowed."""
    began, limit = threading.Event(), RateLimit(engine, name, limit=1, per=3600)
    assert limit.try_take()
    await cancelled(other, lambda: (began.set(), limit.wait(timeout=math.inf)), began.is_set, name)


async def test_a_waiter_for_a_connection_is_cancelled(engine: Engine, other: ThreadPoolExecutor, name: str) -> None:
    """If all lock connections are in use, a cancelled waiter leaves that queue, and the next waiter is served."""
    configure(engine, max_lock_connections=1)
    began = threading.Event()
    with AdvisoryLock(engine, f"{name}:first").hold():
        one = AdvisoryLock(engine, name)
        await cancelled(other, lambda: (began.set(), one.acquire(timeout=math.inf)), began.is_set, name)
    with one.hold(timeout=20):
        pass


async def test_a_waiter_for_a_server_that_does_not_respond_is_cancelled(other: ThreadPoolExecutor, name: str) -> None:
    """A waiter is cancelled while its connection is being opened, which may take as long as the timeout."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = create_engine(f"postgresql+psycopg://ann@127.0.0.1:{silent.getsockname()[1]}/d")
        client: list[Any] = []
        accepting = threading.Thread(target=lambda: client.append(silent.accept()[0]))
        accepting.start()
        wait = AdvisoryLock(engine, name).acquire
        await cancelled(other, lambda: wait(timeout=math.inf), lambda: bool(client), name)
        client[0].close()
        accepting.join()


def test_what_does_not_wait_goes_on(engine: Engine, name: str) -> None:
    """After the event is set, a wait raises before a statement is sent, but a try and a release work."""
    stop = threading.Event()
    stop.set()
    one = AdvisoryLock(engine, name)
    with cancel_waits(stop):
        held = one.try_acquire()
        assert held is not None
        held.release()
        with pytest.raises(WaitCancelledError):
            one.acquire()
    with one.hold(timeout=20):
        pass
    with pytest.raises(TypeError, match="is_set"), cancel_waits("stop"):
        pass
