"""Version 2: room for idempotency keys.

Revision: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it; leases may be held meanwhile."""
    op.upgrade_pgfence(1, 2)


def downgrade() -> None:
    """Take it away again."""
    op.upgrade_pgfence(2, 1)
