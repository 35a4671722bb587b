"""Version 4: writers with the same token enter their gate without writing a multixact.

Revision: 0004
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Replace the functions of the fence. Leases may be held, and fenced transactions may be open."""
    op.upgrade_pgfence(3, 4)


def downgrade() -> None:
    """Restore the older functions. This waits until no transaction is inside a gate."""
    op.upgrade_pgfence(4, 3)
