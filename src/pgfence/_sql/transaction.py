"""The statements of a transaction-level advisory lock: request, wait, release.

A transaction-level lock cannot be unlocked. To release what a rejected request has locked, pgfence rolls back to a savepoint or,
if the transaction contains only that request, rolls back the whole transaction.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy.util import immutabledict

from pgfence._sql import pipeline
from pgfence._sql.encoding import translate_text_errors
from pgfence._sql.key_arrays import build_try, encode_keys
from pgfence._sql.params import style_of
from pgfence._sql.postponed import send_postponed
from pgfence._sql.savepoints import mark_sent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, CursorResult
    from sqlalchemy.engine import RootTransaction

    from pgfence._sql.params import ParamStyle, RawConnection
    from pgfence.keys import LockKey

_PLAIN: immutabledict[str, bool | None] = immutabledict({"stream_results": False, "yield_per": None})

_EVENTS = ("before_cursor_execute", "after_cursor_execute", "before_execute", "after_execute", "begin")

_FEW = 16
"""Up to this number, keys are passed as separate parameters, which cost the server less than an array."""

STANDBY = -1
OLD_SNAPSHOT = -2

# The result has one column, because each additional column costs the driver and SQLAlchemy as much time as the server needs for a
# key.
_ANSWER = (
    "SELECT pg_catalog.concat_ws(' ', {0},"
    " pg_catalog.current_setting('statement_timeout'), pg_catalog.current_setting('lock_timeout'))"
)
_SNAPSHOT_IS_OLD = "pg_catalog.current_setting('transaction_isolation') IN ('repeatable read', 'serializable')"
# statement_timeout is set by a separate statement, because a statement cannot change its own time limit. Like lock_timeout, it is
# local to pgfence's savepoint, so that a failed wait leaves both settings unchanged.
_LIFT = "SELECT pg_catalog.set_config('statement_timeout', '0', true)"
# lock_timeout applies to each lock separately, so before each key it is set to the time left. unnest returns the keys in the
# order of the array, bigints before pairs. Counting the keys makes the last line wait for all of them.
_WAIT = """\
WITH a AS MATERIALIZED (SELECT CAST({0} AS bigint) AS milliseconds, CAST({1} AS bigint) AS bigints),
taken AS MATERIALIZED (
 SELECT count(CASE WHEN pg_catalog.set_config('lock_timeout', CASE a.milliseconds WHEN 0 THEN '0' ELSE GREATEST(1, LEAST(
   a.milliseconds, a.milliseconds - (1000 * EXTRACT(epoch FROM
    pg_catalog.clock_timestamp() - pg_catalog.statement_timestamp()))::bigint))::text END, true) IS NULL THEN 'no'
  WHEN k.i <= a.bigints THEN pg_catalog.{lock}(k.value)::text
  ELSE pg_catalog.{lock}((k.value >> 32)::integer, ((k.value << 32) >> 32)::integer)::text END) AS keys
 FROM a CROSS JOIN pg_catalog.unnest(CAST({2} AS bigint[])) WITH ORDINALITY AS k (value, i))
SELECT taken.keys, pg_catalog.set_config('statement_timeout', {3}, true), pg_catalog.set_config('lock_timeout', {4}, true)
FROM taken"""
_SAVEPOINT = "SAVEPOINT pgfence_lock"
_RELEASE = "RELEASE SAVEPOINT pgfence_lock"
_ROLLBACK_TO = "ROLLBACK TO SAVEPOINT pgfence_lock"


class LockResult(NamedTuple):
    """The result of a request, with the settings of the caller's transaction."""

    taken: int
    """The number of keys that were granted, in order, before a rejection; if negative, the reason why no key was tried."""
    statement_timeout: str
    lock_timeout: str


def _list_rejections(stale_snapshot_ok: bool) -> list[str]:
    """Return the CASE branches for the reasons why no key is tried."""
    standby, old_snapshot = f"pg_catalog.pg_is_in_recovery() THEN {STANDBY}", f"{_SNAPSHOT_IS_OLD} THEN {OLD_SNAPSHOT}"
    return [standby] if stale_snapshot_ok else [standby, old_snapshot]


