"""Checks of what matters for a failover: the standbys and their settings, and the list of hosts that the engine tries."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pgfence._admin.doctor.connection import NOTABLE_CLOCK_DIFFERENCE
from pgfence._admin.doctor.finding import build_finding, count_items, join_items
from pgfence._sql.storage import quote, quote_literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._admin.doctor.finding import Examined, Finding

OUTAGE_FACTOR = 1.8
"""A lease survives an outage if its TTL is at least this many times as long as the outage. A lease is renewed after a third of
its TTL, and lost after nine tenths."""
LONGEST_CONNECT_TIMEOUT = 10
_PRIMARY = ("read-write", "primary")
_DRIVER_LIMITS = ("tcp_user_timeout", "keepalives_idle")
_QUORUM = re.compile(r"\s*ANY\s+(\d+)\s*\(", re.IGNORECASE)


def check_standbys(examined: Examined) -> Iterator[Finding]:
    seen = examined.snapshot
    if seen.standby or (seen.standbys and not seen.sees_all):  # the role cannot read the standbys' columns
        return
    names = seen.settings.get("synchronous_standby_names", "")
    if names and not any(one["sync"] in ("sync", "quorum") for one in seen.standbys):
        yield build_finding(
            "synchronous-standby",
            f"synchronous_standby_names is {names!r}, but no such standby is connected.",
            "Start the standby. To commit without a standby, run ALTER SYSTEM SET synchronous_standby_names = ''; SELECT"
            " pg_reload_conf();",
        )
    elif not names and seen.standbys:
        listed = [one["application"] or "no name" for one in seen.standbys]
        named = sorted({one["application"] for one in seen.standbys if one["application"]})
        setting = quote_literal(f"ANY 1 ({', '.join(map(quote, named))})")
        fix = f"ALTER SYSTEM SET synchronous_standby_names = {setting}; SELECT pg_reload_conf();"
        unnamed = "Set application_name in primary_conninfo on each standby, then set synchronous_standby_names here."
        yield build_finding(
            "asynchronous-standbys",
            f"{count_items(len(listed), 'standby follows', 'standbys follow')} asynchronously: {join_items(listed)}.",
            f"{fix if named else unnamed} With Patroni, set synchronous_mode: true instead.",
        )


def check_wal_sender_timeout(examined: Examined) -> Iterator[Finding]:
    seen = examined.snapshot
    names = seen.settings.get("synchronous_standby_names", "")
    if not names or seen.standby or _has_spare_standby(examined):
        return
    limit = seen.read_milliseconds("wal_sender_timeout") / 1000
    if not limit:
        found = "wal_sender_timeout is 0, so the server never ends the connection of a standby that hangs."
        limit_for = seen.shortest_ttl or 30.0
    elif seen.shortest_ttl is not None and OUTAGE_FACTOR * limit > seen.shortest_ttl:
        found = f"wal_sender_timeout is {limit:g} s, and the shortest lease that is held has a TTL of {seen.shortest_ttl:g} s."
        limit_for = seen.shortest_ttl
    else:
        return
    advised = max(100, int(1000 * limit_for / OUTAGE_FACTOR / 2))
    yield build_finding(
        "wal-sender-timeout",
        found,
        f"ALTER SYSTEM SET wal_sender_timeout = '{advised}ms'; SELECT pg_reload_conf(); With Patroni, change it under"
        " parameters. Alternatively, hold leases with a longer TTL.",
    )


def _has_spare_standby(examined: Examined) -> bool:
    """Return whether one standby can hang without delaying a COMMIT, because a quorum of the others is enough."""
    quorum = _QUORUM.match(examined.snapshot.settings.get("synchronous_standby_names", ""))
    connected = sum(one["sync"] == "quorum" for one in examined.snapshot.standbys)
    return quorum is not None and connected > int(quorum[1])


def check_standby_clock(examined: Examined) -> Iterator[Finding]:
    ahead = [
        f"{repr(one['application']) if one['application'] else 'a standby without a name'} by at least {one['ahead']:.1f} s"
        for one in examined.snapshot.standbys
        if (one["ahead"] or 0) > NOTABLE_CLOCK_DIFFERENCE
    ]
    if ahead:
        yield build_finding(
            "standby-clock",
            f"{count_items(len(ahead), 'standby has a clock', 'standbys have clocks')} ahead of the server's: {join_items(ahead)}.",
            "Run a time service (chrony, systemd-timesyncd) on all hosts of the cluster: `timedatectl` shows whether the clock"
            " is synchronized.",
        )


def check_host_list(examined: Examined) -> Iterator[Finding]:
    for one in examined.hosts:
        if len(one.hosts) < 2:
            continue
        if one.driver == "asyncpg":
            yield build_finding(
                "host-list",
                f"The engine has several hosts ({','.join(one.hosts)}), and asyncpg applies one time limit to all of them"
                " together.",
                "Connect through a proxy such as HAProxy, or with an async_creator that tries one host after another.",
            )
        elif not 0 < _read_number(one.connect_timeout) <= LONGEST_CONNECT_TIMEOUT:
            yield build_finding(
                "host-list",
                f"The engine has several hosts ({','.join(one.hosts)}) and"
                f" {f'a connect_timeout of {one.connect_timeout} s' if one.connect_timeout else 'no connect_timeout'}.",
                "Add connect_timeout=2 to the URL, or set PGCONNECT_TIMEOUT=2.",
            )
        else:
            continue
        return


def check_target_session_attrs(examined: Examined) -> Iterator[Finding]:
    for one in examined.hosts:
        if len(one.hosts) > 1 and one.target_session_attrs not in _PRIMARY:
            given = (
                f"target_session_attrs={one.target_session_attrs}"
                if one.target_session_attrs
                else "no target_session_attrs"
            )
            yield build_finding(
                "target-session-attrs",
                f"The engine has several hosts ({','.join(one.hosts)}) and {given}.",
                "Add target_session_attrs=read-write to the URL, or set PGTARGETSESSIONATTRS=read-write.",
            )
            return


def check_tcp_user_timeout(examined: Examined) -> Iterator[Finding]:
    for one in examined.hosts:
        # asyncpg has no parameters that limit these waits.
        if len(one.hosts) < 2 or one.driver == "asyncpg":
            continue
        # tcp_user_timeout limits the time to send a statement, and the keepalives limit the wait for its response.
        missing = [name for name in _DRIVER_LIMITS if _read_number(getattr(one, name)) <= 0]
        if missing:
            yield build_finding(
                "tcp-user-timeout",
                f"The engine has several hosts ({','.join(one.hosts)}) and no {' and no '.join(missing)}.",
                "Add tcp_user_timeout=5000&keepalives_idle=5&keepalives_interval=5&keepalives_count=3 to the URL.",
            )
            return


def _read_number(value: str) -> float:
    """Return the value of a driver parameter as a number, or 0 if it is missing or not a number."""
    try:
        return float(value or 0)
    except ValueError:
        return 0.0


CHECKS = (
    check_host_list,
    check_target_session_attrs,
    check_tcp_user_timeout,
    check_standbys,
    check_wal_sender_timeout,
    check_standby_clock,
)
