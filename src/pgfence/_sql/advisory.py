"""The statements of a session-level advisory lock: try, wait, unlock."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pgfence._sql import activity
from pgfence._sql.errors import ErrorContext
from pgfence._sql.key_arrays import KEYS, build_try, call_on_nth, call_on_row, encode_keys
from pgfence._sql.ticket_queue import HAS_TICKETS, find_queue

if TYPE_CHECKING:
    from collections.abc import Hashable

    from sqlalchemy import Connection

    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.keys import LockKey
    from pgfence.types import Holder


# The statement locks nothing if it is executed by a server process other than the expected one, because behind a pooler in
# transaction mode that process would keep the lock.
_TRY_ONE = (
    "SELECT CASE WHEN pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {1}::integer"
    " THEN pg_catalog.pg_try_advisory_lock(CAST({2} AS bigint)) END"
)
# The statement waits for the transaction-level lock, limited by lock_timeout. The session-level lock comes after it and cannot
# wait any more, so SQLSTATE 55P03 proves that nothing is held, which pg_advisory_lock alone under a lock_timeout does not. If the
# time ends at the moment of the grant, the server raises the error only when it next checks for interrupts, and pg_sleep(0) makes
# it do so before the session-level lock. A timeout of the statement writes an ERROR line to the server's log, so only the first
# slice of a wait uses this statement, and only while no waiter has a ticket.
_WAIT_ONE = (
    "SELECT pg_catalog.set_config('lock_timeout', {1}, true),"
    " pg_catalog.pg_advisory_xact_lock(CAST({2} AS bigint)), pg_catalog.pg_sleep(0),"
    " pg_catalog.pg_advisory_lock(CAST({3} AS bigint))"
    f" WHERE NOT {HAS_TICKETS.format('{4}')}"  # The condition is evaluated before anything is locked, because it uses no columns.
)
_UNLOCK_ONE = "SELECT pg_catalog.pg_advisory_unlock(CAST({1} AS bigint))"


# Keys that were locked before a rejection are unlocked in the same statement.
_TRY_MANY = (
    "WITH RECURSIVE b AS MATERIALIZED (SELECT pg_catalog.pg_backend_pid() OPERATOR(pg_catalog.=) {1}::integer AS mine,"
    " {2}::bigint AS bigints, {3}::bigint[] AS keys),"
    f" {build_try('pg_try_advisory_lock', 'b.mine')},"
    " d AS MATERIALIZED (SELECT pg_catalog.count(*) - 1 AS asked, pg_catalog.bool_and(got) AS got FROM t)"
    " SELECT CASE WHEN d.asked > 0 THEN d.got END,"
    f" (SELECT pg_catalog.count({call_on_nth('pg_advisory_unlock', 't.i')}) FROM t WHERE NOT d.got AND t.got AND t.i > 0) FROM d"
)
# All transaction-level locks come before the first session-level one. If the locks were taken key by key, a timeout would leave
# some of the session-level locks held. The counts make each phase depend on the one before, because PostgreSQL never runs a CTE
# that is not referenced.
_WAIT_MANY = (
    "WITH s AS MATERIALIZED (SELECT pg_catalog.set_config('lock_timeout', {1}, true) AS set"
    f" WHERE NOT {HAS_TICKETS.format('{2}')}),"
    " k AS MATERIALIZED (" + KEYS.format("{3}", "{4}") + " ORDER BY i),"
    f" x AS MATERIALIZED (SELECT {call_on_row('pg_advisory_xact_lock')} FROM s, k WHERE s.set IS NOT NULL),"
    " n AS MATERIALIZED (SELECT pg_catalog.count(*) AS taken FROM x)"
    # The result is one row, because a driver that fetches only the first of several rows would not take the other locks.
    f" SELECT pg_catalog.count({call_on_row('pg_advisory_lock')}) FROM n, k WHERE n.taken > 0"
)
_UNLOCK_MANY = (
    f"SELECT pg_catalog.bool_and({call_on_row('pg_advisory_unlock')}) FROM (" + KEYS.format("{1}", "{2}") + ") AS k"
)


class LockTexts(NamedTuple):
    """The texts of the lock's statements, for one parameter style."""

    try_one: str
    wait_one: str
    unlock_one: str
    try_many: str
    wait_many: str
    unlock_many: str


def _build_texts(style: ParamStyle) -> LockTexts:
    marks = [f"${n}" if style == "numeric" else "%s" for n in range(5)]
    parts = (_TRY_ONE, _WAIT_ONE, _UNLOCK_ONE, _TRY_MANY, _WAIT_MANY, _UNLOCK_MANY)
    return LockTexts(*(part.format(*marks) for part in parts))


_TEXTS: dict[ParamStyle, LockTexts] = {"format": _build_texts("format"), "numeric": _build_texts("numeric")}


class LockSql:
    """The statements of a lock on one set of sorted, distinct keys, in the parameter style of one driver."""

    __slots__ = (
        "_base",
        "_one",
        "_texts",
        "_values",
        "keys",
        "places",
        "style",
        "try_text",
        "unlock_args",
        "unlock_text",
    )

    context = ErrorContext(
        deadlock="PostgreSQL ended this wait to resolve a deadlock: try again",
        fewer_locks="hold fewer locks at a time",
    )

    kind = "advisory"
    once_only = "a session lock is not re-entrant. Pass the handle on, or use one lock with many names"
    hands_over = True
    """Whether a holder may hand the lock over to the next waiter of its process."""
    shared = False
    """Whether several contenders may hold the lock at once."""

    def __init__(self, keys: tuple[LockKey, ...], style: ParamStyle) -> None:
        self.keys = keys
        self.style: ParamStyle = style
        self.places: tuple[Hashable, ...] = tuple([k._value if k._space == "bigint" else (k._value,) for k in keys])
        """The keys as plain values, which are cheap to hash."""
        self._texts = _TEXTS[style]
        self._base: int | None = None
        self._one = len(keys) == 1 and keys[0].space == "bigint"
        self._values: tuple[object, ...]
        if self._one:
            self._values = (keys[0].value,)
            self.unlock_text = self._texts.unlock_one
        else:
            self._values = encode_keys(keys, style)
            self.unlock_text = self._texts.unlock_many
        self.try_text = self._texts.try_one if self._one else self._texts.try_many
        """Try the keys; the parameters are the backend's pid and the keys.

        The result is true (all held), false (none held) or null (another server process executed it; none held)."""
        self.unlock_args: tuple[object, ...] = self._values

    @property
    def row(self) -> tuple[TableNames, str] | None:
        """None, because a lock without a token uses no row of the lease table."""
        return None

    def holders(self, connection: Connection) -> list[Holder]:
        """Return the holders of these keys, in one round trip."""
        return activity.find_holders(connection, self.keys)

    @property
    def wait_text(self) -> str:
        """The statement that waits in the server's own queue until it holds all keys, or fails with 55P03 and holds none.

        If waiters of other processes have tickets, it returns no row, or 0, and locks nothing.
        """
        return self._texts.wait_one if self._one else self._texts.wait_many

    @property
    def try_args(self) -> tuple[object, ...]:
        """The parameters of `try_text` that follow the backend's pid."""
        return self.unlock_args

    def wait_args(self, milliseconds: int) -> tuple[object, ...]:
        if self._one:
            return (str(milliseconds), *self._values, *self._values, self.base)
        return (str(milliseconds), self.base, *self._values)

    @property
    def base(self) -> int:
        """The number at which the tickets of this lock's queue begin."""
        if self._base is None:
            self._base = find_queue(self.keys)
        return self._base
