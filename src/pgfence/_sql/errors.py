"""Translate database errors into pgfence's exceptions.

Callers pass the purpose of their statement. The SQLSTATE of an error determines its meaning, and its text does so only while
connecting, because libpq passes on no SQLSTATE then.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy.exc import DBAPIError, PendingRollbackError, SQLAlchemyError

from pgfence._sql.addresses import describe_server
from pgfence._sql.encoding import TextError
from pgfence._sql.rights import build_audit_grants, build_grants
from pgfence._sql.sqlstate import (
    CONNECTION_LOST,
    DEADLOCK_DETECTED,
    GATE_TIMEOUT,
    MISSING,
    NO_RIGHT,
    NO_TOKEN,
    OUT_OF_MEMORY,
    OUTCOME_UNKNOWN,
    READ_ONLY,
    STALE_TOKEN,
    SWITCHING,
    sqlstate_of,
)
from pgfence._sql.storage import KEYS, LIMITS, VERSION, quote
from pgfence.errors import (
    CapacityError,
    DeadlockError,
    FenceRequiredError,
    LockTimeoutError,
    PgfenceError,
    SchemaError,
    StaleFencingTokenError,
    StandbyError,
    TransactionStateError,
    UnreachableError,
)
from pgfence.keys import unqualify_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from sqlalchemy import Engine

    from pgfence._sql.storage import TableNames

LOCK_OUTCOME_UNKNOWN = "The state of the lock is unknown"


class ErrorContext(NamedTuple):
    """The purpose of a statement, as far as the meaning of an error depends on it.

    Attributes:
        version: the version of the tables that the statement needs.
        key_rights: the privileges that the statement needs on the table of idempotency keys, if it uses that table.
        on_primary: the advice for a read-only server. If it is empty, an error about a read-only server is not translated.
        read_only: the exception class for a read-only server.
        owner: whether the statement creates or drops objects, for which a GRANT is not enough.
        trigger: whether these objects are triggers, which installing the tables does not create.
        deadlock: the message for a deadlock. If it is empty, a deadlock is not translated.
        fewer_locks: the advice for a full lock table. If it is empty, that error is not translated.
        lock_table: the used entries and the capacity of the lock table.
        audit_rights: the privileges on the audit table, if the statement uses no other table of pgfence.
    """

    version: int = 1
    key_rights: str = "SELECT, INSERT, UPDATE"
    on_primary: str = ""
    read_only: type[StandbyError | TransactionStateError] = StandbyError
    owner: bool = False
    trigger: bool = False
    deadlock: str = ""
    fewer_locks: str = ""
    lock_table: tuple[int, int] = (0, 0)
    audit_rights: str = ""


_NO_CONTEXT = ErrorContext()
FENCE = ErrorContext(
    on_primary="A gate can be entered only where rows can be written. Begin on the primary, in a read-write transaction",
    fewer_locks="enter fewer gates in one transaction",
)


def translate_error(
    error: BaseException,
    place: TableNames | None,
    context: ErrorContext = _NO_CONTEXT,
    engine: Engine | None = None,
) -> PgfenceError | None:
    """Return pgfence's exception for an error of a statement, or None if pgfence has no exception for that error.

    `place` is None if the statement uses no tables of pgfence.
    """
    state = sqlstate_of(error)
    if state == READ_ONLY and context.on_primary:
        where = "this server" if engine is None else describe_server(engine)
        return context.read_only(
            f"{where} rejected a write ({message_of(error)}): it is a standby, or the transaction is read-only, for example because"
            f" of default_transaction_read_only. {context.on_primary}. {SWITCHING}",
            sqlstate=state,
        )
    if state == DEADLOCK_DETECTED and context.deadlock:
        return DeadlockError(context.deadlock, sqlstate=state)
    if state == OUT_OF_MEMORY and context.fewer_locks:
        used, limit = context.lock_table
        advice = f"{context.fewer_locks}, or increase max_locks_per_transaction"
        return CapacityError(f"the server's lock table is full: {advice}", used=used, limit=limit, sqlstate=state)
    if state in (STALE_TOKEN, NO_TOKEN, GATE_TIMEOUT):
        return _translate_rejection(error, state)
    if place is not None and state in MISSING:
        return missing_tables_error(
            place, context.version, state, (None if engine is None else engine.url.database, None)
        )
    if place is not None and state == NO_RIGHT:
        return _denial_error(message_of(error), place, context)
    return None


def raise_translated(
    error: BaseException,
    place: TableNames | None,
    context: ErrorContext = _NO_CONTEXT,
    engine: Engine | None = None,
) -> None:
    """Raise pgfence's exception for an error of a statement. Return if `translate_error` returns None."""
    if told := translate_error(error, place, context, engine):
        raise told from error


