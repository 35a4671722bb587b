"""Semaphores: at most N holders of one name at a time, across processes, each with a fencing token."""

from __future__ import annotations

from pgfence.semaphore._aio import AsyncSemaphore
from pgfence.semaphore._handles import AsyncPermit, Permit
from pgfence.semaphore._sync import Semaphore

__all__ = ["AsyncPermit", "AsyncSemaphore", "Permit", "Semaphore"]
