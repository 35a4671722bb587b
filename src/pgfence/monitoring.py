"""Functions for operators: examine the server, end holds, free and purge keys, and read the audit table.

All of them raise `UnsupportedServerError` if the engine is not for PostgreSQL or its driver is not supported. All except `purge`
raise `PgfenceError` if the server rejects a statement for a reason that is not listed, such as a `statement_timeout`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from pgfence._admin.audit import AuditEntry, build_audit_query, to_audit_entry
from pgfence._admin.doctor.examination import examine
from pgfence._admin.doctor.finding import Finding
from pgfence._admin.leaks import build_release_request
from pgfence._admin.ps import Listing, Row, Waiter, ps
from pgfence._admin.purge import LARGEST_BATCH
from pgfence._admin.purge import purge as purge_all
from pgfence._admin.requests import build_eviction_request, build_resign_request, notify_holders_here, perform
from pgfence._admin.stuck_keys import StuckKey, build_free_key_request, build_stuck_key_query, to_stuck_key
from pgfence._api.inputs import check_int, check_path
from pgfence._sql import audit as audit_rows
from pgfence._sql import evict as statements
from pgfence._sql import leaks, resign
from pgfence._sql import stuck_keys as keys

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from datetime import datetime, timedelta
    from os import PathLike

    from sqlalchemy import Connection, Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._process.clock import Seconds
    from pgfence._sql.stuck_keys import FreeKeyRequest
    from pgfence.types import Holder

__all__ = [
    "AuditEntry",
    "Finding",
    "Listing",
    "Row",
    "StuckKey",
    "Waiter",
    "ask_to_resign",
    "audit",
    "doctor",
    "evict",
    "free_key",
    "ps",
    "purge",
    "release_leaked",
    "stuck_keys",
]


@overload
def evict(
    engine: AsyncEngine, name: str, *, reason: str, actor: str | None = None, dry_run: bool = False
) -> Coroutine[Any, Any, Sequence[Holder]]: ...
@overload
def evict(
    engine: Engine, name: str, *, reason: str, actor: str | None = None, dry_run: bool = False
) -> Sequence[Holder]: ...
def evict(
    engine: Engine | AsyncEngine, name: str, *, reason: str, actor: str | None = None, dry_run: bool = False
) -> object:
    """End the hold of a lease or a session lock, fence off its holder, and record the eviction, all in one transaction.

    The token in the name's row and in its gate is incremented, the lease ends, and a row with reason and actor is written to the
    audit table. The call waits at most 2 s for writers with the old token that are inside the gate. After that, no write with the
    old token can commit. A name whose lease was already released gets a higher token too, so that a late writer is rejected.

    The holder of a lease loses it with the reason "evicted": if it uses the same engine in this process, before the function
    returns; otherwise, when the server's notification arrives or, behind a pooler, at the next renewal. A process that has held
    leases for less than a second may be notified only after that second. Sessions that hold an advisory lock with that name are
    terminated, and their holders lose it with the reason "killed".

    Limitations: the holder may still be running. Only transactions that enter the gate of this name are fenced.

    Args:
        engine: an Engine, or an AsyncEngine, in which case the result must be awaited.
        name: the name, in the configured namespace. For a permit of the semaphore `NAME`, it is `NAME#i`, as `holders()` shows;
            for a partition, it is `NAME/i`.
        reason: why; stored in the audit table. It must not be empty.
        actor: who evicts, a person or a program; stored in the audit table. None means this process's user and host.
        dry_run: whether to evict nothing and only return the holders that would be evicted.

    Returns:
        The holders that were evicted or, with `dry_run`, would be evicted.

    Raises:
        ValueError: the name, the reason or the actor cannot be used; or the name is that of a semaphore or of partitions.
        TypeError: the name, the reason or the actor is not a str, or `engine` is not an engine.
        LockTimeoutError: a transaction that writes with the old token was still open after 2 s, and `holders` lists those that may
            be this transaction; or new holders acquired the lease faster than it could be evicted. Nothing was done.
        SchemaError: the tables are missing, or this role lacks privileges. Nothing was done.
        StandbyError: the server accepts no writes. Nothing was done.
        UnreachableError: the server did not respond. If the connection was lost partway, check what was done before you retry.
    """
    request = build_eviction_request(engine, name, reason=reason, actor=actor)
    work = statements.look if dry_run else statements.evict
    return perform(
        engine, lambda connection, order: notify_holders_here(engine, order, work(connection, order)).holders, request
    )


@overload
def ask_to_resign(
    engine: AsyncEngine, name: str, *, reason: str, actor: str | None = None
) -> Coroutine[Any, Any, Holder | None]: ...
@overload
def ask_to_resign(engine: Engine, name: str, *, reason: str, actor: str | None = None) -> Holder | None: ...
def ask_to_resign(engine: Engine | AsyncEngine, name: str, *, reason: str, actor: str | None = None) -> object:
    """Ask the leader of an election to resign, and record the request, in one transaction.

    The leader is notified immediately, or, if no notification arrives (behind a pooler), at its next renewal, at most a
    third of a TTL later. It calls `on_lost`, waits until its work has ended, releases the term, and waits a second before it
    is a candidate again, so that another candidate can be elected.

    Limitations: a leader that hangs, or was elected through `campaign()` and does not check its term, does not resign. Use
    `evict`, which fences it.

    Args:
        engine: an Engine, or an AsyncEngine, in which case the result must be awaited.
        name: the name of the election, in the configured namespace.
        reason: why; stored in the audit table. It must not be empty.
        actor: who asks, a person or a program; stored in the audit table. None means this process's user and host.

    Returns:
        The leader that was asked, or None if there was no leader, in which case nothing was done.

    Raises:
        ValueError: the holder of the name is not the leader of an election; or the name, the reason or the actor cannot be used.
        TypeError: the name, the reason or the actor is not a str, or `engine` is not an engine.
        SchemaError: the tables are missing or older than version 5, or this role lacks privileges.
        StandbyError: the server accepts no writes.
        UnreachableError: the server did not respond.
    """
    request = build_resign_request(engine, name, reason=reason, actor=actor)
    return perform(engine, resign.ask_to_resign, request)


@overload
def stuck_keys(
    engine: AsyncEngine, *, older_than: Seconds = 0, prefix: str = ""
) -> Coroutine[Any, Any, Sequence[StuckKey]]: ...
@overload
def stuck_keys(engine: Engine, *, older_than: Seconds = 0, prefix: str = "") -> Sequence[StuckKey]: ...
def stuck_keys(engine: Engine | AsyncEngine, *, older_than: Seconds = 0, prefix: str = "") -> object:
    """Return the idempotency keys whose effect was started but not finished, oldest first.

    These are the keys of `IdempotentEffect` and of the middlewares for which an attempt is running or was lost. A key that was
    freed after a known failure is not listed. A key in a caller's transaction is not listed either, because other sessions cannot
    read it before it has a result.


    Guarantees: no lock is taken. The names of a key's steps leave the server, but its result and payload do not.

    Limitations: the whole table is read.

    Args:
        engine: an Engine, or an AsyncEngine, in which case the result must be awaited. A standby is sufficient.
        older_than: the minimum number of seconds since the key was first claimed.
        prefix: the beginning of the scope, without the configured namespace. On the command line, this filter is `--scope`.

    Raises:
        ValueError: `older_than` is negative, or the prefix cannot be used.
        TypeError: an argument has the wrong type.
        SchemaError: the tables are missing or older than version 2, or this role may not read them.
        UnreachableError: the server did not respond.
    """
    query = build_stuck_key_query(engine, older_than=older_than, prefix=prefix)
    return perform(engine, lambda connection, wanted: list(map(to_stuck_key, keys.look(connection, wanted))), query)


@overload
def free_key(
    engine: AsyncEngine, scope: str, key: str, *, reason: str, actor: str | None = None
) -> Coroutine[Any, Any, StuckKey | None]: ...
@overload
def free_key(engine: Engine, scope: str, key: str, *, reason: str, actor: str | None = None) -> StuckKey | None: ...
def free_key(engine: Engine | AsyncEngine, scope: str, key: str, *, reason: str, actor: str | None = None) -> object:
    """Free an idempotency key whose attempt was lost or is running, and record who freed it.

    In one transaction, the claim of the attempt ends and a row with reason and actor is written to the audit table. The next
    caller need not wait, and runs the next attempt, which does not repeat the steps that were saved. An attempt that is still
    running can no longer store its result, and gets AttemptLostError at its next renewal or step.

    The scope comes first, as in `pgfence keys free`. If scope and key are swapped, the result is None.

    Limitations: the attempt may still be running, and may have had effects outside the database. Check these effects first,
    because the next caller repeats the step that was not finished, under the same derived key.

    Args:
        engine: an Engine, or an AsyncEngine, in which case the result must be awaited.
        scope: the scope of the key, without the configured namespace.
        key: the key.
        reason: why; stored in the audit table. It must not be empty.
        actor: who frees the key, a person or a program; stored in the audit table. None means this process's user and host.

    Returns:
        The key as it was found, or None if it is unknown, finished or free, in which case nothing was done.

    Raises:
        ValueError: `scope`, `key`, `reason` or `actor` cannot be used.
        TypeError: `scope`, `key`, `reason` or `actor` is not a str, or `engine` is not an engine.
        LockTimeoutError: a transaction that is about to store the result was still open after 2 s. Nothing was done.
        SchemaError: the tables are missing or older than version 2, or this role lacks privileges. Nothing was done.
        StandbyError: the server accepts no writes. Nothing was done.
        UnreachableError: the server did not respond. If the connection was lost partway, check what was done before you retry.
    """
    request = build_free_key_request(engine, scope, key, reason=reason, actor=actor)

    def work(connection: Connection, order: FreeKeyRequest) -> StuckKey | None:
        row = keys.free(connection, order)
        return None if row is None else to_stuck_key(row)

    return perform(engine, work, request)


@overload
def purge(engine: AsyncEngine, *, batch: int = 1000) -> Coroutine[Any, Any, int]: ...
@overload
def purge(engine: Engine, *, batch: int = 1000) -> int: ...
def purge(engine: Engine | AsyncEngine, *, batch: int = 1000) -> object:
    """Delete expired idempotency keys in small transactions, and return how many were deleted.

    An expired key counts as new for the next caller, whether or not it was purged. Purging keeps the table small. The keys of all
    namespaces in the table are purged.

    The names of locks that no process has started to use in the last 30 days are deleted too, if the role may delete them. They
    are not counted.

    Guarantees: a key that has not expired is kept, as is a key whose attempt is running. No other transaction waits for the purge
    longer than one batch takes. Any number of processes may purge at the same time.

    Limitations: keys that expire during the purge, or that another transaction has locked, are left to the next purge.
    Autovacuum makes the space available for reuse, but the table's files do not shrink.

    Args:
        engine: an Engine, or an AsyncEngine, in which case the result must be awaited.
        batch: the number of keys in one transaction, from 1 to 100,000.

    Raises:
        ValueError: `batch` is out of range.
        TypeError: `batch` is not an int, or `engine` is not an engine.
        SchemaError: the tables are missing or older than version 2, or this role lacks SELECT, UPDATE or DELETE.
        StandbyError: the server accepts no writes.
        UnreachableError: the server did not respond, or the connection was lost. Keys that were already purged stay deleted.
        sqlalchemy.exc.DBAPIError: the server ended a statement, for example by the role's `lock_timeout`. Keys that were already
            purged stay deleted.
    """
    check_int(batch, "batch", LARGEST_BATCH)
    return purge_all(engine, batch)


@overload
def doctor(
    engine: AsyncEngine, *, alembic_ini: str | PathLike[str] | None = None
) -> Coroutine[Any, Any, Sequence[Finding]]: ...
@overload
def doctor(engine: Engine, *, alembic_ini: str | PathLike[str] | None = None) -> Sequence[Finding]: ...
def doctor(engine: Engine | AsyncEngine, *, alembic_ini: str | PathLike[str] | None = None) -> object:
    """Examine the server, the role and the settings of an engine, and return what could cause problems with pgfence.

    The list of findings is in the documentation, on the page "Check an installation". Call this function with the engine of your
    application, because settings and privileges belong to its role.

    Guarantees: nothing is changed, and no lock is taken. No privilege is needed. Anything that the role may not read is reported
    as a finding.

    Limitations: the findings describe a single moment. If no pooler is found, there may still be one, because a proxy that
    passes on the server's process ids looks like a direct connection.

    Args:
        engine: an Engine, or an AsyncEngine, in which case the result must be awaited.
        alembic_ini: the path of your alembic.ini, if its env.py is to be examined too. The env.py is read, not run.

    Returns:
        The findings, the most severe first.

    Raises:
        UnreachableError: the server did not respond.
        ValueError: the ini file or its env.py cannot be read.
        TypeError: an argument has the wrong type.
    """
    ini = None if alembic_ini is None else check_path(alembic_ini, "alembic_ini")
    return examine(engine, ini, lambda diagnosis: diagnosis.findings)


@overload
def release_leaked(
    engine: AsyncEngine, *, reason: str, actor: str | None = None, idle_for: Seconds = 300, dry_run: bool = False
) -> Coroutine[Any, Any, Sequence[Holder]]: ...
@overload
def release_leaked(
    engine: Engine, *, reason: str, actor: str | None = None, idle_for: Seconds = 300, dry_run: bool = False
) -> Sequence[Holder]: ...
def release_leaked(
    engine: Engine | AsyncEngine,
    *,
    reason: str,
    actor: str | None = None,
    idle_for: Seconds = 300,
    dry_run: bool = False,
) -> object:
    """End the idle sessions that hold advisory locks which pgfence did not take, and record each release.

    Such a session has usually been returned to a connection pool, or to a pooler, without releasing its lock. Each session is
    ended in a separate transaction, which also writes a row to the audit table, if the tables are installed. Only sessions of
    this database are examined.

    Limitations: PostgreSQL does not record whether a program still needs a lock. A program that holds a lock on an idle session
    while it works on another connection looks the same, as does the connection of `AdvisoryLock.connect()` between two of your
    statements. Check the list first, with `dry_run`. A lock on one of pgfence's own connections is not listed; use `evict`.

    Args:
        engine: an Engine, or an AsyncEngine, in which case the result must be awaited.
        reason: why; stored in the audit table. It must not be empty.
        actor: who ends the sessions, a person or a program; stored in the audit table. None means this process's user and host.
        idle_for: the minimum number of seconds since the session became idle.
        dry_run: whether to end no session and only return which locks would be released.

    Returns:
        The holders, one for each lock. A session that was used after it was found is not ended.

    Raises:
        ValueError: the reason or the actor is blank, or `idle_for` is negative.
        TypeError: an argument has the wrong type.
        SchemaError: this role may not end a session, or may not write to the audit table. Sessions that were ended before the
            error stay ended.
        StandbyError: the server accepts no writes.
        UnreachableError: the server did not respond.
    """
    request = build_release_request(engine, reason=reason, actor=actor, idle_for=idle_for)

    def work(connection: Connection, order: leaks.ReleaseRequest) -> list[Holder]:
        sessions = leaks.look(connection, order) if dry_run else leaks.release(connection, order).sessions
        return [holder for session in sessions for holder in session.holders]

    return perform(engine, work, request)


@overload
def audit(
    engine: AsyncEngine, *, since: datetime | timedelta | None = None, action: str | None = None
) -> Coroutine[Any, Any, Sequence[AuditEntry]]: ...
@overload
def audit(
    engine: Engine, *, since: datetime | timedelta | None = None, action: str | None = None
) -> Sequence[AuditEntry]: ...
def audit(
    engine: Engine | AsyncEngine, *, since: datetime | timedelta | None = None, action: str | None = None
) -> object:
    """Return the rows of the audit table, oldest first: who intervened, when and why.

    The rows of all namespaces are returned. pgfence never deletes any of them.

    Args:
        engine: an Engine, or an AsyncEngine, in which case the result must be awaited. A standby is sufficient.
        since: the earliest time of an entry, as a datetime with a time zone, or its maximum age by the server's clock, as a
            timedelta.
        action: only this action: "evict", "ask to resign", "free key" or "release leaked".

    Raises:
        ValueError: `since` has no time zone, or `action` is blank.
        TypeError: an argument has the wrong type.
        SchemaError: the tables are missing, or this role may not read the audit table.
        UnreachableError: the server did not respond.
    """
    query = build_audit_query(engine, since=since, action=action)
    return perform(
        engine, lambda connection, wanted: list(map(to_audit_entry, audit_rows.look(connection, wanted))), query
    )