def missing_tables_error(place: TableNames, needed: int, state: str | None, row: Sequence[str | None]) -> SchemaError:
    """Return the error for missing tables or functions. `row` is the result of the query `storage.WHERE`, as far as known."""
    return SchemaError(
        f"pgfence's tables or functions are missing or too old {place.describe(*row)}: run `{place.command}`, or call"
        " pgfence.schema.create_all(engine). If they are in another schema or have another prefix, set it with"
        " pgfence.configure(engine, schema=..., prefix=...) or, on the command line, with --schema and --prefix",
        needed=needed,
        command=place.command,
        sqlstate=state,
    )


# Patterns are compiled when they are used: compiling takes longer than importing this module, and few programs see the errors.
_NEEDS_OWNER = "must be owner of |permission denied for (?:relation|table|view) "
_VIEW_OF_SERVER = r"permission denied for (?:relation|table|view) (pg_\w+)"


def _denial_error(said: str, place: TableNames, context: ErrorContext) -> SchemaError:
    if context.owner:
        who = "its owner" if (owned := re.search(_NEEDS_OWNER, said)) else "a role with the missing privilege"
        command = "" if owned or context.trigger else place.command
        again = f"Run `{command}`, or call pgfence.schema.create_all(engine)," if command else "Try again"
        said = f"the call was rejected: {said}. {again} as {who}"
        return SchemaError(said, needed=VERSION, command=command, sqlstate=NO_RIGHT)
    if view := re.search(_VIEW_OF_SERVER, said):
        command = f"GRANT SELECT ON pg_catalog.{view[1]} TO <role>"
        return SchemaError(
            f"the call was rejected: {said}. As a superuser, run: {command}", command=command, sqlstate=NO_RIGHT
        )
    audit = place.prefix + "audit" in said
    key_rights = context.key_rights if context.version == KEYS else ""
    grants = build_grants(place, "<role>", key_rights=key_rights, audit=audit, limits=context.version == LIMITS)
    if re.search("permission denied for function ", said):
        grants.append(
            f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {quote(place.schema) if place.schema else '<schema>'} TO <role>"
        )
    command = "; ".join(build_audit_grants(place, "<role>", context.audit_rights) if context.audit_rights else grants)
    return SchemaError(
        f"permission denied on pgfence's tables ({said}). As the owner of the tables, run: {command}",
        needed=context.version,
        command=command,
        sqlstate=NO_RIGHT,
    )


def standby_error(what: str, otherwise: str = "") -> StandbyError:
    """Return the error for a lock requested on a standby. `otherwise` is the advice if no switch-over is in progress."""
    return StandbyError(
        f"this server is a standby: {what} acquired here excludes no process on the primary. {SWITCHING}. Otherwise, connect"
        f" to the primary{otherwise}"
    )


# ---------------------------------------------------------------- rejections by the fence


