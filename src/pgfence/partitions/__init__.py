"""Partitions hash keys to N partitions. One worker at a time owns each partition, with a fencing token for each ownership."""

from __future__ import annotations

from pgfence.partitions._aio import AsyncPartitions, AsyncWorker
from pgfence.partitions._hashing import partition_for
from pgfence.partitions._sync import Partitions, Worker

__all__ = ["AsyncPartitions", "AsyncWorker", "Partitions", "Worker", "partition_for"]