def _name_try(shared: bool) -> str:
    return "pg_try_advisory_xact_lock" + ("_shared" if shared else "")


@lru_cache(maxsize=128)
def _request(style: ParamStyle, spaces: tuple[str, ...], shared: bool, stale_snapshot_ok: bool) -> str:
    marks = iter(f"${n + 1}" if style == "numeric" else "%s" for n in range(2 * len(spaces)))
    # PostgreSQL evaluates the branches of a CASE in order: nothing is locked on a standby, nor after the first rejected key.
    branches = _list_rejections(stale_snapshot_ok)
    for n, space in enumerate(spaces):
        kinds = ("bigint",) if space == "bigint" else ("integer", "integer")
        halves = ", ".join(f"CAST({next(marks)} AS {kind})" for kind in kinds)
        branches.append(f"NOT pg_catalog.{_name_try(shared)}({halves}) THEN {n}")
    return _ANSWER.format(f"CASE WHEN {' WHEN '.join(branches)} ELSE {len(spaces)} END")


@lru_cache(maxsize=8)
def _request_many(style: ParamStyle, shared: bool, stale_snapshot_ok: bool) -> str:
    bigints, keys = ("$1", "$2") if style == "numeric" else ("%s", "%s")
    rejection = f"CASE WHEN {' WHEN '.join(_list_rejections(stale_snapshot_ok))} END"
    taken = "COALESCE(b.rejection, (SELECT pg_catalog.count(*) - 1 FROM t WHERE t.got))"
    return (
        f"WITH RECURSIVE b AS MATERIALIZED (SELECT {rejection} AS rejection,"
        f" {bigints}::bigint AS bigints, {keys}::bigint[] AS keys),"
        f" {build_try(_name_try(shared), 'b.rejection IS NULL')} {_ANSWER.format(taken)} FROM b"
    )


@lru_cache(maxsize=8)
def _wait(style: ParamStyle, shared: bool) -> str:
    marks = [f"${n + 1}" if style == "numeric" else "%s" for n in range(5)]
    return _WAIT.format(*marks, lock="pg_advisory_xact_lock" + ("_shared" if shared else ""))


def _flatten_keys(keys: Sequence[LockKey]) -> tuple[int, ...]:
    found: list[int] = []
    for key in keys:
        found += (key.value,) if key.space == "bigint" else key.halves
    return tuple(found)


def send(connection: Connection, text: str, values: tuple[object, ...] = ()) -> CursorResult[Any]:
    """Send a statement of pgfence in the caller's transaction."""
    send_postponed(connection)
    # A server-side cursor, which the caller's options may request, is not used, because it would turn the statement into a
    # DECLARE.
    with translate_text_errors(connection, values):
        return connection.exec_driver_sql(text, values, execution_options=_PLAIN)


def send_quick(connection: Connection, text: str, values: tuple[object, ...]) -> Any:
    """Send a statement in the caller's transaction, and return its only value, with half the usual work on the client.

    If no listener would miss the statement, it bypasses SQLAlchemy and, where possible, is sent together with BEGIN. Errors are
    raised as SQLAlchemy's errors.
    """
    if is_observed(connection):
        return send(connection, text, values).scalar_one()
    send_postponed(connection)
    adapted: Any = connection.connection.dbapi_connection
    cursor = None
    try:
        if pipeline.may_begin(connection):
            return pipeline.begin_and_execute(connection, text, values)
        cursor = adapted.cursor()
        cursor.execute(text, values)
        answer = cursor.fetchone()[0]
        cursor.close()
    except BaseException as error:
        # SQLAlchemy's handler closes the connection if it is lost, or was interrupted in the middle of a response.
        statement = text if isinstance(error, connection.dialect.loaded_dbapi.Error) else None
        with translate_text_errors(connection, values):
            connection._handle_dbapi_exception(error, statement, values, cursor, None)
        raise
    return answer


def is_observed(connection: Connection) -> bool:
    """Return whether listeners or echo must see the statement, or SQLAlchemy must check whether it may be sent."""
    if connection._has_events or connection.engine._has_events:
        heard = connection.dispatch
        # Only these events count, because SQLAlchemy itself listens for new connections of an engine with execution options.
        if any(getattr(heard, name) for name in _EVENTS):
            return True
    return connection._echo or len(connection.dialect.dispatch.do_execute) > 1 or connection.in_nested_transaction()


