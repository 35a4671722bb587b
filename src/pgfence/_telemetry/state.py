"""Read what this process holds and waits for, when metrics are collected."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from pgfence._holds.registry import ManagerRegistry
from pgfence._leases.heartbeat.looks import list_grants
from pgfence._leases.heartbeat.service import HeartbeatService
from pgfence._leases.manager import LeaseManager
from pgfence._locks.manager import LockManager
from pgfence._process.clock import clock
from pgfence._process.lifecycle import MUTEX, PROCESS
from pgfence._telemetry import metrics
from pgfence.config import config_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sqlalchemy.engine.interfaces import Dialect

    from pgfence._holds.hold import BaseHold
    from pgfence._telemetry.metrics import Metric
    from pgfence._telemetry.prefixes import Prefixes


class DialectOnly(NamedTuple):
    """A dialect that is passed in place of its engine."""

    dialect: Dialect


class GaugeValue(NamedTuple):
    """One value of a gauge, with the values of the metric's attributes except the database."""

    metric: Metric
    values: tuple[str, ...]
    value: float


def read_state(dialect: Dialect, prefixes: Prefixes, seen: set[object]) -> Iterator[GaugeValue]:
    """Yield the state of an engine and its `lock_engine` in this process, without sending a statement.

    Managers in `seen` are skipped, and those that are read are added to it.
    """
    managers = list(_list_managers(dialect))
    other = config_of(DialectOnly(dialect)).lock_engine
    if callable(other):
        # The application's function may need a context that the exporter's thread does not have.
        with suppress(Exception):
            managers += _list_managers(other().dialect)
    elif other is not None:
        managers += _list_managers(other.dialect)
    ages: dict[tuple[str, str], list[float]] = {}
    for each in managers:
        if each in seen:
            continue
        seen.add(each)
        if isinstance(each, HeartbeatService):
            _add_ages(ages, list_grants(each), prefixes)
        elif isinstance(each, (LockManager, LeaseManager)):
            if isinstance(each, LockManager):
                holds = [session.hold for session in list(each.pool.sessions)]
                _add_ages(ages, [hold for hold in holds if hold is not None], prefixes)
            yield from _read_manager(each)
    kinds: dict[str, int] = {}
    for (kind, prefix), found in ages.items():
        kinds[kind] = kinds.get(kind, 0) + len(found)
        yield GaugeValue(metrics.HOLD_AGE, (kind, prefix), max(found))
    for kind, count in kinds.items():
        yield GaugeValue(metrics.HELD, (kind,), count)


def _list_managers(dialect: Dialect) -> Iterator[object]:
    found = list(vars(dialect).get(ManagerRegistry.ATTRIBUTE, {}).values())
    return (each for each in found if each.pid == PROCESS.pid)


def _add_ages(ages: dict[tuple[str, str], list[float]], holds: Iterable[BaseHold], prefixes: Prefixes) -> None:
    now = clock()
    for hold in holds:
        key = hold.get_details()[0], prefixes.find(hold.names[0])
        ages.setdefault(key, []).append(now - hold.since)


def _read_manager(manager: LockManager | LeaseManager) -> Iterator[GaugeValue]:
    pool, name = manager.pool, manager.family if isinstance(manager, LeaseManager) else "session"
    with MUTEX:
        waiting = manager.queue.count_waiting()
        idle = len(pool.state.idle)
        used = pool.state.open - idle
    yield GaugeValue(metrics.WAITERS, (name,), waiting)
    yield GaugeValue(metrics.CONNECTIONS, (name, "idle"), idle)
    yield GaugeValue(metrics.CONNECTIONS, (name, "used"), used)
    yield GaugeValue(metrics.CONNECTIONS_MAX, (name,), pool.state.limit)
    taken, limit = pool.lock_table.use
    if limit:
        yield GaugeValue(metrics.LOCK_TABLE_USAGE, (), taken)
        yield GaugeValue(metrics.LOCK_TABLE_LIMIT, (), limit)
