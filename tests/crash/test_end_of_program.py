"""A program ends while it holds, while others of it wait, or while its loop closes: in silence, and nothing stays."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.locking import freed
from support.programs import program

if TYPE_CHECKING:
    import psycopg

    from support.worlds import World

# Each child of this program ends in one of the ways, as a program of its own. `kept` lives until the interpreter ends.
ENDINGS = """
create_async_engine(sys.argv[1])  # loads the driver, once for all
kept = []
WAITS = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
{ways}

for way in {names}:
    if (child := os.fork()) == 0:
        break
    _, status = os.waitpid(child, 0)
    print(way.__name__, os.waitstatus_to_exitcode(status), flush=True)
else:
    os._exit(0)

async def main():
    engine = create_async_engine(sys.argv[1])
    lock = AsyncAdvisoryLock(engine, sys.argv[2])
    await way(engine, lock, await lock.acquire(timeout=5))

asyncio.run(main())
"""

WAYS = """
async def it_just_ends(engine, lock, held):
    kept.append(held)

async def it_exits(engine, lock, held):
    kept.append(held)
    sys.exit(0)

async def with_a_warm_session(engine, lock, held):
    await held.release()
    kept.append(lock)

async def inside_a_block(engine, lock, held):
    other = AsyncAdvisoryLock(engine, sys.argv[2] + "!").hold()
    await other.__aenter__()
    kept.append((held, other))

async def on_the_locks_own_connection(engine, lock, held):
    await held.release()
    other = lock.connect()
    connection = await other.__aenter__()
    await connection.execute(text("SELECT 1"))
    kept.append((other, connection))
"""

# What is registered first runs last: by then our connections are closed, and the threads that lost theirs go on for a while.
LAST = """
import atexit, threading

inside = []

@atexit.register
def look_at_threads():
    if inside:
        print("left inside the driver", file=sys.stderr)
    for thread in threading.enumerate():
        if thread.name == "waits":
            thread.join(0.1)
"""

# Three wait in line behind the holder, one of them at the server; a thread that is no daemon is waited for. The others must
# not come back with a new connection when the end has cut theirs: exit() takes OpenSSL down under whoever is inside.
THREADS_WAIT = """
from sqlalchemy import event

def while_threads_wait(engine, lock, held):
    def wait(mine, timeout):
        with contextlib.suppress(LockTimeoutError):
            mine.acquire(timeout=timeout)

    other = create_engine(sys.argv[1])
    event.listen(other, "do_connect", lambda *_: os.write(2, b"connects at the end\\n") if kept else None)
    elsewhere = AdvisoryLock(other, sys.argv[2])
    for mine, timeout, daemon in ((lock, 60, True), (elsewhere, 60, True), (elsewhere, 1.5, False)):
        threading.Thread(target=wait, args=(mine, timeout), daemon=daemon, name="waits").start()
    with engine.connect() as connection:
        while not connection.scalar(text(WAITS)):
            time.sleep(0.01)
    kept.append(held)

def while_a_thread_connects(engine, lock, held):
    began, ends = threading.Event(), threading.Event()

    @event.listens_for(engine, "do_connect")
    def connect(dialect, record, args, options):
        inside.append(dialect)
        began.set()
        ends.wait(5)
        connection = dialect.connect(*args, **options)
        inside.clear()
        return connection

    def look():
        with contextlib.suppress(UnreachableError):
            lock.holders()

    threading.Thread(target=look, daemon=True).start()
    began.wait(5)
    atexit.register(ends.set)
    kept.append(held)
"""

TASKS_WAIT = """
async def while_tasks_wait(engine, lock, held):
    elsewhere = AsyncAdvisoryLock(create_async_engine(sys.argv[1]), sys.argv[2])
    kept.append((held, [asyncio.ensure_future(mine.acquire(timeout=60)) for mine in (lock, elsewhere, elsewhere)]))
    async with engine.connect() as connection:
        while not await connection.scalar(text(WAITS)):
            await asyncio.sleep(0.01)
"""

LOOPS = """
async def main():
    kept.append(await AsyncAdvisoryLock(engine, sys.argv[2]).acquire(timeout=5))

kept, engine = [], create_async_engine(sys.argv[1])
for _ in range(3):
    asyncio.run(main())
print(len(kept))
"""


async def run(code: str, world: World, name: str) -> tuple[int, str, str]:
    """Run a program to its end; return its exit code and what it said, on stdout and on stderr."""
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", code, world.url, name],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


async def test_a_program_that_ends_while_it_holds_ends_in_silence(
    world: World, name: str, admin: psycopg.Connection[object]
) -> None:
    """Exit code 0, nothing on stderr, and the lock is free, whoever holds or waits when the interpreter exits."""
    ways = program(world, WAYS) + world.pick(THREADS_WAIT, TASKS_WAIT)
    names = [line.split("(")[0].split()[-1] for line in ways.splitlines() if line.startswith(("def ", "async def "))]
    assert len(names) == (6 if world.is_async else 7)
    code = LAST + program(world, ENDINGS).format(ways=ways, names=f"({', '.join(names)})")
    assert await run(code, world, name) == (0, "".join(f"{each} 0\n" for each in names), "")
    await freed(admin, name)
    await freed(admin, f"{name}!")


@pytest.mark.async_only
async def test_closing_a_loop_frees_its_locks_while_the_program_runs(
    world: World, name: str, admin: psycopg.Connection[object]
) -> None:
    """asyncio.run() ends while engine and handle are kept: the lock is free, and the next loop locks with the same engine."""
    assert await run(program(world, LOOPS), world, name) == (0, "3\n", "")
    await freed(admin, name)
