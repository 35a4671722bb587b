"""Version 5: tables and functions of semaphores, rate limits and partitions, and the request to resign of elections.

Revision: 0005
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables, the functions and a column of leases. Leases may be held."""
    op.upgrade_pgfence(4, 5)


def downgrade() -> None:
    """Drop what the upgrade added, including the numbers of permits and partitions, and the takes of rate limits."""
    op.upgrade_pgfence(5, 4)
