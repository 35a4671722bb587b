"""Version 4: writers with one token enter their gate without a multixact each.

Revision: 0004
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Replace the functions of the fence; leases may be held and fenced transactions may be open meanwhile."""
    op.upgrade_pgfence(3, 4)


def downgrade() -> None:
    """Put the older functions back, once no transaction is inside a gate."""
    op.upgrade_pgfence(4, 3)
