"""C012: a forked child holds no lock, does not disturb its parent, and can lock for itself."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from support.locking import elsewhere, give, is_free, waits
from support.waiting import eventually
from support.worlds import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from support.processes import Script

# `hold(engine, name)` and `call(x)` hide which half of the package it is; `main()` is the script of a test.
COMMON = """
import asyncio, gc, inspect, os, sys, threading, time, warnings
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
import pgfence
from pgfence import AdvisoryLock, AsyncAdvisoryLock
from pgfence.errors import LockLostError, LockNotHeldError

driver, dsn, name = sys.argv[1:4]
ASYNC = driver in ("psycopg_async", "asyncpg")
url = "postgresql+" + driver.removesuffix("_async") + "://" + dsn.split("://", 1)[1]

def make(url=url, **arguments):
    return (create_async_engine if ASYNC else create_engine)(url, **arguments)

def lock(engine, *names):
    return (AsyncAdvisoryLock if ASYNC else AdvisoryLock)(engine, *names)

async def call(function, *args, **kwargs):
    result = function(*args, **kwargs)
    return await result if inspect.isawaitable(result) else result

def wait_child(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def run():
    if ASYNC:
        asyncio.run(main())
    else:
        coroutine = main()
        try:
            coroutine.send(None)
        except StopIteration:
            pass
"""


@pytest.fixture(params=NAMES)
def driver(request: pytest.FixtureRequest) -> str:
    """One driver after the other."""
    return request.param


@pytest.fixture
def forking(driver: str, script: Callable[..., Script], dsn: str, name: str) -> Callable[..., Script]:
    """A function that runs the body of `async def main()` in a separate process, on each driver."""

    def start(body: str, *arguments: str) -> Script:
        lines = "\n".join("    " + line for line in body.strip().splitlines())
        return script(f"{COMMON}\nasync def main():\n{lines}\n\nrun()\n", driver, dsn, name, *arguments)

    return start


def test_a_child_holds_nothing_and_its_end_frees_nothing(
    forking: Callable[..., Script], name: str, admin: psycopg.Connection[Any]
) -> None:
    """The handle says so there, release() is a clear error; however children end, the parent's lock stays and works."""
    parent = forking("""
async def child(held, how):
    said = [held.state, str(held.lost)]
    for action in (held.check, held.release):
        try:
            await call(action)
            said.append("silent")
        except LockNotHeldError as error:
            said.append("not-held" if "forked child" in str(error) else str(error))
    try:
        pgfence.current(pgfence.AsyncHeld if ASYNC else pgfence.Held)
        said.append("current")
    except LockNotHeldError:
        said.append("none")
    say(*said)
    if how == "os._exit":
        os._exit(0)
    if how == "exec":
        os.execv("/bin/true", ["true"])
    gc.collect()
    sys.exit(0)

for how in ("os._exit", "exec", "normal"):
    held = await call(lock(make(), name).acquire)
    pid = os.fork()
    if pid == 0:
        await child(held, how)
    say("child-ended", wait_child(pid))
    sys.stdin.readline()
    held.check()
    await call(held.release)
    say("released")

manager = lock(make(), name).hold()
await call(manager.__aenter__ if ASYNC else manager.__enter__)
pid = os.fork()
try:
    if pid == 0:
        sys.exit(7)
    say("child-ended", wait_child(pid))
    sys.stdin.readline()
finally:
    await call(manager.__aexit__ if ASYNC else manager.__exit__, *sys.exc_info())
say("left")
""")
    for _ in range(3):
        assert parent.read_line() == "released False not-held not-held none"
        assert parent.read_line() == "child-ended 0"
        assert not is_free(admin, name)
        go_on(parent)
        assert parent.read_line() == "released"
    assert parent.read_line() == "child-ended 7"
    assert not is_free(admin, name)
    go_on(parent)
    assert parent.read_line() == "left"
    assert is_free(admin, name)


def go_on(script: Script) -> None:
    """Let a script read one line."""
    script._popen.stdin.write(b"\n")
    script._popen.stdin.flush()


def test_a_child_can_lock_for_itself(forking: Callable[..., Script], name: str, admin: psycopg.Connection[Any]) -> None:
    """With its own connections: rejected what the parent holds, granted what is free, notified of its own losses."""
    parent = forking("""
engine = make()
held = await call(lock(engine, name).acquire)
pid = os.fork()
if pid == 0:
    async def child():
        engine = make() if ASYNC else globals_engine
        say(await call(lock(engine, name).try_acquire))
        own = await call(lock(engine, name + "child").acquire, timeout=5)
        told = threading.Event()
        own.on_lost(told.set)
        say(own.state)
        sys.stdin.readline()
        end = time.monotonic() + 5
        while not told.is_set() and time.monotonic() < end:
            if ASYNC:
                await asyncio.sleep(0.01)
            else:
                told.wait(0.01)
        say(own.state, told.is_set())
    globals_engine = engine
    if ASYNC:
        worker = threading.Thread(target=asyncio.run, args=(child(),))
        worker.start()
        worker.join()
    else:
        await child()
    os._exit(0)
say("child-ended", wait_child(pid))
held.check()
await call(held.release)
""")
    assert parent.read_line() == "None"
    assert parent.read_line() == "held"
    assert not is_free(admin, name)
    admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND objsubid = 1 AND (classid::bigint << 32 | objid::bigint) = %s",
        [value(name + "child")],
    )
    go_on(parent)
    assert parent.read_line() == "lost True"
    assert parent.read_line() == "child-ended 0"
    assert parent.go_on() == 0


