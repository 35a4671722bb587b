"""Transactions that PostgreSQL itself refuses when their holder has been overtaken.

A transaction *enters the gate* of a resource with a token as its first statement, and stays inside until it
ends. Whoever has the same token is let in beside it, a newer one waits for it, an older one is refused from then on, whatever
statement or driver it uses. Tables guarded by `pgfence.schema.add_fence` also refuse those who enter no gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence.fence._functions import fence, fenced

if TYPE_CHECKING:
    from pgfence.fence._mixin import Fenced

__all__ = ["Fenced", "fence", "fenced"]


if not TYPE_CHECKING:  # checkers must report a misspelt name

    def __getattr__(name: str) -> object:
        """Load the mixin when it is asked for: it needs SQLAlchemy's ORM, which costs twice what importing pgfence may."""
        if name == "Fenced":
            from pgfence.fence._mixin import Fenced

            return Fenced
        raise AttributeError(f"module 'pgfence.fence' has no attribute {name!r}")
