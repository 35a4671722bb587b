"""The operation objects of pgfence's directives on `op`, for `process_revision_directives` and Alembic's `Rewriter`.

Importing this module loads what Alembic needs to execute and render these operations.
"""

from __future__ import annotations

from pgfence._alembic.operations import (
    AddFence,
    AddVersionTrigger,
    CreateIndexSafely,
    CreatePgfence,
    DropFence,
    DropIndexSafely,
    DropPgfence,
    DropVersionTrigger,
    UpgradePgfence,
)

__all__ = [
    "AddFence",
    "AddVersionTrigger",
    "CreateIndexSafely",
    "CreatePgfence",
    "DropFence",
    "DropIndexSafely",
    "DropPgfence",
    "DropVersionTrigger",
    "UpgradePgfence",
]
