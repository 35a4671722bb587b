"""Version 3: tokens that survive a failover, and what a lease's row was granted for.

Revision: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns and functions; leases may be held meanwhile."""
    op.upgrade_pgfence(2, 3)


def downgrade() -> None:
    """Drop them again."""
    op.upgrade_pgfence(3, 2)
