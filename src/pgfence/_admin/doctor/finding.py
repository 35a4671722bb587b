"""A finding of the doctor, and the catalogue of all codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pgfence._connections.connect import PoolerMode
    from pgfence._sql.addresses import HostList
    from pgfence._sql.diagnosis import Snapshot
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config, PoolerSetting

Severity: TypeAlias = Literal["info", "warning", "error"]

MOST_LISTED = 3
"""The largest number of sessions, standbys or indexes that a finding lists."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A state of the server, the role or the application that could cause problems with pgfence.

    Attributes:
        code: the code of the finding. It does not change between releases.
        severity: "error" if a part of pgfence does not work or does not protect; "warning" if a part of pgfence would fail
            under a load, or in an outage, that is likely to occur; "info" if the state may be intended.
        found: the state, in a sentence.
        why: why the state matters.
        fix: how to fix it, as SQL, a command or a sentence.
    """

    code: str
    severity: Severity
    found: str
    why: str
    fix: str


@dataclass(frozen=True, slots=True)
class Examined:
    """The state that the checks examine.

    Attributes:
        declared: the pooler setting for session locks. It is read from the `lock_engine`, if there is one.
        pooler: the pooler between pgfence's session locks and the server.
        hosts: the hosts of the engine, and of its `lock_engine` if it has one.
    """

    snapshot: Snapshot
    config: Config
    declared: PoolerSetting
    place: TableNames
    pooler: PoolerMode
    hosts: Sequence[HostList]


class CodeEntry(NamedTuple):
    """The catalogue's entry for a code: the usual severity, and why the finding matters."""

    severity: Severity
    why: str


