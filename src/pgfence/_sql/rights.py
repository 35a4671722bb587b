"""Build the GRANT statements that a role needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._sql.storage import quote

if TYPE_CHECKING:
    from pgfence._sql.storage import TableNames


_LIMITS = (
    *("semaphore", "permit_waiter", "rate_limit", "rate_take", "resign_request"),
    *("partition_set", "partition_member"),
)


def build_grants(
    place: TableNames, role: str, *, key_rights: str = "", audit: bool = False, limits: bool = False
) -> list[str]:
    """Return the grants for leases, tokens and fences or, with `key_rights`, those for idempotency keys.

    `role` is not quoted. `audit` adds the audit table, in which evictions and freed keys are recorded, and `limits` adds the
    tables of semaphores, rate limits, partitions and requests to resign.
    """
    tables = ("idempotency_key",) if key_rights else ("lease", "gate", "checkpoint", "slot")
    on_tables = key_rights or "SELECT, INSERT, UPDATE"
    asked = [f"GRANT {on_tables} ON {', '.join(map(place.name, tables))} TO {role}"]
    asked.append(f"GRANT SELECT ON {place.name('schema_version')} TO {role}")
    if place.schema is not None:
        asked.append(f"GRANT USAGE ON SCHEMA {quote(place.schema)} TO {role}")
    if limits:
        asked.append(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {', '.join(map(place.name, _LIMITS))} TO {role}")
    if audit:
        asked.append(f"GRANT INSERT ON {place.name('audit')} TO {role}")
    return asked


def build_role_setting(role: str, name: str, value: str) -> str:
    """Return the statement that changes a setting for one role, which the role itself may execute."""
    return f"ALTER ROLE {quote(role)} SET {name} = {value};"


def build_audit_grants(place: TableNames, role: str, rights: str) -> list[str]:
    """Return the grants for statements that use only the audit table."""
    asked = [f"GRANT {rights} ON {place.name('audit')} TO {role}"]
    if place.schema is not None:
        asked.append(f"GRANT USAGE ON SCHEMA {quote(place.schema)} TO {role}")
    return asked
