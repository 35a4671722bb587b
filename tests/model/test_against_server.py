"""The same schedules against the functions in a real server, whose clock the schedule sets."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from model.machine import Model
from model.schedule import Schedule
from pgfence._sql.storage import TableNames, read_functions
from pgfence._sql.tables import build_creation
from support.lease_functions import Caller

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

LENGTH = 200
SCHEDULES = 50
START = datetime(2030, 1, 1, tzinfo=UTC)
KEY = 5_000_000_000
_TIMELINE = "pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8)"
SETTINGS = {
    "pg_catalog.clock_timestamp()": "pg_catalog.current_setting('model.clock')::timestamptz",
    f"('x' || {_TIMELINE})::bit(32)::integer": "pg_catalog.current_setting('model.timeline')::integer",
}
TABLES = (("lease", "name"), ("gate", "resource"))


@dataclass(slots=True)
class Both:
    """Asks the model and the server, and insists on one answer."""

    caller: Caller
    locker: Caller
    """The session that locks."""
    model: Model = field(default_factory=Model)
    clock: float = 0
    kept: tuple[Any, Any] = (None, None)

    @property
    def timeline(self) -> int:
        return self.model.timeline

    def acquire(
        self, lease: str, ttl: float, min_hold: float, lock_delay: float, max_hold: float | None
    ) -> tuple[bool, int, float]:
        meant = self._model().acquire(lease, ttl, min_hold, lock_delay, max_hold)
        found = self.caller.acquire(ttl, min_hold=min_hold, lock_delay=lock_delay, max_hold=max_hold, lease=lease)
        return self._same(meant, (found.granted, found.token, found.remaining))

    def renew(self, lease: str, token: int, ttl: float) -> tuple[str, float]:
        meant = self._model().renew(lease, token, ttl)
        outcome, *rest = self.caller.renew(ttl, lease=lease, token=token)
        return self._same(meant, ("ok", rest[1]) if outcome == "ok" else (rest[0], 0))

    def release(self, lease: str, token: int) -> str:
        return self._same(self._model().release(lease, token), self.caller.release(lease=lease, token=token))

    def forget(self, lease: str) -> bool:
        return self._same(self._model().forget(lease), self.caller.forget(lease))

    def adopt(self, lease: str, token: int, new: str) -> tuple[str, float]:
        meant = self._model().adopt(lease, token, new)
        found = self.caller.adopt(lease, token, new)
        return self._same(meant, (found.outcome, found.remaining or 0))

    def evict(self) -> tuple[int, int] | None:
        meant, found = self._model().evict(), self.caller.evict()
        return self._same(meant, None if found is None else (found.evicted, found.newest))

    def lock(self) -> int | None:
        # A session that holds a lock gets it again.
        who = self.caller if self.model.locked else self.locker
        meant = self._model().lock()
        return self._same(meant, who.lock(KEY))

    def unlock(self) -> None:
        self.model.unlock()
        self.locker.one("SELECT pg_advisory_unlock_all()")

    def save(self) -> None:
        self.model.save()
        self.kept = tuple(
            self.caller.one(
                f"SELECT to_jsonb(t) FROM {self.caller.place}{table} AS t WHERE {key} = %s", self.caller.name
            )
            for table, key in TABLES
        )

    def go_back(self, timeline: int) -> None:
        self.model.go_back(timeline)
        self.locker.one("SELECT pg_advisory_unlock_all()")
        for (table, key), kept in zip(TABLES, self.kept, strict=True):
            name = f"{self.caller.place}{table}"
            self.caller.connection.execute(f"DELETE FROM {name} WHERE {key} = %s", [self.caller.name])
            if kept is not None:
                rows = f"INSERT INTO {name} SELECT (jsonb_populate_record(NULL::{name}, %s::jsonb)).*"
                self.caller.connection.execute(rows, [json.dumps(kept[0])])

    def enter(self, token: int) -> int | None:
        meant = self._model().enter(token)
        try:
            self.caller.enter(token)
        except psycopg.Error as error:
            found = json.loads(error.diag.message_detail or "")["newest"]
        else:
            found = None
        return self._same(meant, found)

    def _model(self) -> Model:
        """Return the model, both clocks and timelines set."""
        self.model.clock = self.clock
        now = (START + timedelta(seconds=self.clock)).isoformat()
        for who in (self.caller, self.locker):
            for setting, value in (("model.clock", now), ("model.timeline", str(self.timeline))):
                who.connection.execute("SELECT set_config(%s, %s, false)", [setting, value])
        return self.model

    def _same(self, meant: T, found: Any) -> T:
        assert type(meant) is type(found)
        assert meant == (tuple(map(rounded, found)) if isinstance(found, tuple) else found), f"{meant} is {found} there"
        return meant


def rounded(value: Any) -> Any:
    """Return what the server computed, which is exact to a microsecond, in the model's quarters of a second."""
    return round(value * 4, 3) / 4 if isinstance(value, float) else value


def with_settings(function: str) -> str:
    """Return a function that reads clock and timeline from settings."""
    for text, setting in SETTINGS.items():
        function = function.replace(text, setting)
    return function


@pytest.fixture(scope="module")
def set_clock(dsn: str) -> str:
    """Tables and functions that read clock and timeline from settings. Returns their prefix, schema and all."""
    functions = "".join(read_functions(TableNames("model")).values())
    assert all(text in functions for text in SETTINGS)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in build_creation(TableNames("model")):
            connection.execute((with_settings(statement) if "FUNCTION" in statement else statement).encode())
    return "model.pgfence_"


@pytest.fixture
def callers(dsn: str, name: str, set_clock: str) -> Iterator[Any]:
    """A function that returns two callers of a name nobody had yet, always on the same connections."""
    with Caller(dsn, name, set_clock) as caller, Caller(dsn, name, set_clock) as locker:
        numbers = iter(range(1_000_000))

        def next_name() -> tuple[Caller, Caller]:
            caller.name = locker.name = f"{name} {next(numbers)}"
            locker.one("SELECT pg_advisory_unlock_all()")
            return caller, locker

        yield next_name


_SETTINGS = settings(
    max_examples=SCHEDULES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    phases=(Phase.explicit, Phase.generate),
)


@_SETTINGS
@given(steps=st.binary(min_size=3 * LENGTH, max_size=3 * LENGTH))
def test_the_server_agrees_with_the_model(callers: Any, steps: bytes) -> None:
    """10,000 steps: each function gives the model's answer, whatever came before, and every promise holds."""
    schedule = Schedule(Both(*callers()))
    for at in range(0, len(steps), 3):
        schedule.step(*steps[at : at + 3])
