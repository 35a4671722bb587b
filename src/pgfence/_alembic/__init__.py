"""Alembic operations for tables, fences and version triggers: their implementation, rendering and autogenerate.

Loaded on first use of a directive or a comparison by `pgfence_alembic`, the plugin that Alembic finds.
"""

from __future__ import annotations

# Without these, Alembic would render and execute operations that other code derives from ours as their base classes.
from pgfence._alembic import implementations as implementations
from pgfence._alembic import renderers as renderers
