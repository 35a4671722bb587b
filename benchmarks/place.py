"""The server that a scenario measures, and what can be observed from outside."""

from __future__ import annotations

import os
import platform
import time
from contextlib import closing, contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import psycopg
from sqlalchemy import URL, make_url

from pgfence.embedded._server import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = {"max_connections": "300"}
PACKAGES = ("sqlalchemy", "psycopg", "asyncpg", "psycopg2-binary", "sqlalchemy-dlock", "pals", "django-pglock", "redis")


class Place:
    """A running server on this machine."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def url(self, driver: str = "psycopg") -> URL:
        """Return its URL for SQLAlchemy."""
        return make_url(self._server.url).set(drivername=f"postgresql+{driver}")

    @property
    def dsn(self) -> str:
        """The connection string for a driver, over TCP."""
        return plain(self.url())

    def connect(self, **kwargs: Any) -> psycopg.Connection[Any]:
        """Return a connection in autocommit."""
        return psycopg.connect(self.dsn, autocommit=True, **kwargs)

    def cpu_seconds(self, without: int = 0) -> Cpu:
        """Return the processor time of all its processes so far, except for one."""
        here = psutil.Process(self._server.pid)
        processes = [process for process in (here, *here.children()) if process.pid != without]
        times = [process.cpu_times() for process in processes]
        ticks = sum(each.user + each.system for each in times)
        return Cpu(ticks, sum(map(_scheduled, processes)) if SCHEDSTAT.exists() else ticks)

    def log(self, since: int = 0) -> str:
        """Return its log from a position on."""
        return self._server.log.read_bytes()[since:].decode(errors="replace")

    def log_size(self) -> int:
        return self._server.log.stat().st_size


class Cpu(NamedTuple):
    """Processor time in seconds.

    Attributes:
        ticks: as `top` shows it. Work done between two ticks of the kernel's clock is missed.
        exact: as the scheduler counts it, if available.
    """

    ticks: float
    exact: float


SCHEDSTAT = Path("/proc/self/schedstat")


def _scheduled(process: psutil.Process) -> float:
    return int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def server(*, durable: bool = False, **settings: str) -> Iterator[Place]:
    """Run a server for one scenario. Unless it is durable, it does not sync to disk, because the disk is not measured."""
    with closing(Server(fsync=durable, settings=SETTINGS | settings)) as running:
        running.start()
        yield Place(running)


def called(application: str, driver: str = "psycopg") -> dict[str, Any]:
    """Return connect arguments that give an engine's connections a name on the server."""
    name = {"application_name": application}
    return {"server_settings": name} if driver == "asyncpg" else name


def plain(url: URL) -> str:
    """Return a URL in the format of libpq and asyncpg."""
    return url.set(drivername="postgresql", query={}).render_as_string(hide_password=False)


def wait_until(condition: Any, deadline: float = 30.0) -> Any:
    """Return the result of the condition once it is true. Give up at the deadline."""
    end = time.monotonic() + deadline
    while not (found := condition()):
        if time.monotonic() > end:
            raise TimeoutError(f"{condition} did not become true in {deadline:g} s")
        time.sleep(0.01)
    return found


def machine() -> dict[str, Any]:
    """Describe the machine and the software that the figures depend on."""
    with server() as place, place.connect() as connection:
        (postgresql,) = connection.execute("SELECT current_setting('server_version')").fetchone() or ("?",)
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "postgresql": postgresql,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


RESULTS = Path(__file__).parent / "results"
