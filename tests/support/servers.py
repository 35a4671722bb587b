"""Which PostgreSQL the tests run on: `PGFENCE_TEST_DSN`, a container, the embedded one, or one that is installed.

`PGFENCE_TEST_SERVER` set to `testcontainers` or `embedded` insists on that way. The role of `PGFENCE_TEST_DSN` has to be a
superuser: the tests make databases and roles and end sessions.
"""

from __future__ import annotations

import os
import secrets
import socket
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest
from psycopg import sql

from pgfence.embedded import _binaries
from pgfence.embedded._server import Server
from pgfence.errors import UnreachableError
from pgfence.testing._server import create_database

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pgfence.embedded._process import Mode

DSN = "PGFENCE_TEST_DSN"
IMAGE = "PGFENCE_TEST_IMAGE"
WANTED = "PGFENCE_TEST_SERVER"
Own = TypeVar("Own", bound="OwnServer")
_CONTAINER_OPTIONS = "-c max_connections=200 -c fsync=off -c full_page_writes=off"


@dataclass(frozen=True, slots=True)
class TestServer:
    """A server that is there for the whole run.

    Attributes:
        dsn: how to reach it as a superuser, without a driver's name.
        origin: where it comes from, for the header.
        close: ends it.
    """

    __test__ = False

    dsn: str
    origin: str
    close: Callable[[], None]

    def describe(self) -> str:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            version = connection.execute("SHOW server_version").fetchone()
        return f"PostgreSQL {version[0]} from {self.origin}"


def choose() -> TestServer:
    """Return the server of this run: the first way that works.

    Raises:
        UnreachableError: none does, or not the one that was insisted on.
    """
    wanted = os.environ.get(WANTED)
    if (dsn := os.environ.get(DSN)) and not wanted:
        return TestServer(without_driver(dsn), DSN, lambda: None)
    if wanted != "embedded" and _engine_answers():
        try:
            return _container()
        except Exception as error:  # an engine without the image or the right to use it
            if wanted:
                raise UnreachableError(f"no container could be started: {error}", retryable=False) from error
    elif wanted == "testcontainers":
        raise UnreachableError("no container engine answers", retryable=False)
    return _embedded()


def without_driver(url: str) -> str:
    """Return a SQLAlchemy URL as libpq and the drivers want it."""
    scheme, rest = url.split("://", 1)
    return f"{scheme.split('+')[0]}://{rest}"


def with_database(dsn: str, database: str) -> str:
    """Return the DSN of another database on the same server."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{database}"))


def _embedded() -> TestServer:
    server = Server(fsync=False, settings={"max_connections": "200"})
    server.start()
    return TestServer(without_driver(server.url), f"the embedded launcher ({server.bindir})", server.close)


def _container() -> TestServer:
    import docker
    from testcontainers.community.postgres import PostgresContainer

    image = os.environ.get(IMAGE, "postgres:17")
    with closing(docker.from_env(timeout=30)) as client:
        try:
            client.images.get(image)
        except docker.errors.ImageNotFound:
            client.images.pull(image)
    container = PostgresContainer(image, driver="psycopg").with_command(f"postgres {_CONTAINER_OPTIONS}").start()
    return TestServer(without_driver(container.get_connection_url()), f"testcontainers ({image})", container.stop)


def _engine_answers() -> bool:
    """Ask for the engine's socket only: a client alone is no engine, and asking it would take seconds."""
    where = urlsplit(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    try:
        if where.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(1)
                probe.connect(where.path)
        else:
            socket.create_connection((where.hostname or "", where.port or 2375), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def database(dsn: str, label: str) -> Iterator[str]:
    """Make a database for one worker of one run, yield its DSN, and drop it."""
    with create_database(dsn, label) as url:
        yield without_driver(url)


@contextmanager
def role(admin: psycopg.Connection[Any], dsn: str, settings: Mapping[str, str]) -> Iterator[str]:
    """Make a login role with its own settings, yield its DSN, and drop it with its sessions."""
    name, password = f"pgfence_role_{secrets.token_hex(6)}", secrets.token_hex(12)
    quoted = sql.Identifier(name)
    admin.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(quoted, password))
    for setting, value in settings.items():
        admin.execute(sql.SQL("ALTER ROLE {} SET {} = {}").format(quoted, sql.Identifier(setting), value))
    try:
        place = urlsplit(dsn)
        yield urlunsplit(place._replace(netloc=f"{name}:{password}@{place.hostname}:{place.port}"))
    finally:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = %s", [name])
        admin.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(quoted))


class OwnServer(Server):
    """A private server of one test: `stop("immediate")` crashes it, `start()` brings it back on the same port."""

    @property
    def dsn(self) -> str:
        """How to reach it as a superuser, without a driver's name."""
        return without_driver(self.url)

    def restart(self, mode: Mode = "fast") -> None:
        self.stop(mode)
        self.start()


@contextmanager
def own(kind: type[Own] = OwnServer, **kwargs: Any) -> Iterator[Own]:
    """Run a private server; skip the test where there are no binaries for one."""
    try:
        _binaries.find()
    except UnreachableError as error:
        pytest.skip(str(error))
    with closing(kind(**kwargs)) as server:
        server.start()
        yield server
