"""Describe the server that an engine connects to, and read the engine's list of hosts."""

from __future__ import annotations

import inspect
import os
import weakref
from typing import TYPE_CHECKING, NamedTuple

from pgfence._process.callbacks import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sqlalchemy import Engine
    from sqlalchemy.engine.interfaces import Dialect

DEFAULT = "the default host"
CREATOR = "the host to which the engine's creator function connects"
# Environment variables that libpq uses if a parameter is not given. asyncpg reads most of them too.
_VARIABLES = {
    "host": "PGHOST",
    "hostaddr": "PGHOSTADDR",
    "port": "PGPORT",
    "service": "PGSERVICE",
    "connect_timeout": "PGCONNECT_TIMEOUT",
    "target_session_attrs": "PGTARGETSESSIONATTRS",
}
_WARNED: weakref.WeakSet[Dialect] = weakref.WeakSet()


class HostList(NamedTuple):
    """The hosts that an engine's driver tries, in order, and the driver parameters that matter for a failover.

    A parameter that is not given is the empty string.
    """

    driver: str
    hosts: tuple[str, ...]
    connect_timeout: str
    target_session_attrs: str
    tcp_user_timeout: str
    keepalives_idle: str


def describe_server(engine: Engine) -> str:
    """Return the hosts, ports and database of an engine, for messages. The result never includes the user or the password."""
    given = _read_parameters(engine)
    database = engine.url.database or given.get("dbname") or given.get("database")
    return ",".join(_list_hosts(given)) + (f"/{database}" if database else "")


def read_host_list(engine: Engine) -> HostList:
    """Return the hosts of an engine. Hosts in a service file, or in the application's own creator, are not known."""
    given = _read_parameters(engine)
    return HostList(
        engine.dialect.driver,
        tuple(_list_hosts(given)),
        str(_read_parameter(given, "connect_timeout") or ""),
        str(_read_parameter(given, "target_session_attrs") or ""),
        str(given.get("tcp_user_timeout") or ""),
        str(given.get("keepalives_idle") or ""),
    )


def warn_of_slow_hosts(engine: Engine) -> None:
    """Log one warning if an engine has several hosts and no time limit for connecting to one that hangs."""
    if engine.dialect in _WARNED:
        return
    _WARNED.add(engine.dialect)
    given = _read_parameters(engine)
    hosts = _list_hosts(given)
    if len(hosts) < 2 or _read_parameter(given, "connect_timeout") or given.get("timeout"):
        return
    listed = ",".join(hosts)
    if engine.dialect.driver == "asyncpg":
        log.warning(
            "the engine has several hosts (%s), and asyncpg applies one time limit of 60 s to all of them together: while one"
            " host hangs, the next may not be tried in time, and leases are lost. Use a proxy such as HAProxy, or an"
            " async_creator that tries the hosts one by one",
            listed,
        )
        return
    log.warning(
        "the engine has several hosts (%s) and no connect_timeout: while one host hangs, the next is not tried, and leases are"
        " lost. Add connect_timeout=2 to the URL",
        listed,
    )


def _read_parameters(engine: Engine) -> Mapping[str, object]:
    """Return the parameters that the driver is called with, from the URL and from `connect_args`."""
    # Only the closure of the pool's creator contains the connect_args.
    creator = getattr(engine.pool, "_creator", None)
    known = inspect.getclosurevars(creator).nonlocals.get("cparams") if inspect.isfunction(creator) else None
    if isinstance(known, dict):
        return known
    # An application's own creator may use the URL or ignore it.
    parameters: Mapping[str, object] = {"host": CREATOR, **engine.dialect.create_connect_args(engine.url)[1]}
    return parameters


def _read_parameter(given: Mapping[str, object], name: str) -> object:
    return given.get(name) or os.environ.get(_VARIABLES[name])


def _list_hosts(given: Mapping[str, object]) -> list[str]:
    hosts = _split_list(given.get("host") or given.get("hostaddr"))
    if not hosts and (service := _read_parameter(given, "service")):
        return [f"service {service}"]
    hosts = hosts or _split_list(_read_parameter(given, "host") or _read_parameter(given, "hostaddr"))
    ports = [] if hosts == [CREATOR] else _split_list(_read_parameter(given, "port"))
    if len(ports) == 1:
        ports *= max(1, len(hosts))
    places = [f"[{host}]" if ":" in host else host for host in hosts] or [DEFAULT]
    return [f"{host}:{ports[n]}" if n < len(ports) and ports[n] else host for n, host in enumerate(places)]


def _split_list(value: object) -> list[str]:
    if value is None:
        return []
    return [str(each) for each in value] if isinstance(value, (list, tuple)) else str(value).split(",")
