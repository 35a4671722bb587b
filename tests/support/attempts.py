"""Attempts at effects, as other processes make them through the SQL functions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pgfence.keys import SEPARATOR

if TYPE_CHECKING:
    import psycopg


CLAIM = "11111111-2222-3333-4444-555555555555"
OTHER = "22222222-2222-3333-4444-555555555555"


class Attempts:
    """What processes elsewhere do, by the server's functions."""

    def __init__(self, admin: psycopg.Connection[Any], scope: str, prefix: str = "pgfence_") -> None:
        self._admin = admin
        self.scope = scope
        self._prefix = prefix

    def claim(self, key: str, claim: str = CLAIM, ttl: float = 60) -> int:
        """Begin an attempt and return its number."""
        outcome, number = self._admin.execute(
            f"SELECT outcome, attempt FROM {self._prefix}claim_effect_v1"
            "(%s, %s, NULL, %s, %s, 3600, true, 'worker-7', 'host-1', 7)",
            [self.scope, key, claim, ttl],
        ).fetchone()
        assert outcome == "granted"
        return number

    def step(self, key: str, name: str, number: int = 1, claim: str = CLAIM) -> int | None:
        """Save what a step of an attempt returned, and return which attempt counts."""
        return self._ask("save_step_v1(%s, %s, %s, %s, '\"secret\"')", key, claim, number, name)

    def finish(self, key: str, number: int = 1, claim: str = CLAIM) -> int | None:
        """Store a result, and return which attempt counts."""
        return self._ask("finish_effect_v1(%s, %s, %s, 3600, 'done', '1', NULL, NULL, NULL, true)", key, claim, number)

    def release(self, key: str, number: int = 1, claim: str = CLAIM) -> str:
        """Free a key after a known failure."""
        return self._ask("free_effect_v1(%s, %s, %s)", key, claim, number)

    def renew(self, key: str, number: int = 1, claim: str = CLAIM) -> list[Any]:
        """Renew a claim, as the heartbeat does."""
        call = "renew_keys_v1(ARRAY[%s], ARRAY[%s], ARRAY[%s::bigint], ARRAY[60::float])"
        return json.loads(self._ask(call, key, claim, number))[0]

    def lapse(self, key: str, hours: int = 2) -> None:
        """Let an attempt be lost, some time ago."""
        self._admin.execute(
            f"UPDATE {self._prefix}idempotency_key SET created_at = created_at - make_interval(hours => %(h)s),"
            " locked_until = locked_until - make_interval(hours => %(h)s) WHERE scope = %(s)s AND key = %(k)s",
            {"h": hours, "s": self.scope, "k": key},
        )

    def row(self, key: str) -> tuple[Any, ...] | None:
        """Return status, attempt and names of steps."""
        return self._admin.execute(
            f"SELECT status, attempt, (SELECT array_agg(name) FROM jsonb_object_keys(step) AS name)"
            f" FROM {self._prefix}idempotency_key WHERE scope = %s AND key = %s",
            [self.scope, key],
        ).fetchone()

    def audit(self, key: str) -> list[tuple[Any, ...]]:
        """Return who freed it and why."""
        query = f"SELECT action, actor, reason FROM {self._prefix}audit WHERE resource = %s ORDER BY id"
        return self._admin.execute(query, [self.scope + SEPARATOR + key]).fetchall()

    def _ask(self, call: str, key: str, *rest: Any) -> Any:
        query = f"SELECT {self._prefix}{call}"
        return self._admin.execute(query, [self.scope + SEPARATOR + key, *rest]).fetchone()[0]
