"""C012: a host may fork without Python's hooks, and hooks of other libraries may run before those of pgfence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.locking import is_free
from support.worlds import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script

pytestmark = pytest.mark.usefixtures("tables")

# `fork()` is what a server written in C calls: no hook of os.register_at_fork runs.
COMMON = """
import asyncio, ctypes, inspect, os, sys, threading, time, warnings
warnings.simplefilter("error")
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

driver, dsn, name = sys.argv[1:4]
ASYNC = driver in ("psycopg_async", "asyncpg")
url = "postgresql+" + driver.removesuffix("_async") + "://" + dsn.split("://", 1)[1]
fork = ctypes.PyDLL(None).fork

async def call(function, *args, **kwargs):
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result

async def renewed_twice(held):
    for _ in range(2):
        before = held.expires_at
        while held.expires_at == before:
            held.check()
            await call(asyncio.sleep, 0.01) if ASYNC else time.sleep(0.01)

def drive(coroutine):
    if ASYNC:
        return asyncio.run(coroutine)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value

def in_child(work):
    try:
        if ASYNC:  # a loop does not survive a fork
            worker = threading.Thread(target=drive, args=(work(),))
            worker.start()
            worker.join()
        else:
            drive(work())
    except BaseException as error:
        say("failed", type(error).__name__, error)
        os._exit(1)
"""

BODY = """
import pgfence
from pgfence._process.lifecycle import MUTEX
from pgfence._process.lifecycle import PROCESS, PidMark

if sys.argv[4] == "pid":
    PROCESS.mark = PidMark()
    PROCESS.mark[0] = 1
make = create_async_engine if ASYNC else create_engine
Lock, Lease = (pgfence.AsyncAdvisoryLock, pgfence.AsyncLease) if ASYNC else (pgfence.AdvisoryLock, pgfence.Lease)

def note(action):
    try:
        return str(action())
    except pgfence.LockNotHeldError:
        return "not-held"

async def child(lock, lease, engine):
    say(lock.state, lease.state, note(lock.check), note(lease.check))
    engine = make(url) if ASYNC else engine
    say("busy" if await call(Lock(engine, name).try_acquire) is None else "both-hold")
    say("busy" if await call(Lease(engine, name + ":lease", ttl=3).try_acquire) is None else "both-hold")
    own = await call(Lease(engine, name + ":child", ttl=2).acquire)
    await renewed_twice(own)
    await call(own.release)
    async def under(lock):
        held = await call(lock.acquire, timeout=5)
        await call(held.release)
    await under(Lock(engine, name + ":free"))
    await call(engine.dispose)
    say("worked")

async def main():
    engine = make(url)
    lock = await call(Lock(engine, name).acquire)
    await call((await call(Lock(engine, name + ":warm").acquire)).release)
    lease = await call(Lease(engine, name + ":lease", ttl=3).acquire)
    await renewed_twice(lease)
    stays, go = threading.Event(), threading.Event()
    def keep():
        with MUTEX:
            stays.set()
            go.wait()
    busy = threading.Thread(target=keep)  # the child has a locked mutex, and no thread that frees it
    busy.start()
    stays.wait()
    pid = fork()
    if pid == 0:
        in_child(lambda: child(lock, lease, engine))
        if sys.argv[5] == "exit":
            sys.stdout.flush()
            sys.exit(0)
        os._exit(0)
    go.set()
    busy.join()
    say("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    lock.check()
    await renewed_twice(lease)
    sys.stdin.readline()
    await call(lock.release)
    await call(lease.release)
    await call(engine.dispose)
    say("released")

drive(main())
"""
CASES = [*((driver, "kernel", "_exit") for driver in NAMES), ("psycopg", "pid", "exit")]


@pytest.mark.parametrize(("driver", "mark", "end"), CASES)
def test_a_child_of_a_fork_without_hooks_is_another_contender(
    script: Callable[..., Script],
    dsn: str,
    name: str,
    admin: psycopg.Connection[Any],
    driver: str,
    mark: str,
    end: str,
) -> None:
    """It holds nothing, cannot acquire what the parent holds, renews its own lease, and its end disturbs no other process."""
    parent = script(COMMON + BODY, driver, dsn, name, mark, end)
    assert [parent.read_line() for _ in range(4)] == ["released released not-held not-held", "busy", "busy", "worked"]
    assert parent.read_line() == "ended 0"
    assert not is_free(admin, name)
    parent._popen.stdin.write(b"\n")
    parent._popen.stdin.flush()
    assert parent.read_line() == "released"
    assert is_free(admin, name)


IDLE = """
import pgfence

engine = create_engine(url)
lock = pgfence.AdvisoryLock(engine, name).acquire()
with pgfence.AdvisoryLock(engine, name + ":warm").hold():
    pass
pid = fork()
if pid == 0:
    how = sys.argv[4]
    if how == "disposes":
        engine.dispose()
    elif how == "drops":
        del lock
    elif how == "collects":
        import gc
        del lock, engine
        gc.collect()
    elif how == "closes":
        os.closerange(3, 64)
        before = [os.pipe() for _ in range(16)]
        assert pgfence.AdvisoryLock(create_engine(url), name).try_acquire() is None
        for reader, writer in before:
            os.write(writer, b"x")
            assert os.read(reader, 1) == b"x"
    say("done")
    sys.stdout.flush()
    sys.exit(0)
say("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
lock.check()
with pgfence.AdvisoryLock(engine, name + ":warm").hold():
    pass
lock.release()
say("released")
"""


@pytest.mark.parametrize("how", ["disposes", "drops", "collects", "closes", "ends"])
def test_nothing_that_a_child_does_ends_the_parents_session(
    script: Callable[..., Script], dsn: str, name: str, how: str
) -> None:
    """Disposing of the engine, dropping it, closing descriptors or just ending: nothing is sent on the parent's sockets."""
    parent = script(COMMON + IDLE, "psycopg", dsn, name, how)
    assert [parent.read_line() for _ in range(3)] == ["done", "ended 0", "released"]


HOOKS = """
hooks = {}
for which in ("before", "after_in_parent", "after_in_child"):
    os.register_at_fork(**{which: lambda which=which: hooks.get(which, lambda: None)()})
import pgfence

engine = create_engine(url)
lock, lease = pgfence.AdvisoryLock(engine, name), pgfence.Lease(engine, name + ":lease", ttl=5)
held = [lock.acquire(), lease.acquire()]

def give_back():
    for each in held:
        each.release()

def take(who):
    with lock.hold(timeout=20), lease.hold(timeout=20):
        say(who)

hooks.update(before=give_back, after_in_parent=lambda: take("locked"), after_in_child=lambda: take("locked"))
pid = os.fork()
if pid == 0:
    os._exit(0)
say("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_fork_hooks_registered_before_the_import_may_lock(script: Callable[..., Script], dsn: str, name: str) -> None:
    """A hook may give a lock and a lease back before the fork, and take them after it in both processes."""
    parent = script(COMMON + HOOKS, "psycopg", dsn, name)
    assert [parent.read_line() for _ in range(3)] == ["locked", "locked", "ended 0"]
    assert parent.go_on() == 0
