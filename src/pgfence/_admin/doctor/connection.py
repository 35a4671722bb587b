"""Checks of the server, the pooler, the keepalives and the clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._admin.doctor.finding import build_finding
from pgfence._sql.rights import build_role_setting
from pgfence._sql.server import OLDEST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._admin.doctor.finding import Examined, Finding

NOTABLE_CLOCK_DIFFERENCE = 1.0
SLOWEST_DETECTION = 120
"""Seconds within which the server should notice that a client has vanished."""
_ADVISED = {"tcp_keepalives_idle": "10", "tcp_keepalives_interval": "5", "tcp_keepalives_count": "4"}
# The kernel's keepalive values, which apply if the server sets none.
_KERNEL = {"tcp_keepalives_idle": 7200, "tcp_keepalives_interval": 75, "tcp_keepalives_count": 9}


def check_version(version: str, number: int) -> Iterator[Finding]:
    """Yield the finding for a server that pgfence does not support. Nothing else can be read from such a server."""
    if number < OLDEST * 10000 or "-YB-" in version:
        yield build_finding(
            "server-version",
            f"The server is {version.partition(' on ')[0]}; pgfence needs PostgreSQL {OLDEST} or later.",
            "Upgrade the server.",
        )


def check_standby(examined: Examined) -> Iterator[Finding]:
    if examined.snapshot.standby:
        yield build_finding(
            "standby",
            "The server is a standby.",
            "Connect to the primary: list all hosts in the URL and add target_session_attrs=read-write.",
        )


def check_pooler(examined: Examined) -> Iterator[Finding]:
    declared = examined.declared
    if examined.pooler == "transaction":
        yield build_finding(
            "pooler-transaction",
            "A connection pooler in transaction mode is between this client and the server: one server process served two"
            " clients.",
            "Give pgfence an engine with a direct URL: configure(engine, lock_engine=direct). If you use no session locks,"
            ' declare the pooler: configure(engine, pooler="transaction"), or --pooler transaction on the command line.',
            "info" if declared == "transaction" else None,
        )
    elif examined.pooler == "unknown" and declared not in ("session", "transaction"):
        yield build_finding(
            "pooler-undeclared",
            "A connection pooler whose mode is unknown is between this client and the server.",
            'If it is in session mode, declare that: configure(engine, pooler="session"), or --pooler session on the command line.'
            " Otherwise, give pgfence an engine with a direct URL: configure(engine, lock_engine=direct).",
        )


def check_keepalives(examined: Examined) -> Iterator[Finding]:
    seen = examined.snapshot
    # Through a pooler, the settings are those of the pooler's connection to the server, not of the client's connection.
    if not seen.tcp or examined.pooler != "none":
        return
    idle, interval, count = (int(seen.settings.get(name, "0")) or default for name, default in _KERNEL.items())
    silent = idle + interval * count
    limit = seen.read_milliseconds("tcp_user_timeout") // 1000
    if min(silent, limit or silent) > SLOWEST_DETECTION:
        yield build_finding(
            "keepalives",
            f"The server notices only after {silent} s that the client of an idle connection has vanished"
            f" (tcp_keepalives_idle {idle}, tcp_keepalives_interval {interval}, tcp_keepalives_count {count}).",
            " ".join(build_role_setting(seen.role, name, value) for name, value in _ADVISED.items()),
        )


def check_clock(examined: Examined) -> Iterator[Finding]:
    difference, doubt = examined.snapshot.clock_difference, examined.snapshot.clock_doubt
    if abs(difference) - doubt > NOTABLE_CLOCK_DIFFERENCE:
        yield build_finding(
            "clock",
            f"The server's clock is {abs(difference):.1f} s {'ahead of' if difference > 0 else 'behind'} this host's"
            f" (accurate to within {doubt * 1000:.0f} ms).",
            "Run a time service (chrony, systemd-timesyncd) on both hosts: `timedatectl` shows whether the clock is"
            " synchronized.",
        )


CHECKS = (check_standby, check_pooler, check_keepalives, check_clock)
