"""Alembic operations for tables, fences, version triggers and indexes: their implementation, rendering and autogenerate.

`pgfence_alembic`, the plugin that Alembic finds, imports this package when a directive or the comparison is first used.
"""

from __future__ import annotations

# Without these imports, Alembic would render and execute CreateIndexSafely and DropIndexSafely like their base classes.
from pgfence._alembic import implementations as implementations
from pgfence._alembic import renderers as renderers
