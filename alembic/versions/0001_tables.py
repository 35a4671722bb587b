"""Tables and functions of version 1: leases, gates, slots.

Revision: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables and functions."""
    op.create_pgfence(version=1)


def downgrade() -> None:
    """Drop the tables and functions. This fails while a lease is held."""
    op.drop_pgfence()
