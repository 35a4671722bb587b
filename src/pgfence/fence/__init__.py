"""Transactions that PostgreSQL rejects if they begin after a newer holder has taken over.

The first statement of a transaction *enters the gate* of a resource with a fencing token, and the transaction stays inside until
it ends. Transactions with the same token run concurrently. A transaction with a newer token waits for them to finish. From then
on, PostgreSQL rejects older tokens, whatever statement or driver is used. Tables guarded by `pgfence.schema.add_fence` also
reject writes of transactions that have entered no gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence.fence._functions import fence, fenced

if TYPE_CHECKING:
    from pgfence.fence._mixin import Fenced

__all__ = ["Fenced", "fence", "fenced"]


if not TYPE_CHECKING:  # checkers must report a misspelt name

    def __getattr__(name: str) -> object:
        """Load the mixin on first access, because importing SQLAlchemy's ORM takes twice the time allowed for `import pgfence`."""
        if name == "Fenced":
            from pgfence.fence._mixin import Fenced

            return Fenced
        raise AttributeError(f"module 'pgfence.fence' has no attribute {name!r}")
