"""Keys are assigned to N partitions by their hash. Each partition has at most one owner at a time, with a fencing token."""

from __future__ import annotations

from pgfence.partitions._aio import AsyncPartitions, AsyncWorker
from pgfence.partitions._hashing import partition_for
from pgfence.partitions._sync import Partitions, Worker

__all__ = ["AsyncPartitions", "AsyncWorker", "Partitions", "Worker", "partition_for"]
