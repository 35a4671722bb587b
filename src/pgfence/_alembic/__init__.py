"""Alembic's side of the tables, fences and version triggers: operations, how they are done and written down, autogenerate.

Loaded by `pgfence_alembic`, the entry point that Alembic finds, when a directive or a comparison is asked for.
"""

from __future__ import annotations

# Without them Alembic would write and do operations that somebody else makes as those they are derived from.
from pgfence._alembic import implementations as implementations
from pgfence._alembic import renderers as renderers
