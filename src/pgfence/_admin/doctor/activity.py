"""Checks of the locks, waits, indexes and standbys on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._admin.doctor.finding import build_finding
from pgfence._sql.leaks import IDLE_FOR, is_leaked
from pgfence._sql.server import REFUSE, WARN
from pgfence._sql.storage import quote, quote_literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._admin.doctor.finding import Examined, Finding

LEAKED_AFTER = IDLE_FOR
LONG_WAIT = 30.0
"""Seconds after which a wait is reported, as in pgfence's own log."""
_LISTED = 3


def check_lock_table(examined: Examined) -> Iterator[Finding]:
    used, limit = examined.snapshot.locks_used, examined.snapshot.lock_limit
    if used >= WARN * limit:
        yield build_finding(
            "lock-table",
            f"{used} of at least {limit} entries of the server's lock table are used ({used / limit:.0%}).",
            "Hold fewer locks at a time, or use leases for thousands of names. Or ALTER SYSTEM SET max_locks_per_transaction ="
            f" {2 * int(examined.snapshot.settings['max_locks_per_transaction'])}; and restart the server.",
            "error" if used >= REFUSE * limit else None,
        )


def check_leaked_locks(examined: Examined) -> Iterator[Finding]:
    leaked = [
        one for one in examined.snapshot.holders if is_leaked(one["state"], one["idle"], one["query"], LEAKED_AFTER)
    ]
    if leaked:
        listed = [f"backend {one['pid']} ({one['application'] or 'no name'}, {one['idle']:.0f} s)" for one in leaked]
        locks = sum(one["locks"] for one in leaked)
        yield build_finding(
            "leaked-locks",
            f"{_count(len(leaked), 'idle session holds', 'idle sessions hold')} {_count(locks, 'advisory lock', 'advisory locks')}"
            f" that pgfence did not take: {_join(listed)}.",
            'Look, then end them: pgfence release-leaked --dry-run --reason "..."',
        )


def check_waits(examined: Examined) -> Iterator[Finding]:
    long = [one for one in examined.snapshot.waits if (one["waited"] or 0) >= LONG_WAIT]
    if long:
        listed = [
            f"backend {one['pid']} for {one['waited']:.0f} s, blocked by {', '.join(map(str, one['blockers'])) or 'nothing now'}"
            for one in long
        ]
        yield build_finding(
            "long-wait",
            f"{_count(len(long), 'session has', 'sessions have')} waited for at least {LONG_WAIT:g} s: {_join(listed)}.",
            'Find the holder with `pgfence ps`, and end it with pgfence evict NAME --reason "..."; of a transaction lock, with'
            " SELECT pg_terminate_backend(...).",
        )


def check_invalid_indexes(examined: Examined) -> Iterator[Finding]:
    found = examined.snapshot.invalid_indexes
    if found:
        fixes = [f"{'DROP' if one['copy'] else 'REINDEX'} INDEX CONCURRENTLY {one['name']};" for one in found[:_LISTED]]
        listed = [f"{one['name']} on {one['on_table']}" for one in found]
        yield build_finding(
            "invalid-index",
            f"{_count(len(found), 'index is', 'indexes are')} invalid: {_join(listed)}.",
            f"As the owner of the table: {' '.join(fixes)}{' And likewise for the others.' if len(found) > _LISTED else ''}",
        )


def check_standbys(examined: Examined) -> Iterator[Finding]:
    seen = examined.snapshot
    if seen.standby or (seen.standbys and not seen.sees_all):  # their columns are hidden
        return
    names = seen.settings.get("synchronous_standby_names", "")
    if names and not any(one["sync"] in ("sync", "quorum") for one in seen.standbys):
        yield build_finding(
            "synchronous-standby",
            f"synchronous_standby_names is {names!r}, but no such standby is connected.",
            "Start the standby. To accept commits without it: ALTER SYSTEM SET synchronous_standby_names = ''; SELECT"
            " pg_reload_conf();",
        )
    elif not names and seen.standbys:
        listed = [one["application"] or "no name" for one in seen.standbys]
        named = sorted({one["application"] for one in seen.standbys if one["application"]})
        setting = quote_literal(f"ANY 1 ({', '.join(map(quote, named))})")
        fix = f"ALTER SYSTEM SET synchronous_standby_names = {setting}; SELECT pg_reload_conf();"
        yield build_finding(
            "asynchronous-standbys",
            f"{_count(len(listed), 'standby follows', 'standbys follow')} asynchronously: {_join(listed)}.",
            f"{fix if named else 'Set application_name in primary_conninfo on each standby, then synchronous_standby_names here;'}"
            " with Patroni: synchronous_mode: true.",
        )


def check_visibility(examined: Examined) -> Iterator[Finding]:
    seen = examined.snapshot
    if not seen.sees_all:
        hidden = sum(one["state"] is None for one in seen.holders)
        yield build_finding(
            "hidden-sessions",
            f"The role {seen.role!r} is not a member of pg_read_all_stats."
            + (
                f" {_count(hidden, 'session holds', 'sessions hold')} advisory locks in a hidden state."
                if hidden
                else ""
            ),
            f"GRANT pg_read_all_stats TO {quote(seen.role)};",
        )


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _join(listed: list[str]) -> str:
    more = len(listed) - _LISTED
    return "; ".join(listed[:_LISTED]) + (f"; and {more} more" if more > 0 else "")


CHECKS = (
    check_lock_table,
    check_leaked_locks,
    check_waits,
    check_invalid_indexes,
    check_standbys,
    check_visibility,
)
