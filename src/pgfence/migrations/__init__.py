"""Run migrations in one process at a time, even if many processes run `alembic upgrade head` when they start.

Importing this module does not import Alembic, which finds the plugin with the operations (`op.create_pgfence`, ...) itself.
"""

from __future__ import annotations

from pgfence.migrations._lock import migration_lock

__all__ = ["migration_lock"]
