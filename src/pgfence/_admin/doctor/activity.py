"""Checks of the locks, waits and indexes on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._admin.doctor.finding import MOST_LISTED, build_finding, count_items, join_items
from pgfence._sql.leaks import IDLE_FOR, is_leaked
from pgfence._sql.server import REFUSE, WARN
from pgfence._sql.storage import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._admin.doctor.finding import Examined, Finding

LEAKED_AFTER = IDLE_FOR
LONG_WAIT = 30.0
"""Seconds after which a wait is reported, as in pgfence's own log."""


def check_lock_table(examined: Examined) -> Iterator[Finding]:
    used, limit = examined.snapshot.locks_used, examined.snapshot.lock_limit
    if used >= WARN * limit:
        yield build_finding(
            "lock-table",
            f"{used} of at least {limit} entries of the server's lock table are used ({used / limit:.0%}).",
            "Hold fewer locks at a time, or use leases for thousands of names. Alternatively, run `ALTER SYSTEM SET"
            " max_locks_per_transaction ="
            f" {2 * int(examined.snapshot.settings['max_locks_per_transaction'])}` and restart the server.",
            "error" if used >= REFUSE * limit else None,
        )


def check_leaked_locks(examined: Examined) -> Iterator[Finding]:
    leaked = [
        one for one in examined.snapshot.holders if is_leaked(one["state"], one["idle"], one["query"], LEAKED_AFTER)
    ]
    if leaked:
        listed = [
            f"backend {one['pid']} ({one['application'] or 'no application name'}, idle for {one['idle']:.0f} s)"
            for one in leaked
        ]
        locks = sum(one["locks"] for one in leaked)
        yield build_finding(
            "leaked-locks",
            f"{count_items(len(leaked), 'idle session holds', 'idle sessions hold')} {count_items(locks, 'advisory lock', 'advisory locks')}"
            f" that pgfence did not take: {join_items(listed)}.",
            'List these sessions with `pgfence release-leaked --dry-run --reason "..."`. To end them, run the command'
            " without --dry-run.",
        )


def check_waits(examined: Examined) -> Iterator[Finding]:
    long = [one for one in examined.snapshot.waits if (one["waited"] or 0) >= LONG_WAIT]
    if long:
        listed = [
            f"backend {one['pid']} for {one['waited']:.0f} s, blocked by {_describe_blockers(one['blockers'])}"
            for one in long
        ]
        yield build_finding(
            "long-wait",
            f"{count_items(len(long), 'session has', 'sessions have')} waited for at least {LONG_WAIT:g} s: {join_items(listed)}.",
            'Find the holder with `pgfence ps`, and evict it with `pgfence evict NAME --reason "..."`. If it holds a'
            " transaction lock, end its session with SELECT pg_terminate_backend(...).",
        )


def _describe_blockers(pids: list[int]) -> str:
    # pg_blocking_pids() returns 0 for a prepared transaction.
    backends = ", ".join(f"backend {pid}" for pid in pids if pid)
    prepared = "a prepared transaction" if 0 in pids else ""
    return " and ".join(filter(None, (backends, prepared))) or "no session at the moment"


def check_invalid_indexes(examined: Examined) -> Iterator[Finding]:
    found = examined.snapshot.invalid_indexes
    if found:
        fixes = [
            f"{'DROP' if one['copy'] else 'REINDEX'} INDEX CONCURRENTLY {one['name']};" for one in found[:MOST_LISTED]
        ]
        listed = [f"{one['name']} on {one['on_table']}" for one in found]
        yield build_finding(
            "invalid-index",
            f"{count_items(len(found), 'index is', 'indexes are')} invalid: {join_items(listed)}.",
            f"As the owner of the table, run: {' '.join(fixes)}"
            f"{' Do the same for the others.' if len(found) > MOST_LISTED else ''}",
        )


def check_visibility(examined: Examined) -> Iterator[Finding]:
    seen = examined.snapshot
    if not seen.sees_all:
        hidden = sum(one["state"] is None for one in seen.holders)
        yield build_finding(
            "hidden-sessions",
            f"The role {seen.role!r} is not a member of pg_read_all_stats."
            + (
                f" The state of {count_items(hidden, 'session that holds', 'sessions that hold')} advisory locks is hidden."
                if hidden
                else ""
            ),
            f"GRANT pg_read_all_stats TO {quote(seen.role)};",
        )


CHECKS = (
    check_lock_table,
    check_leaked_locks,
    check_waits,
    check_invalid_indexes,
    check_visibility,
)
