"""A role for which the doctor has no findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from psycopg import sql
from sqlalchemy import make_url

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

SETTINGS = {
    "idle_in_transaction_session_timeout": "60s",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
}
_APPLICATION = (
    "GRANT SELECT, INSERT, UPDATE ON pgfence_lease, pgfence_slot, pgfence_gate, pgfence_checkpoint TO {0}",
    "GRANT SELECT, INSERT, UPDATE ON pgfence_idempotency_key, pgfence_semaphore TO {0}",
    "GRANT SELECT, INSERT, UPDATE ON pgfence_rate_limit, pgfence_rate_take TO {0}",
    "GRANT SELECT, INSERT, UPDATE, DELETE ON pgfence_permit_waiter TO {0}",
    "GRANT SELECT ON pgfence_schema_version TO {0}",
    "GRANT pg_read_all_stats TO {0}",
)


def healthy_role(admin: psycopg.Connection[Any], role: Callable[..., str], **settings: str) -> str:
    """Make a login role with the privileges and settings that the manual advises, and return its DSN.

    Args:
        admin: a superuser's connection to the database with the tables.
        role: the fixture of that name.
        **settings: settings that differ from the advice.
    """
    dsn = role(SETTINGS | settings)
    for statement in _APPLICATION:
        admin.execute(sql.SQL(statement).format(sql.Identifier(make_url(dsn).username)))
    return dsn