def value(name: str) -> int:
    from pgfence.keys import LockKey

    return LockKey.of(name).value


def test_a_fork_between_locks_leaves_the_child_whole(
    forking: Callable[..., Script], name: str, admin: psycopg.Connection[Any]
) -> None:
    """The parent has used a lock and holds none: a child's own lock is watched, and one that is dropped there is freed."""
    parent = forking("""
engine = make()
await call((await call(lock(engine, name).acquire)).release)
await call(engine.dispose)
pid = os.fork()
if pid == 0:
    async def child():
        warnings.simplefilter("ignore")
        engine = make()
        own = await call(lock(engine, name + "child").acquire, timeout=5)
        say("locked")
        sys.stdin.readline()
        end = time.monotonic() + 5
        while not own.lost and time.monotonic() < end:
            if ASYNC:
                await asyncio.sleep(0.01)
            else:
                time.sleep(0.01)
        say(own.state)
        dropped = await call(lock(engine, name + "dropped").acquire, timeout=5)
        del dropped
        gc.collect()
        again = None
        while again is None and time.monotonic() < end:
            again = await call(lock(make(), name + "dropped").try_acquire)
            await asyncio.sleep(0.01) if ASYNC else time.sleep(0.01)
        say("freed" if again else "stuck")
    if ASYNC:
        worker = threading.Thread(target=asyncio.run, args=(child(),))
        worker.start()
        worker.join()
    else:
        await child()
    os._exit(0)
say("child-ended", wait_child(pid))
""")
    assert parent.read_line() == "locked"
    admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted"
        " AND objsubid = 1 AND (classid::bigint << 32 | objid::bigint) = %s",
        [value(name + "child")],
    )
    go_on(parent)
    assert parent.read_line() == "lost"
    assert parent.read_line() == "freed"
    assert parent.read_line() == "child-ended 0"


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_ctrl_c_in_a_wait_ends_it_and_leaves_nothing(
    forking: Callable[..., Script], name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """SIGINT while a thread waits in the server: KeyboardInterrupt at once, no lock, no place in the line."""
    with elsewhere(dsn, name) as holder:
        waiter = forking("""
engine = make()
say("ready")
try:
    await call(lock(engine, name).acquire, timeout=30)
except KeyboardInterrupt:
    say("interrupted")
held = await call(lock(engine, name + "free").acquire, timeout=5)
await call(held.release)
say(await call(lock(engine, name).try_acquire))
park()
""")
        waiter.wait_for("ready")
        eventually(waits(admin, name))
        waiter.kill(signal.SIGINT)
        assert waiter.read_line() == "interrupted"
        assert waiter.read_line() == "None"
        eventually(lambda: not waits(admin, name)())
        give(holder, name)
        assert is_free(admin, name)
