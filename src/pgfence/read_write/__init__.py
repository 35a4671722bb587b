"""Reader/writer locks: many readers or one writer, across processes."""

from __future__ import annotations

from pgfence.read_write._aio import AsyncReadWriteLock, AsyncWriteHeld
from pgfence.read_write._sync import ReadWriteLock, WriteHeld

__all__ = ["AsyncReadWriteLock", "AsyncWriteHeld", "ReadWriteLock", "WriteHeld"]
