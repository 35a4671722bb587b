"""Version 3: tokens that stay unique after a failover, and the kind of grant in each lease row.

Revision: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns and functions. Leases may be held."""
    op.upgrade_pgfence(2, 3)


def downgrade() -> None:
    """Drop the columns and functions."""
    op.upgrade_pgfence(3, 2)
