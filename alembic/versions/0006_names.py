"""Version 6: the names of advisory locks, for `pgfence ps`.

Revision: 0006
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a table and a function. Locks and leases may be held."""
    op.upgrade_pgfence(5, 6)


def downgrade() -> None:
    """Drop the table and the function. The names are stored again when they are used."""
    op.upgrade_pgfence(6, 5)
