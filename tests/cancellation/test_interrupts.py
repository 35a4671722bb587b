"""Sync code is interrupted by signals: Ctrl-C, or a handler that raises (soft time limits of task queues). Rule 13."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from support.locking import elsewhere, give, is_free, waits
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from pgfence.testing._proxy import Proxy
    from support.processes import Script

COMMON = """
import gc, random, signal, threading, time, warnings
from sqlalchemy import create_engine, text
from pgfence import AdvisoryLock, configure
warnings.simplefilter("ignore", ResourceWarning)
driver, dsn, name = sys.argv[1:4]
engine = create_engine("postgresql+" + driver + "://" + dsn.split("://", 1)[1], connect_args={"application_name": name})

class SoftLimit(Exception):
    "What a task queue raises from its signal handler."

def handler(*_):
    if armed[0]:
        armed[0] = False
        raise SoftLimit

armed = [False]
signal.signal(signal.SIGUSR1, handler)
main = threading.main_thread().ident
dice = random.Random(3)

class Gun:
    "Interrupts the main thread once, so many seconds after it was aimed."

    def __init__(self, after):
        self.aimed = threading.Event()
        self.thread = threading.Thread(target=self.fire, args=(after,))
        self.thread.start()

    def fire(self, after):
        self.aimed.wait()
        time.sleep(after)
        signal.pthread_kill(main, signal.SIGUSR1)

    def aim(self):
        armed[0] = True
        self.aimed.set()
"""


@pytest.fixture(params=["psycopg", "psycopg2"])
def interrupted(
    request: pytest.FixtureRequest, script: Callable[..., Script], dsn: str, name: str
) -> Callable[..., Script]:
    """A function that runs a script on each sync driver."""
    return lambda body: script(COMMON + body, request.param, dsn, name)


def test_an_interrupt_anywhere_in_a_cycle_leaves_nothing(
    interrupted: Callable[..., Script], name: str, admin: psycopg.Connection[Any]
) -> None:
    """Hit at 150 random moments of acquire, body and release: the lock is free, and the process can take it again at once."""
    script = interrupted("""
configure(engine, max_lock_connections=3)
stuck = []
for number in range(150):
    gun = Gun(dice.random() * 0.0012)
    try:
        gun.aim()
        end = time.monotonic() + 5
        while armed[0] and time.monotonic() < end:
            with AdvisoryLock(engine, name).hold(timeout=5):
                pass
    except SoftLimit:
        pass
    armed[0] = False  # what ended the attempt may have come before the shot
    gun.thread.join()
    free = []
    def try_it():
        try:
            AdvisoryLock(engine, name).acquire(timeout=2).release()
            free.append(True)
        except BaseException as error:
            free.append(repr(error))
    for _ in range(2):
        thread = threading.Thread(target=try_it)
        thread.start()
        thread.join()
        if free[-1] is True:
            break
        gc.collect()  # what an exception still refers to
    if free[-1] is not True:
        stuck.append((number, free[-1]))
        if len(stuck) > 2:
            break
say("stuck", stuck)
park()
""")
    assert script.read_line(60) == "stuck []"
    assert is_free(admin, name)


def test_an_interrupt_of_a_wait_leaves_nothing(
    interrupted: Callable[..., Script], name: str, dsn: str, admin: psycopg.Connection[Any]
) -> None:
    """In the server's slices, in the line behind a thread, in the wait for a connection: it comes through, nothing is left."""
    with elsewhere(dsn, name) as holder:
        script = interrupted("""
configure(engine, max_lock_connections=2)
def attempt(*names):
    gun = Gun(0.05 + dice.random() * 0.7)
    start = time.monotonic()
    try:
        gun.aim()
        AdvisoryLock(engine, *names).acquire(timeout=20).release()
        say("granted")
    except SoftLimit:
        say("interrupted" if time.monotonic() - start < 15 else "late")
    armed[0] = False  # what ended the attempt may have come before the shot
    gun.thread.join()

def hold(name, gate, ready):
    with AdvisoryLock(engine, name).hold():
        ready.set()
        gate.wait(30)

for _ in range(4):
    attempt(name)
gate = threading.Event()
threads = []
for number in range(2):
    ready = threading.Event()
    threads.append(threading.Thread(target=hold, args=(name + str(number), gate, ready)))
    threads[-1].start()
    ready.wait(10)
attempt(name + "0")
attempt(name + "unrelated")
gate.set()
for thread in threads:
    thread.join()
held = [AdvisoryLock(engine, name + str(n)).acquire(timeout=5) for n in range(2)]
for one in held:
    one.release()
say("usable")
park()
""")
        for _ in range(6):
            assert script.read_line() == "interrupted"
        assert script.read_line() == "usable"
        eventually(lambda: not waits(admin, name)())
        give(holder, name)
    assert is_free(admin, name)


def test_an_interrupt_in_the_users_connection_leaves_nothing(
    interrupted: Callable[..., Script], name: str, admin: psycopg.Connection[Any]
) -> None:
    """In connect(), at random moments: the lock and the connection are free, and the user's exception comes out."""
    script = interrupted("""
configure(engine, max_lock_connections=3)
strange = []
for number in range(50):
    gun = Gun(dice.random() * 0.012)
    try:
        gun.aim()
        end = time.monotonic() + 5
        while armed[0] and time.monotonic() < end:
            with AdvisoryLock(engine, name).connect(timeout=5) as connection:
                connection.execute(text("SELECT 1"))
                connection.commit()
    except SoftLimit:
        pass
    except Exception as error:
        if type(getattr(error, "orig", None)) is not SoftLimit:  # SQLAlchemy wraps it where it met it in execute()
            strange.append(repr(error))
    armed[0] = False  # what ended the attempt may have come before the shot
    gun.thread.join()
    def try_it():
        try:
            AdvisoryLock(engine, name).acquire(timeout=3).release()
        except BaseException as error:
            strange.append(repr(error))
    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()
    if len(strange) > 2:
        break
say("strange", strange)
park()
""")
    assert script.read_line(60) == "strange []"
    assert is_free(admin, name)


def test_interrupted_openings_do_not_make_the_server_unreachable(
    script: Callable[..., Script], proxy: Proxy, name: str, admin: psycopg.Connection[Any]
) -> None:
    """As many as there are slots are interrupted while the server is slow: the next caller waits, and gets its lock."""
    proxy.black_hole()
    running = script(
        COMMON
        + """
configure(engine, max_lock_connections=3)
for _ in range(3):
    gun = Gun(0.1)
    try:
        gun.aim()
        AdvisoryLock(engine, name).acquire(timeout=20)
    except SoftLimit:
        say("interrupted")
    gun.thread.join()
say("asks")
with AdvisoryLock(engine, name).hold(timeout=20):
    say("holds")
    park()
""",
        "psycopg",
        proxy.dsn,
        name,
    )
    assert [running.read_line() for _ in range(4)] == ["interrupted"] * 3 + ["asks"]
    proxy.heal()
    assert running.read_line() == "holds"
    assert not is_free(admin, name)
    running.kill()
    eventually(lambda: is_free(admin, name))