CATALOGUE: Mapping[str, CodeEntry] = {
    "server-version": CodeEntry(
        "error",
        "pgfence needs PostgreSQL 14 or later, because it uses functions and views that older servers do not have.",
    ),
    "standby": CodeEntry(
        "error",
        "A lock on a standby excludes no process on the primary, so every call that acquires a lock raises StandbyError.",
    ),
    "pooler-transaction": CodeEntry(
        "error",
        "A session lock could be taken in one server session and released in another. AdvisoryLock, ReadWriteLock and"
        " migration_lock raise PoolerError. Leases, transaction locks and idempotency keys work.",
    ),
    "pooler-undeclared": CodeEntry(
        "error",
        "Session locks are safe only if the pooler gives each client a dedicated server session. pgfence cannot see whether it"
        " does, so AdvisoryLock, ReadWriteLock and migration_lock raise PoolerError.",
    ),
    "host-list": CodeEntry(
        "warning",
        "If one host in the list hangs, the driver does not try the next host in time. During a failover, calls then raise"
        " UnreachableError, and leases are lost although there is a new primary.",
    ),
    "target-session-attrs": CodeEntry(
        "warning",
        "The driver may connect to a standby in the list, where every call that acquires a lock raises StandbyError.",
    ),
    "tcp-user-timeout": CodeEntry(
        "warning",
        "If the primary's machine dies or is cut off, the application's own statements to it wait for many minutes before the"
        " driver raises an error. pgfence limits this wait only on the connections that it opens itself.",
    ),
    "keepalives": CodeEntry(
        "warning",
        "If a client vanishes without closing its connection, the server keeps the client's transaction open, with its"
        " transaction locks and the gates that it has entered. pgfence sets keepalives only on the connections that it opens"
        " itself.",
    ),
    "clock": CodeEntry(
        "warning",
        "pgfence uses the server's clock, so locks are safe even if the clocks differ. However, `expires_at`, `since` and the"
        " slots of Once do not match this host's logs. If the server's clock is wrong, a failover changes when leases expire.",
    ),
    "idle-in-transaction": CodeEntry(
        "warning",
        "A client that hangs inside a transaction keeps its transaction locks and stays inside the gates that it has"
        " entered, so other processes wait for this client.",
    ),
    "idle-session-timeout": CodeEntry(
        "warning",
        "The server ends the session of a holder that sends no statement for longer than the setting allows, and thereby"
        " releases the holder's session lock. pgfence switches the setting off on its own connections, but not through a pooler"
        " or on your own connections.",
    ),
    "statement-timeout": CodeEntry(
        "info",
        "The server cancels a wait for a gate (SQLSTATE 57014) before pgfence's own timeout ends it with LockTimeoutError. "
        "Waits for transaction locks and idempotency keys are not affected.",
    ),
    "synchronous-commit": CodeEntry(
        "warning",
        "pgfence switches the setting on when it commits a token, but your own transactions commit without waiting for the"
        " disk (off) or for a standby (local): after a crash or a failover, fenced writes and idempotent results that were"
        " acknowledged may be missing.",
    ),
    "tables-missing": CodeEntry(
        "info",
        "Leases, fences, Once, semaphores, rate limits, elections, partitions, idempotency keys and the tokens of advisory locks"
        " need tables. Advisory locks without a token and transaction locks do not need them.",
    ),
    "tables-elsewhere": CodeEntry(
        "error", "Every call that needs the tables raises SchemaError, because it does not find them."
    ),
    "tables-outdated": CodeEntry("error", "Features that need the newer tables or functions raise SchemaError."),
    "tables-differ": CodeEntry("error", "Features that use the missing or altered objects raise SchemaError or fail."),
    "grants-missing": CodeEntry(
        "error",
        "The role can use only a part of a feature. The first call that needs more privileges raises SchemaError.",
    ),
    "lock-table": CodeEntry(
        "warning",
        "If the lock table is full, statements of all programs fail, and new logins are rejected. From 90 % on, pgfence rejects"
        " many requests with CapacityError.",
    ),
    "leaked-locks": CodeEntry(
        "warning",
        "An idle session that holds an advisory lock often belongs to a connection that was returned to a pool before the lock"
        " was released. Other sessions wait for that lock until the idle session ends or releases it.",
    ),
    "long-wait": CodeEntry(
        "warning",
        "The waiting process makes no progress, and the locks that it holds itself keep other processes waiting.",
    ),
    "invalid-index": CodeEntry(
        "warning",
        "A failed CREATE INDEX CONCURRENTLY leaves behind an index that every write maintains and no query uses. If"
        " the index is unique, it does not reject all duplicates.",
    ),
    "synchronous-standby": CodeEntry(
        "error", "Every COMMIT, and with it every grant of a lease, waits until a synchronous standby is connected."
    ),
    "asynchronous-standbys": CodeEntry(
        "warning",
        "After a failover, the last commits may be missing: a lease can be granted to a second process while the first still"
        " relies on it. The fence rejects the first holder's writes on the new primary.",
    ),
    "wal-sender-timeout": CodeEntry(
        "warning",
        "If a synchronous standby hangs, every COMMIT, and with it every renewal, waits until the server ends that"
        " standby's connection. A lease whose TTL is less than 1.8 times this wait is lost.",
    ),
    "standby-clock": CodeEntry(
        "warning",
        "After a failover to this standby, leases expire early: another process can acquire a lease while its holder"
        " still relies on it. The fence rejects the former holder's writes.",
    ),
    "hidden-sessions": CodeEntry(
        "info",
        "The role sees neither the state nor the statements of other roles' sessions, so findings about leaked locks and"
        " standbys may be missing, and `pgfence ps` lists holders without address and time.",
    ),
    "alembic-lock": CodeEntry(
        "warning", "If two processes run `alembic upgrade` at the same time, both may run the same migration."
    ),
    "alembic-plugin": CodeEntry(
        "warning",
        "`alembic revision --autogenerate` does not know pgfence's tables: it proposes to drop them, and it misses fences and"
        " version triggers.",
    ),
}


def build_finding(code: str, found: str, fix: str, severity: Severity | None = None) -> Finding:
    """Return a finding with the severity and the reason from the catalogue."""
    entry = CATALOGUE[code]
    return Finding(code, severity or entry.severity, found, entry.why, fix)


def count_items(number: int, one: str, many: str) -> str:
    """Return a number followed by its noun, in the singular or the plural."""
    return f"{number} {one if number == 1 else many}"


def join_items(listed: list[str]) -> str:
    """Join the first items of a list, and append the number of further items, if there are any."""
    more = len(listed) - MOST_LISTED
    return "; ".join(listed[:MOST_LISTED]) + (f"; and {more} more" if more > 0 else "")
