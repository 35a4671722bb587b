"""Checks of the server settings in the application's sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._admin.doctor.finding import build_finding
from pgfence._sql.rights import build_role_setting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._admin.doctor.finding import Examined, Finding


def check_idle_in_transaction(examined: Examined) -> Iterator[Finding]:
    if examined.snapshot.read_milliseconds("idle_in_transaction_session_timeout") == 0:
        yield build_finding(
            "idle-in-transaction",
            "idle_in_transaction_session_timeout is 0, so the server never ends the session of a client that hangs inside a"
            " transaction.",
            build_role_setting(examined.snapshot.role, "idle_in_transaction_session_timeout", "'60s'"),
        )


def check_idle_session_timeout(examined: Examined) -> Iterator[Finding]:
    limit = examined.snapshot.read_milliseconds("idle_session_timeout")
    if limit:
        yield build_finding(
            "idle-session-timeout",
            f"idle_session_timeout is {limit / 1000:g} s.",
            build_role_setting(examined.snapshot.role, "idle_session_timeout", "0"),
            None if examined.declared == "session" else "info",
        )


def check_statement_timeout(examined: Examined) -> Iterator[Finding]:
    limit = examined.snapshot.read_milliseconds("statement_timeout") / 1000
    if 0 < limit < examined.config.default_timeout:
        yield build_finding(
            "statement-timeout",
            f"statement_timeout is {limit:g} s, less than pgfence's default timeout of {examined.config.default_timeout:g} s.",
            f"Lower pgfence's timeout: configure(engine, default_timeout={limit / 2:g}). Alternatively, raise the server's: "
            + build_role_setting(
                examined.snapshot.role, "statement_timeout", f"'{examined.config.default_timeout + 10:g}s'"
            ),
        )


def check_synchronous_commit(examined: Examined) -> Iterator[Finding]:
    level = examined.snapshot.settings.get("synchronous_commit", "on")
    replicated = bool(examined.snapshot.settings.get("synchronous_standby_names"))
    if level == "off" or (level == "local" and replicated):
        yield build_finding(
            "synchronous-commit",
            f"synchronous_commit is {level}.",
            build_role_setting(examined.snapshot.role, "synchronous_commit", "on"),
        )


CHECKS = (check_idle_in_transaction, check_idle_session_timeout, check_statement_timeout, check_synchronous_commit)
