"""The names, units and attributes of the metrics. A test compares the table in docs/reference/telemetry.md with this module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DATABASE = "db.namespace"
KIND = "pgfence.lock.kind"
OUTCOME = "pgfence.outcome"
PREFIX = "pgfence.name.prefix"
REASON = "pgfence.reason"
MODEL = "pgfence.model"
POOL = "pgfence.pool"
CONNECTION_STATE = "db.client.connection.state"
ERROR = "error.type"

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""The boundaries of the histograms, in seconds."""


# Metrics are hashed by identity, because a hash of all fields would be computed for each event.
@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric. Every metric also has the attribute `db.namespace`, the name of the database."""

    name: str
    instrument: Literal["counter", "gauge", "histogram"]
    unit: str
    description: str
    attributes: tuple[str, ...] = ()


ATTEMPTS = Metric(
    "pgfence.lock.attempts",
    "counter",
    "{attempt}",
    "Requests for a lock, lease or key that were granted or refused, or that timed out",
    (KIND, OUTCOME),
)
WAIT = Metric(
    "pgfence.lock.wait.duration",
    "histogram",
    "s",
    "Duration of calls that found another holder: until the grant, or until the timeout",
    (KIND, OUTCOME),
)
HOLD = Metric("pgfence.lock.hold.duration", "histogram", "s", "Time from the grant to the release or loss", (KIND,))
CONTENTION = Metric(
    "pgfence.lock.contention",
    "counter",
    "{attempt}",
    "Calls that found another holder, by prefix of the name",
    (KIND, PREFIX),
)
LOSSES = Metric("pgfence.lock.losses", "counter", "{lock}", "Locks that were lost before their release", (KIND, REASON))
RELEASE_FAILURES = Metric(
    "pgfence.lock.release.failures", "counter", "{release}", "Releases that the server did not confirm", (KIND, ERROR)
)
EVICTIONS = Metric("pgfence.lock.evictions", "counter", "{eviction}", "Evictions by this process", (KIND,))
HELD = Metric("pgfence.lock.held", "gauge", "{lock}", "Locks that this process holds now", (KIND,))
HOLD_AGE = Metric(
    "pgfence.lock.hold.age",
    "gauge",
    "s",
    "Age of the oldest hold of this process, by prefix of the name",
    (KIND, PREFIX),
)
WAITERS = Metric(
    "pgfence.lock.waiters", "gauge", "{waiter}", "Threads and tasks of this process that wait for a lock", (POOL,)
)
CONNECTIONS = Metric(
    "pgfence.lock.connections", "gauge", "{connection}", "Open connections of pgfence", (POOL, CONNECTION_STATE)
)
CONNECTIONS_MAX = Metric(
    "pgfence.lock.connections.max", "gauge", "{connection}", "The configured max_lock_connections", (POOL,)
)
LOCK_TABLE_USAGE = Metric(
    "pgfence.lock_table.usage",
    "gauge",
    "{lock}",
    "Entries of the server's lock table that were in use when pgfence last counted them",
)
LOCK_TABLE_LIMIT = Metric("pgfence.lock_table.limit", "gauge", "{lock}", "Minimum capacity of the server's lock table")
RENEWAL = Metric("pgfence.lease.renewal.duration", "histogram", "s", "Duration of one statement that renews leases")
RENEWAL_FAILURES = Metric(
    "pgfence.lease.renewal.failures", "counter", "{renewal}", "Lease renewals that failed with an error", (KIND, ERROR)
)
RECLAIMS = Metric(
    "pgfence.lease.reclaims",
    "counter",
    "{lease}",
    "Leases granted after their last holder had let them expire",
    (KIND,),
)
REJECTIONS = Metric(
    "pgfence.fence.rejections", "counter", "{transaction}", "Transactions that a fence has rejected", (REASON,)
)
CONFLICTS = Metric(
    "pgfence.version.conflicts",
    "counter",
    "{row}",
    "Versioned rows that another transaction had changed or deleted",
    (MODEL, REASON),
)
TRANSACTIONS = Metric("pgfence.transaction.attempts", "counter", "{attempt}", "Attempts of run_transaction", (OUTCOME,))
REPLAYS = Metric("pgfence.idempotency.replays", "counter", "{request}", "Requests that got the stored result", (KIND,))
KEY_CONFLICTS = Metric(
    "pgfence.idempotency.conflicts",
    "counter",
    "{request}",
    "Requests whose key was in use or belonged to another payload",
    (KIND, REASON),
)
PAUSE = Metric(
    "pgfence.process.pause.duration",
    "histogram",
    "s",
    "How late the heartbeat thread of this process woke up",
)

METRICS = (
    *(ATTEMPTS, WAIT, HOLD, CONTENTION, LOSSES, RELEASE_FAILURES, EVICTIONS, HELD, HOLD_AGE, WAITERS),
    *(
        CONNECTIONS,
        CONNECTIONS_MAX,
        LOCK_TABLE_USAGE,
        LOCK_TABLE_LIMIT,
        RENEWAL,
        RENEWAL_FAILURES,
        RECLAIMS,
        REJECTIONS,
        CONFLICTS,
    ),
    *(TRANSACTIONS, REPLAYS, KEY_CONFLICTS, PAUSE),
)


def get_attribute_names(metric: Metric) -> tuple[str, ...]:
    """Return the names of all attributes of a metric."""
    return (DATABASE, *metric.attributes)
