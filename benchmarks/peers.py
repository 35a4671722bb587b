"""Other libraries, each in its fastest documented use. One that is not installed or has no server states why.

A client locks one name: `acquire` waits, `release` releases, `cycle` does both without contention.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import socket
import subprocess
import warnings
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.place import Place

REDIS = "PGFENCE_BENCH_REDIS"


class Client:
    """One library's lock on one name.

    Attributes:
        polls: the seconds between two attempts of its waiters, if they poll.
    """

    polls = 0.0

    def __init__(self, place: Place, name: str) -> None:
        raise NotImplementedError

    def acquire(self) -> None:
        raise NotImplementedError

    def release(self) -> None:
        raise NotImplementedError

    def cycle(self) -> None:
        self.acquire()
        self.release()

    def close(self) -> None:
        """Do nothing, because nothing is open."""


def dlock(**kwargs: Any) -> type[Client]:
    """sqlalchemy-dlock on one connection in autocommit. With a timeout, its waiters poll once a second."""
    from sqlalchemy_dlock import create_sadlock

    class Dlock(Client):
        polls = 1.0 if "timeout" in kwargs else 0.0

        def __init__(self, place: Place, name: str) -> None:
            self.name = name
            self.engine = sa.create_engine(place.url(), isolation_level="AUTOCOMMIT")
            self.connection = self.engine.connect()

        def acquire(self) -> None:
            self.lock = create_sadlock(self.connection, self.name)
            self.lock.acquire(**kwargs)

        def release(self) -> None:
            self.lock.release()

        def cycle(self) -> None:
            lock = create_sadlock(self.connection, self.name)
            lock.acquire(block=False)
            lock.release()

        def close(self) -> None:
            self.connection.close()
            self.engine.dispose()

    return Dlock


def dlock_checkout() -> type[Client]:
    """sqlalchemy-dlock as its README shows it: a connection from the pool, and a `with` block."""
    from sqlalchemy_dlock import create_sadlock

    class Checkout(Client):
        def __init__(self, place: Place, name: str) -> None:
            self.name = name
            self.engine = sa.create_engine(place.url())

        def cycle(self) -> None:
            with self.engine.connect() as connection, create_sadlock(connection, self.name):
                pass

        def close(self) -> None:
            self.engine.dispose()

    return Checkout


def pals(driver: str) -> type[Client]:
    import pals as library

    class Pals(Client):
        def __init__(self, place: Place, name: str) -> None:
            self.name = name
            self.locker = library.Locker("benchmark", place.url(driver).render_as_string(hide_password=False))

        def acquire(self) -> None:
            self.lock = self.locker.lock(self.name)
            self.lock.acquire()

        def release(self) -> None:
            self.lock.release()

        def close(self) -> None:
            self.locker.engine.dispose()

    return Pals


def pglock() -> type[Client]:
    """django-pglock with a timeout. Its waiters wait in the server."""
    import pglock as library
    from django.db import connections

    class Pglock(Client):
        def __init__(self, place: Place, name: str) -> None:
            _django(place)
            self.name = name

        def acquire(self) -> None:
            self.lock = library.advisory(self.name, timeout=30)
            self.lock.acquire()

        def release(self) -> None:
            self.lock.release()

        def cycle(self) -> None:
            with library.advisory(self.name, timeout=0):
                pass

        def close(self) -> None:
            connections.close_all()

    return Pglock


def _django(place: Place) -> None:
    """Configure Django once in a process. Its only connection then belongs to this thread."""
    import django
    from django.conf import settings
    from django.db import connections

    url = place.url()
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": url.database,
        "USER": url.username,
        "PASSWORD": url.password,
        "HOST": url.host,
        "PORT": url.port,
        "CONN_MAX_AGE": None,
    }
    if not settings.configured:
        settings.configure(DATABASES={"default": database}, INSTALLED_APPS=["pgactivity", "pglock"], USE_TZ=True)
        django.setup()
    connections["default"].settings_dict.update(database)


def redis_py() -> type[Client]:
    import redis

    class RedisPy(Client):
        polls = 0.1

        def __init__(self, place: Place, name: str) -> None:
            self.name = name
            self.client = redis.Redis(port=redis_port())

        def acquire(self) -> None:
            self.lock: Any = self.client.lock(self.name, timeout=30)
            self.lock.acquire()

        def release(self) -> None:
            self.lock.release()

        def close(self) -> None:
            self.client.close()

    return RedisPy


def python_redis_lock() -> type[Client]:
    import redis_lock

    class PythonRedisLock(redis_py()):  # type: ignore[misc]
        polls = 0.0

        def acquire(self) -> None:
            self.lock = redis_lock.Lock(self.client, self.name, expire=30)
            self.lock.acquire()

    return PythonRedisLock


_redis: subprocess.Popen[bytes] | None = None


def redis_port() -> int:
    """Return the port of a Redis server on this machine: PGFENCE_BENCH_REDIS, or a new server that ends with this process.

    Raises:
        LookupError: there is no server, and redis-server is not installed.
    """
    global _redis  # noqa: PLW0603
    if REDIS not in os.environ:
        program = shutil.which("redis-server")
        if program is None:
            raise LookupError("no redis-server on the PATH")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        words = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        _redis = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        atexit.register(_redis.terminate)
        os.environ[REDIS] = str(port)
        import redis

        from benchmarks.place import wait_until

        wait_until(lambda: _answers(redis.Redis(port=port)))
    return int(os.environ[REDIS])


def _answers(client: Any) -> bool:
    try:
        return bool(client.ping())
    except OSError:
        return False
    except Exception as error:
        if type(error).__name__ == "ConnectionError":
            return False
        raise


PEERS: dict[str, Callable[[], type[Client]]] = {
    "sqlalchemy-dlock, one connection": dlock,
    "sqlalchemy-dlock, timeout=30": lambda: dlock(timeout=30),
    "sqlalchemy-dlock, from the pool": dlock_checkout,
    "pals (psycopg2)": lambda: pals("psycopg2"),
    "pals (psycopg)": lambda: pals("psycopg"),
    "django-pglock": pglock,
    "redis-py": redis_py,
    "python-redis-lock": python_redis_lock,
}


def available(names: tuple[str, ...]) -> tuple[dict[str, type[Client]], dict[str, str]]:
    """Return the peers that can run here, and the reasons why the others cannot."""
    warnings.simplefilter("ignore")
    logging.getLogger("pals").setLevel(logging.CRITICAL)
    found: dict[str, type[Client]] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            if "redis" in name:
                redis_port()
            found[name] = PEERS[name]()
        except (ImportError, LookupError) as error:
            skipped[name] = str(error)
    return found, skipped
