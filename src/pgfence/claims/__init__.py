"""Claims assign each row of a table to one worker at a time, without one worker waiting for another."""

from __future__ import annotations

from pgfence.claims._functions import claim, extend_claim, finish_claim
from pgfence.claims._mixin import Claimable

__all__ = ["Claimable", "claim", "extend_claim", "finish_claim"]
