"""Read the state of an engine's server, and run all checks on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, overload

from pgfence._admin.connection import run_on_engine, translate_statement_error
from pgfence._admin.doctor import activity, cluster, connection, installation, settings
from pgfence._admin.doctor.connection import check_version
from pgfence._admin.doctor.environment import check_environment
from pgfence._admin.doctor.finding import CATALOGUE, Examined
from pgfence._api.inputs import find_lock_engine, is_async_engine
from pgfence._connections.connect import detect_pooler
from pgfence._sql.addresses import describe_server, read_host_list
from pgfence._sql.diagnosis import read_snapshot, read_version
from pgfence._sql.errors import translate_error
from pgfence._sql.params import style_of
from pgfence._sql.storage import table_names_of
from pgfence.config import config_of
from pgfence.errors import PgfenceError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._admin.doctor.finding import Finding
    from pgfence._process.coroutines import Coro

_CHECKS = (*connection.CHECKS, *settings.CHECKS, *installation.CHECKS, *activity.CHECKS, *cluster.CHECKS)
R = TypeVar("R")
_SEVERITIES = ("error", "warning", "info")
_ORDER = list(CATALOGUE)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of an examination.

    Attributes:
        server: the host and the database.
        version: the version of the server.
        role: the role whose rights and settings were examined.
        findings: the findings, the most severe first.
        checked: the codes of all checks that ran.
    """

    server: str
    version: str
    role: str
    findings: Sequence[Finding]
    checked: Sequence[str]


@overload
def examine(engine: AsyncEngine, alembic_ini: Path | None, select: Callable[[Diagnosis], R]) -> Coro[R]: ...
@overload
def examine(engine: Engine, alembic_ini: Path | None, select: Callable[[Diagnosis], R]) -> R: ...
def examine(engine: Engine | AsyncEngine, alembic_ini: Path | None, select: Callable[[Diagnosis], R]) -> object:
    """Examine the server, and the Alembic environment if its ini file is given. For an AsyncEngine, return a coroutine.

    `select` returns the wanted part of the diagnosis.
    """
    config, place = config_of(engine), table_names_of(engine)
    style_of(engine.dialect)
    lock_engine, lock_config = find_lock_engine(engine, config)
    server = describe_server(_unwrap(engine))
    environment = [] if alembic_ini is None else list(check_environment(alembic_ini))

    def work(connection: Connection) -> Diagnosis:
        version, number, role = read_version(connection)
        if old := list(check_version(version, number)):
            return Diagnosis(server, version, role, old, ["server-version"])
        snapshot = read_snapshot(connection, place)
        # If a pooler has only one server session, the connections that the next line opens would wait for this transaction.
        connection.rollback()
        pooler = detect_pooler(_unwrap(lock_engine))
        hosts = [read_host_list(_unwrap(one)) for one in (engine, lock_engine)]
        examined = Examined(snapshot, config, lock_config.pooler, place, pooler, hosts)
        found = [finding for check in _CHECKS for finding in check(examined)]
        found += environment
        found.sort(key=lambda one: (_SEVERITIES.index(one.severity), _ORDER.index(one.code)))
        checked = [code for code in _ORDER if alembic_ini is not None or not code.startswith("alembic-")]
        return Diagnosis(server, version, role, found, checked)

    return run_on_engine(engine, lambda connection: select(work(connection)), _translate)


def _unwrap(engine: Engine | AsyncEngine) -> Engine:
    return engine.sync_engine if is_async_engine(engine) else engine


def _translate(engine: Engine, error: Exception) -> PgfenceError | None:
    if isinstance(error, PgfenceError):
        return None
    return translate_error(error, None, engine=engine) or translate_statement_error(engine, error)
