"""Rows of idempotency keys, made by SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

FILL = (
    "INSERT INTO pgfence_idempotency_key (scope, key, status, locked_until, result, created_at, expires_at)"
    " SELECT %(scope)s, %(what)s || n, %(status)s, clock_timestamp() + %(claim)s * interval '1 s', '{}',"
    " clock_timestamp() - interval '2 days', clock_timestamp() + %(life)s * interval '1 s' + n * interval '1 ms'"
    " FROM generate_series(1, %(count)s) AS n"
)


class Keys:
    """Rows of one scope, inserted directly."""

    def __init__(self, admin: psycopg.Connection[Any], scope: str) -> None:
        self.admin = admin
        self.scope = scope

    def fill(
        self, what: str, count: int, *, life: float, status: str = "done", claim: float | None = None, scope: str = ""
    ) -> None:
        """Make keys that end after so many seconds, each a millisecond later than the one before."""
        values = {"what": what, "count": count, "life": life, "status": status, "claim": claim}
        self.admin.execute(FILL, {**values, "scope": scope or self.scope})

    def left(self) -> dict[str, int]:
        """Return how many of each sort are there."""
        query = "SELECT rtrim(key, '0123456789'), count(*) FROM pgfence_idempotency_key WHERE scope = %s GROUP BY 1"
        return dict(self.admin.execute(query, [self.scope]).fetchall())
