"""The handles of terms."""

from __future__ import annotations

from typing import final

from pgfence.fence.handles import AsyncHeldLease, HeldLease


@final
class Term(HeldLease):
    """A term as leader, held like a lease. Its token is the number of the term, which only grows.

    Guarantees and limitations are the same as for `HeldLease`. Write inside `begin()`, so that PostgreSQL rejects late writes of
    a former leader.
    """

    __slots__ = ()


@final
class AsyncTerm(AsyncHeldLease):
    """A term as leader; see `Term`."""

    __slots__ = ()
