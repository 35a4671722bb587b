"""Sync code interrupted at every moment at which a signal handler can raise in it: entering and leaving each function."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text

import pgfence
from pgfence import AdvisoryLock
from pgfence._holds.registry import ManagerRegistry
from pgfence._locks.manager import LockManager
from support.locking import elsewhere, give, waits
from support.moments import Stop, interrupted, torn_connections
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import psycopg


def usable(engine: Any, name: str) -> bool:
    """Say whether another thread gets the lock."""
    got: list[bool] = []

    def take() -> None:
        try:
            AdvisoryLock(engine, name).acquire(timeout=1).release()
            got.append(True)
        except pgfence.errors.LockTimeoutError:
            got.append(False)

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return got == [True]


def places_taken(engine: Any, before: int) -> int:
    """Return how many connection slots are in use without a user, once a background thread has returned the others."""
    managers = [each for each in ManagerRegistry.of(engine).values() if isinstance(each, LockManager)]
    taken = 0
    for _ in range(100):
        taken = sum(each.pool.state.open - len(each.pool.state.idle) for each in managers)
        if taken <= before:
            break
        time.sleep(0.01)
    return taken


def at_every_moment(
    make: Callable[[], Any], name: str, work: Callable[[Any], None], most: int = 600, *, cold: bool = False
) -> None:
    """Interrupt work at each of its moments in turn.

    After each the lock can be had, its connection has been given back, and the interrupt is what came out.
    """
    engine = make()
    leaks, strange, places = [], [], []
    lost = 0
    for at in range(1, most):
        outcome: BaseException | None = None
        if cold:
            engine.dispose()
        with interrupted(at) as interrupt:
            try:
                work(engine)
            except BaseException as error:
                outcome = error
        if not interrupt.where:
            assert outcome is None
            break
        if not isinstance(outcome, Stop):
            strange.append((interrupt.where, repr(outcome)))
        del outcome
        if (taken := places_taken(engine, lost)) > lost:
            places.append(interrupt.where)
            lost = taken
        if not usable(engine, name):
            gc.collect()
            if not usable(engine, name):
                leaks.append(interrupt.where)
                engine.dispose()
                engine = make()
                lost = 0
                name_free(name)
    else:
        raise AssertionError("more moments than expected")
    assert at > 100, "hardly anything was interrupted"
    assert (leaks, strange) == ([], [])
    # CPython looks for signals at a call, and not when a function of Python returns.
    assert [where for where in places if " return " not in where] == []


def name_free(name: str) -> None:
    """A leaked lock stays with its session: end all sessions, so that one leak is reported once."""
    import psycopg

    with psycopg.connect(ADMIN["dsn"], autocommit=True) as admin:
        admin.execute(
            "SELECT pg_terminate_backend(pid, 2000) FROM pg_stat_activity WHERE application_name = %s", [name]
        )


ADMIN: dict[str, str] = {}


@pytest.fixture(params=["psycopg", "psycopg2"])
def make(request: pytest.FixtureRequest, dsn: str, name: str) -> Iterator[Callable[[], Any]]:
    """A function that makes an engine."""
    engines: list[Any] = []
    ADMIN["dsn"] = dsn

    def engine() -> Any:
        url = f"postgresql+{request.param}://{dsn.split('://', 1)[1]}"
        engines.append(create_engine(url, connect_args={"application_name": name}))
        return engines[-1]

    with torn_connections():
        yield engine
        for one in engines:
            one.dispose()


def test_a_free_lock(make: Callable[[], Any], name: str) -> None:
    """acquire, body, release."""

    def work(engine: Any) -> None:
        with AdvisoryLock(engine, name).hold(timeout=5):
            pass

    at_every_moment(make, name, work)


@pytest.mark.parametrize("make", ["psycopg"], indirect=True)
def test_a_free_lock_on_a_new_connection(make: Callable[[], Any], name: str) -> None:
    """A place among the connections, the opening of one, acquire and release."""

    def work(engine: Any) -> None:
        AdvisoryLock(engine, name).acquire().release()

    at_every_moment(make, name, work, cold=True)


def test_a_user_connection(make: Callable[[], Any], name: str) -> None:
    """connect(), a statement, commit, and the end."""

    def work(engine: Any) -> None:
        with AdvisoryLock(engine, name).connect(timeout=5) as connection:
            connection.execute(text("SELECT 1"))
            connection.commit()

    at_every_moment(make, name, work)


@pytest.mark.parametrize("make", ["psycopg"], indirect=True)
def test_a_wait_behind_a_neighbour(make: Callable[[], Any], name: str) -> None:
    """In the line of the process, up to and including the hand-over."""

    def work(engine: Any) -> None:
        ready, go = threading.Event(), threading.Event()

        def neighbour() -> None:
            with AdvisoryLock(engine, name).hold(timeout=5):
                ready.set()
                go.wait(5)

        thread = threading.Thread(target=neighbour)
        thread.start()
        ready.wait(5)
        threading.Timer(0.003, go.set).start()
        try:
            with AdvisoryLock(engine, name).hold(timeout=5):
                pass
        finally:
            go.set()
            thread.join()

    at_every_moment(make, name, work)


@pytest.mark.parametrize("make", ["psycopg"], indirect=True)
def test_a_wait_in_the_server(make: Callable[[], Any], name: str, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """Granted in the first slice."""

    def work(engine: Any) -> None:
        with elsewhere(dsn, name) as holder:

            def leave() -> None:
                eventually(lambda: waits(admin, name)() or done.is_set())
                give(holder, name)

            done = threading.Event()
            thread = threading.Thread(target=leave)
            thread.start()
            try:
                with AdvisoryLock(engine, name).hold(timeout=5):
                    pass
            finally:
                done.set()
                thread.join()

    at_every_moment(make, name, work)