def _translate_rejection(error: BaseException, state: str) -> PgfenceError | None:
    detail = detail_of(error)
    if state == STALE_TOKEN and "token" in detail:  # other programs may use the same SQLSTATE
        resource = unqualify_name(str(detail.get("resource")))
        token, newest = int(detail["token"]), int(detail["newest"])
        why = (
            "a newer holder has taken over, or this one was evicted"
            if token < newest
            else "this server never issued it, or the lease's row was set back (by a restore or a failover). If this"
            " connection leads to a former primary, close it (engine.dispose()) and try again on a new one"
        )
        return StaleFencingTokenError(
            f"token {token} for {resource!r} was rejected, because the newest is {newest}: {why}. The transaction cannot commit:"
            " roll it back",
            resource=resource,
            token=token,
            newest=newest,
            sqlstate=state,
        )
    if state == NO_TOKEN:
        name = detail.get("resource")
        advice = "Write inside lease.begin(...) or fenced(session, resource, token)"
        if name is None:  # a TRUNCATE, or a row without a resource, which no token allows
            otherwise = "Set these columns; if the row is already stored, drop the fence first"
            advice = read_detail(error, "hint").rstrip(".") or otherwise
        return FenceRequiredError(
            f"{message_of(error)}. {advice}",
            resource=None if name is None else unqualify_name(str(name)),
            sqlstate=state,
        )
    if state == GATE_TIMEOUT and "inside" in detail:
        return _gate_timeout_error(detail)
    return None


def _gate_timeout_error(detail: Mapping[str, Any]) -> LockTimeoutError:
    from pgfence.types import Holder  # imported here, because few programs see this error

    name, seconds = unqualify_name(str(detail["resource"])), detail["milliseconds"] / 1000
    holders = [
        Holder(
            name=name,
            key=None,
            kind="fence",
            mode="shared",
            host=one["host"],
            backend_pid=one["pid"],
            application_name=one["application_name"] or None,
            since=datetime.fromtimestamp(one["since"], UTC),
        )
        for one in detail["inside"]
    ]
    who = [f"{who}, {one['state']}: {one['query']}" for who, one in zip(holders, detail["inside"], strict=True)]
    return LockTimeoutError(
        f"could not enter the gate of {name!r} within {seconds:g} s: another transaction, usually of an older holder, is still"
        f" inside ({'; or '.join(who) or 'its session is not visible to this role'}). Roll back and try again. If the client of"
        " that transaction has disappeared, end its session with pg_terminate_backend()",
        names=(name,),
        timeout=seconds,
        holders=holders,
        sqlstate=GATE_TIMEOUT,
    )


# ---------------------------------------------------------------- the parts of an error


def _iterate_layers(error: BaseException) -> Iterator[object]:
    """Yield the layers of an error: first the driver's error, and then the errors that wrap it."""
    original = getattr(error, "orig", None) or error
    yield getattr(original, "driver_exception", None) or getattr(original, "__cause__", None) or original
    yield original
    yield error


def read_detail(error: BaseException, field: str = "detail") -> str:
    """Return the server's DETAIL (or "hint", its HINT) of an error, or an empty string if the error has none."""
    for layer in _iterate_layers(error):
        detail = getattr(getattr(layer, "diag", None), f"message_{field}", None) or getattr(layer, field, None)
        if isinstance(detail, str):
            return detail
    return ""


def detail_of(error: BaseException) -> dict[str, Any]:
    """Return the decoded DETAIL, which is JSON, of an error that pgfence's functions raised."""
    detail = read_detail(error)
    if detail.startswith("{"):
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.loads(detail)
            return found
    return {}


def message_of(error: BaseException) -> str:
    """Return the message of the server, or of the driver, in one line, without position, context, statement and parameters."""
    for layer in _iterate_layers(error):
        message = getattr(getattr(layer, "diag", None), "message_primary", None) or getattr(layer, "message", None)
        if isinstance(message, str):
            return message
    return " ".join(str(getattr(error, "orig", None) or error).split())


# ---------------------------------------------------------------- connections


def is_driver_error(error: BaseException) -> bool:
    """Return whether a driver or SQLAlchemy raised an error."""
    return type(error).__module__.partition(".")[0] in ("asyncpg", "psycopg", "psycopg2", "sqlalchemy")


def is_connection_lost(error: BaseException) -> bool:
    """Return whether a statement failed because its connection was lost."""
    state = sqlstate_of(error)
    if state is not None:
        return state.startswith(CONNECTION_LOST)
    cause = getattr(error, "orig", None) or error
    # A driver's error without an SQLSTATE proves nothing about the server: asyncpg alone has four messages for "closed".
    return isinstance(cause, OSError) or (is_driver_error(cause) and type(cause).__name__ != "ProgrammingError")


