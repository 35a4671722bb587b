"""One migration at a time, for pods that all run `alembic upgrade head` when they start.

Importing it imports no Alembic; the plugin with the operations (`op.create_pgfence`, ...) is found by Alembic itself.
"""

from __future__ import annotations

from pgfence.migrations._lock import migration_lock

__all__ = ["migration_lock"]