def ask(connection: Connection, keys: Sequence[LockKey], *, shared: bool, stale_snapshot_ok: bool) -> LockResult:
    """Try the keys in order and stop at the first that is rejected. This takes one round trip and never waits."""
    style = style_of(connection.dialect)
    values: tuple[object, ...]
    if len(keys) <= _FEW:
        text = _request(style, tuple(key.space for key in keys), shared, stale_snapshot_ok)
        values = _flatten_keys(keys)
    else:
        text = _request_many(style, shared, stale_snapshot_ok)
        values = encode_keys(keys, style)
    taken, statement_timeout, lock_timeout = send_quick(connection, text, values).split(" ")
    mark_sent(connection)
    return LockResult(int(taken), statement_timeout, lock_timeout)


def wait(
    connection: Connection, keys: Sequence[LockKey], answer: LockResult, *, shared: bool, milliseconds: int
) -> None:
    """Wait for the keys in order, inside pgfence's savepoint, and restore the caller's settings, which `answer` contains.

    The time applies to all keys together; 0 milliseconds mean no limit.

    Raises:
        DBAPIError: 55P03 if the time has passed, 40P01 for a deadlock.
    """
    if answer.statement_timeout != "0":
        send(connection, _LIFT)
    values = [key.value for key in keys]
    bigints = sum(key.space == "bigint" for key in keys)
    settings = (answer.statement_timeout, answer.lock_timeout)
    send(connection, _wait(style_of(connection.dialect), shared), (milliseconds, bigints, values, *settings)).one()


def set_savepoint(connection: Connection) -> None:
    """Set a savepoint that SQLAlchemy does not count."""
    send(connection, _SAVEPOINT)


def keep(connection: Connection) -> None:
    """Release pgfence's savepoint. The locks that were taken inside it then belong to the transaction."""
    send(connection, _RELEASE)


def give_back(connection: Connection) -> None:
    """Roll back to pgfence's savepoint and release it."""
    send(connection, _ROLLBACK_TO)
    send(connection, _RELEASE)


def begin_anew(connection: Connection) -> None:
    """End the server's transaction and let the next statement begin another, without ending SQLAlchemy's transaction."""
    # Call it only if nothing but pgfence's own request has run in the transaction and no hook may have sent a statement, or if
    # the transaction cannot commit anyway.
    connection.dialect.do_rollback(connection.connection)


def has_hooks(connection: Connection) -> bool:
    """Return whether a hook runs before each statement. Such a hook may send another statement first."""
    return bool(connection.dispatch.before_cursor_execute)


class DriverState(NamedTuple):
    """The state of a driver's connection, known without a round trip."""

    autocommit: bool
    pipeline: bool
    idle: bool
    """Whether the server is outside any transaction."""


def read_driver_state(connection: Connection) -> DriverState:
    adapted = connection.connection.dbapi_connection
    assert adapted is not None
    driver: RawConnection = connection.dialect.get_driver_connection(adapted)
    match connection.dialect.driver:
        case "asyncpg":
            pipeline, idle = False, not driver.is_in_transaction()
        case "psycopg2":
            pipeline, idle = False, driver.info.transaction_status == 0
        case _:
            pipeline, idle = driver.pgconn.pipeline_status != 0, driver.pgconn.transaction_status == 0
    return DriverState(adapted.autocommit, pipeline, idle)


class Stay(NamedTuple):
    """A transaction that must not end before a block ends."""

    connection: Connection
    root: RootTransaction | None

    @classmethod
    def of(cls, connection: Connection) -> Stay:
        return cls(connection, connection.get_transaction())

    def has_ended(self) -> bool:
        """Return whether the transaction has ended, as far as SQLAlchemy and the driver know, without a round trip."""
        connection, root = self
        if connection.closed or connection.invalidated or root is None or connection.get_transaction() is not root:
            return True
        return not root.is_active or read_driver_state(connection).idle
