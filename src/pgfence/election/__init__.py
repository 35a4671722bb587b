"""Elections of one leader among many candidates, with a fencing token for each term."""

from __future__ import annotations

from pgfence.election._aio import AsyncElection, AsyncMember
from pgfence.election._handles import AsyncTerm, Term
from pgfence.election._sync import Election, Member

__all__ = ["AsyncElection", "AsyncMember", "AsyncTerm", "Election", "Member", "Term"]
