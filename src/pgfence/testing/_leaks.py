"""Find the locks that a test has left behind, with their names and holders."""

from __future__ import annotations

import gc
import textwrap
import time
from typing import TYPE_CHECKING, NamedTuple

from pgfence._sql import testing as statements
from pgfence._sql.storage import TableNames
from pgfence.keys import LockKey, unqualify_name
from pgfence.types import Holder

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from datetime import datetime

    from sqlalchemy import Connection, Engine

PATIENCE = 2.0
"""Seconds to wait for releases that are still under way, such as the release of a dropped handle."""
_PAUSE = 0.01
_PLACE = TableNames()


class LockRow(NamedTuple):
    """An advisory lock that a session holds or waits for; the fields are those of `READ_LOCKS`."""

    value: int
    space: int
    mode: str
    granted: bool
    backend_pid: int | None
    application_name: str | None
    host: str | None
    since: datetime | None
    state: str | None
    query: str | None

    @property
    def identity(self) -> Hashable:
        return self[:5]

    def describe(self, names: Mapping[tuple[int, str], str]) -> str:
        """Return the lock and its session in words."""
        space = "bigint" if self.space == 1 else "pair"
        key = LockKey.raw(self.value) if space == "bigint" else LockKey.pair(*LockKey.raw(self.value).halves)
        name = names.get((self.value, space))
        what = key.label if name is None else f"{name!r} ({key.label})"
        holder = Holder(
            name,
            key,
            "advisory",
            host=self.host,
            backend_pid=self.backend_pid,
            application_name=self.application_name or None,
            since=self.since,
        )
        shared = "shared " if self.mode == "ShareLock" else ""
        verb = "held" if self.granted else "still waited for"
        query = textwrap.shorten(self.query or "", 100, placeholder=" ...")
        last = f", and its last statement was: {query}" if query else ""
        session = "" if self.state is None else f"; the session is {self.state}{last}"
        return f"{shared}advisory lock {what}, {verb} by {holder}{session}"


class LeaseRow(NamedTuple):
    """A lease that is held; the fields are those of `build_lease_query`."""

    name: str
    kind: str | None
    owner: str | None
    host: str | None
    pid: int | None
    backend_pid: int | None
    purpose: str | None
    token: int
    since: datetime
    expires_at: datetime

    @property
    def identity(self) -> Hashable:
        return self.name, self.token

    def describe(self, _names: object) -> str:
        """Return the lease and its holder in words."""
        process = "" if self.pid is None else f", process {self.pid}"
        holder = Holder(None, None, "lease", owner=self.owner, host=self.host, since=self.since)
        return f"{self.kind or 'lease'} {unqualify_name(self.name)!r}, held by {holder}{process}"


def find_locks(connection: Connection) -> list[LockRow]:
    """Return the advisory locks that are held or waited for in the connection's database."""
    return [LockRow(*row) for row in connection.execute(statements.READ_LOCKS)]


def find_leases(connection: Connection) -> list[LeaseRow]:
    """Return the leases of all kinds that are held, in the tables with the default schema and prefix."""
    if not connection.execute(statements.HAS_TABLE, {"table": _PLACE.name("lease")}).scalar_one():
        return []
    return [LeaseRow(*row) for row in connection.execute(statements.build_lease_query(_PLACE))]


def find_names(connection: Connection) -> dict[tuple[int, str], str]:
    """Return the names that are stored in the database, and those of the keys that this process has computed."""
    names: dict[tuple[int, str], str] = {}
    if connection.execute(statements.HAS_TABLE, {"table": _PLACE.name("lock_name")}).scalar_one():
        rows = connection.execute(statements.build_name_query(_PLACE))
        names |= {(key, "bigint"): unqualify_name(name) for key, name in rows}
    # This is slow, and runs only if a test fails. The database does not contain the names of all locks.
    keys = [each for each in gc.get_objects() if type(each) is LockKey]
    return names | {(key.value, key.space): key.name for key in keys if key.name is not None}


class LeakCheck:
    """A comparison of the locks after a test with those before it."""

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.execution_options(isolation_level="AUTOCOMMIT").connect()
        self._before = {row.identity for row in self._look()}

    def finish(self) -> str:
        """Wait for releases that are under way, and return a description of the locks that are left, or an empty text."""
        with self._connection:
            end = time.monotonic() + PATIENCE
            while left := [row for row in self._look() if row.identity not in self._before]:
                if time.monotonic() > end:
                    names = find_names(self._connection)
                    return "the test left behind:\n" + "\n".join(f"- {row.describe(names)}" for row in left)
                time.sleep(_PAUSE)
        return ""

    def _look(self) -> list[LockRow | LeaseRow]:
        return [*find_locks(self._connection), *find_leases(self._connection)]
