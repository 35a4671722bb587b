"""The server functions of leases, gates and tokens, called directly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

import psycopg
from psycopg.rows import namedtuple_row

from pgfence._sql.storage import TableNames
from pgfence._sql.tables import build_creation

if TYPE_CHECKING:
    from collections.abc import Sequence


def install_with_clock(connection: psycopg.Connection[Any], schema: str, clock: str) -> None:
    """Make tables and functions in a separate schema, whose functions read the time from another expression."""
    for text in build_creation(TableNames(schema)):
        own = text.replace("pg_catalog.clock_timestamp()", clock) if "FUNCTION" in text else text
        connection.execute(own.encode())


class Caller:
    """A caller of the functions for one name, on a separate connection.

    Attributes:
        old: call the functions of version 1, as a process of an older release does.
        lease: the id that it uses if none is given.
        token: what its last acquire brought.
    """

    def __init__(self, dsn: str, name: str, place: str = "pgfence_", *, old: bool = False) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True, row_factory=namedtuple_row)
        self.name = name
        self.place = place
        self.old = old
        self.lease = str(uuid4())
        self.token = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    @property
    def pid(self) -> int:
        return self.connection.info.backend_pid

    @property
    def row(self) -> Any:
        """The row of the lease, with `left` and `blocked`: seconds by the server's clock; None if it does not exist."""
        return self.one(
            "SELECT l.*, extract(epoch FROM expires_at - clock_timestamp())::float8 AS left,"
            f" extract(epoch FROM free_at - clock_timestamp())::float8 AS blocked FROM {self.place}lease AS l"
            " WHERE name = %s",
            self.name,
        )

    @property
    def gate(self) -> int | None:
        found = self.one(f"SELECT token FROM {self.place}gate WHERE resource = %s", self.name)
        return None if found is None else found.token

    def one(self, statement: str, *args: object) -> Any:
        return self.connection.execute(statement, args).fetchone()

    def call(self, function: str, *args: object) -> Any:
        """Return the row that a function answers, or None."""
        marks = ", ".join(["%s"] * len(args))
        return self.one(f"SELECT * FROM {self.place}{function}({marks})", *args)

    def acquire(
        self,
        ttl: float = 60,
        *,
        min_hold: float = 0,
        lock_delay: float = 0,
        max_hold: float | None = None,
        lease: str | None = None,
        owner: str = "me",
    ) -> Any:
        function, kind = ("acquire_lease_v1", "") if self.old else ("acquire_lease_v2", ", 'lease'")
        found = self.one(
            f"SELECT * FROM {self.place}{function}(%s, %s, %s, %s, %s, %s, %s, 'here', 7, 'a purpose', '[1]'{kind})",
            *(self.name, lease or self.lease, ttl, min_hold, lock_delay, max_hold, owner),
        )
        if found.granted:
            self.token = found.token
        return found

    def renew(self, ttl: float = 60, *, lease: str | None = None, token: int | None = None) -> list[Any]:
        return self.renew_all([(self.name, lease or self.lease, self.token if token is None else token, ttl)])[0]

    def renew_all(self, leases: Sequence[tuple[str, str, int, float]]) -> list[list[Any]]:
        columns = [list(column) for column in zip(*leases, strict=True)] if leases else [[], [], [], []]
        found = self.one(
            f"SELECT {self.place}renew_leases_v1(%s::text[], %s::text[], %s::bigint[], %s::double precision[])",
            *columns,
        )
        answers: list[list[Any]] = json.loads(found[0])
        return answers

    def release(self, *, lease: str | None = None, token: int | None = None) -> str:
        return str(
            self.call("release_lease_v1", self.name, lease or self.lease, self.token if token is None else token)[0]
        )

    def forget(self, lease: str | None = None) -> bool:
        return bool(self.call("forget_lease_v1", self.name, lease or self.lease)[0])

    def adopt(self, lease: str, token: int, new: str | None = None) -> Any:
        return self.one(
            f"SELECT * FROM {self.place}adopt_lease_v{1 if self.old else 2}(%s, %s, %s, %s, NULL, 'there', 8)",
            *(self.name, lease, token, new or self.lease),
        )

    def evict(self, reason: str = "stuck") -> Any:
        return self.call(f"evict_lease_v{1 if self.old else 2}", self.name, "an operator", reason, '{"ticket": 5}')

    def enter(self, token: int) -> None:
        self.enter_all({self.name: token})

    def enter_all(self, tokens: dict[str, int]) -> None:
        self.one(f"SELECT {self.place}enter_gates_v1(%s::text[], %s::bigint[])", list(tokens), list(tokens.values()))

    def lock(self, key: int, milliseconds: int = 0, *, backend: int | None = None) -> int | None:
        function, who = ("lock_with_token_v1", ()) if self.old else ("lock_with_token_v2", ("here", 7))
        found = self.call(function, backend or self.pid, key, self.name, milliseconds, *who)
        token: int | None = found[0]
        return token