def is_commit_unanswered(error: Exception) -> bool:
    """Return whether an error means that a COMMIT was sent and had no response. An error with an SQLSTATE is a response."""
    if isinstance(error, PendingRollbackError) or not is_driver_error(error):
        return isinstance(error, OSError)
    state = sqlstate_of(getattr(error, "orig", None) or error)
    lost = getattr(error, "connection_invalidated", False)
    return lost or state is None or state.startswith((*CONNECTION_LOST, OUTCOME_UNKNOWN))


def translate_connect_error(
    engine: Engine, error: Exception, otherwise: str = LOCK_OUTCOME_UNKNOWN
) -> UnreachableError | None:
    """Return pgfence's exception for an error while connecting, or None for another cause, e.g. a bug in a creator."""
    if isinstance(error, (PgfenceError, TextError)):
        return None
    state = sqlstate_of(error)
    of_driver = isinstance(error, (OSError, DBAPIError, engine.dialect.loaded_dbapi.Error)) or (
        is_driver_error(error) and not isinstance(error, SQLAlchemyError)
    )
    if state is None and not of_driver:
        return None
    # libpq's message has several lines, and the last one may be a question.
    reason = " ".join(str(getattr(error, "orig", None) or error).split()) or type(error).__name__
    reason = reason if reason.endswith("?") else f"{reason.rstrip('.')}."
    where = describe_server(engine)
    told = f"cannot connect to {where}: {reason}"
    # With a list of hosts, another host may respond, so the error is retryable.
    if is_login_rejected(state, reason) or (is_host_unknown(error, reason) and "," not in where):
        advice = "Check host, user, password, database, TLS settings and pg_hba.conf"
        return UnreachableError(f"{told} {advice}", sqlstate=state, retryable=False)
    return UnreachableError(f"{told} {otherwise}", sqlstate=state)


_REJECTED = (
    r"server does not support SSL|rejected SSL upgrade|certificate verify failed|certificate file|bouncer config error|"
    r"authentication failed|no password supplied|no pg_hba\.conf entry|is not permitted to log in"
    r"|(?:role|database) \".*\" does not exist|no such (?:user|database)|permission denied for database"
)
_UNRESOLVED = (
    "Name or service not known|nodename nor servname provided|No address associated with hostname|No such host is known"
)
_NO_SUCH_HOST = {getattr(socket, name) for name in ("EAI_NONAME", "EAI_NODATA") if hasattr(socket, name)}


def is_login_rejected(state: str | None, reason: str) -> bool:
    """Return whether the server rejected the login, the encryption or the database, in which case a retry is useless.

    libpq does not pass on the SQLSTATE, so the text decides. Messages in languages other than English are not recognized.
    """
    if state in (None, "08P01"):  # older releases of PgBouncer send only 08P01
        return re.search(_REJECTED, reason) is not None
    return state[:2] in ("28", "3D", "42")


def is_host_unknown(error: BaseException, reason: str) -> bool:
    """Return whether the host is known not to exist. A name server that does not respond is not enough evidence."""
    if isinstance(error, socket.gaierror):
        return error.errno in _NO_SUCH_HOST
    return re.search(_UNRESOLVED, reason) is not None


def find_connect_error(engine: Engine, error: Exception, otherwise: str) -> UnreachableError | None:
    """Return pgfence's exception for an error raised while connecting, by SQLAlchemy or the caller's code, or None for any other.

    While connecting, drivers raise OSError, TimeoutError and their own classes. Which of these errors SQLAlchemy wraps depends on
    its version. The caller's own code may raise the same classes, so the traceback shows where an exception comes from.
    """
    pool = engine.pool
    for each in (error, getattr(error, "orig", None)):
        trace = each.__traceback__ if isinstance(each, BaseException) else None
        while trace is not None:
            frame = trace.tb_frame
            if frame.f_globals.get("__name__") == "sqlalchemy.pool.base" and frame.f_locals.get("self") is pool:
                return translate_connect_error(engine, error, otherwise)
            trace = trace.tb_next
    return None
