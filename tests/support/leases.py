"""What the tests of leases have in common: how to make one, and how to see and change its row from outside."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import psycopg

from pgfence.lease import AsyncLease, Lease

if TYPE_CHECKING:
    from support.worlds import World

_PLAIN = "name, token, lease_id, owner, host, pid, backend_pid, purpose, metadata, ttl, lock_delay, evicted"
_TIMES = ", ".join(
    f"NULLIF({at}, '-infinity') AS {at}"
    for at in ("acquired_at", "renewed_at", "expires_at", "free_at", "released_at", "min_until", "hold_until")
)
_LEFT = "extract(epoch FROM expires_at - clock_timestamp())::float8 AS left"
_TAKE = (
    "SELECT * FROM pgfence_acquire_lease_v2(%s, %s, %s, 0, 0, NULL, 'rival', 'elsewhere', 7, 'to win', NULL, 'lease')"
)


def lease(world: World, engine: Any, name: str, *, ttl: Any = 30, **kwargs: Any) -> Any:
    """Return the world's lease."""
    return world.pick(Lease, AsyncLease)(engine, name, ttl=ttl, **kwargs)


def row(admin: psycopg.Connection[Any], name: str) -> Any:
    """Return the row of a lease as a named tuple, with the seconds left by the server's clock as `left`; None without one."""
    cursor = admin.cursor(row_factory=psycopg.rows.namedtuple_row)
    return cursor.execute(
        f"SELECT {_PLAIN}, {_TIMES}, {_LEFT} FROM pgfence_lease WHERE name = %s".encode(), [name]
    ).fetchone()


def rival(admin: psycopg.Connection[Any], name: str, ttl: float = 30) -> int | None:
    """Take a lease as another process would, past all of our code; return its token, or None when it is not free."""
    found = (
        admin.cursor(row_factory=psycopg.rows.namedtuple_row).execute(_TAKE, [name, str(uuid.uuid4()), ttl]).fetchone()
    )
    return found.token if found.granted else None


def lapse(admin: psycopg.Connection[Any], name: str) -> None:
    """Let a lease be expired since a second, as after a step of the server's clock."""
    admin.execute(
        "UPDATE pgfence_lease SET expires_at = clock_timestamp() - interval '1 s',"
        " free_at = clock_timestamp() - interval '1 s' WHERE name = %s",
        [name],
    )
