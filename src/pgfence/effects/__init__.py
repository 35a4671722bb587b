"""Effects outside the database, which are claimed first, done once, and resumed where they stopped."""

from __future__ import annotations

from pgfence.effects._aio import AsyncIdempotentEffect
from pgfence.effects._handles import AsyncAttempt, Attempt
from pgfence.effects._sync import IdempotentEffect

__all__ = ["AsyncAttempt", "AsyncIdempotentEffect", "Attempt", "IdempotentEffect"]
