"""Version 2: the table of idempotency keys.

Revision: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table and its functions. Leases may be held."""
    op.upgrade_pgfence(1, 2)


def downgrade() -> None:
    """Drop the table and its functions."""
    op.upgrade_pgfence(2, 1)
