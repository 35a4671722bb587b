"""The handles of owned partitions."""

from __future__ import annotations

from pgfence.fence.handles import AsyncHeldLease, HeldLease, _HasToken


class _PartitionHandle(_HasToken):
    """The common part of the sync and async classes."""

    __slots__ = ()

    def _check_resources(self, resources: tuple[str, ...]) -> None:
        raise ValueError(
            f"a partition fences only its own resource, not {resources[0]!r}: each partition has its own series of tokens, and the gate"
            " of a shared resource would admit only the newest of them. Call begin() or fence() without a resource"
        )


class PartitionLease(_PartitionHandle, HeldLease):
    """The handle of an owned partition, which works like that of a lease."""

    __slots__ = ()


class AsyncPartitionLease(_PartitionHandle, AsyncHeldLease):
    """The handle of an owned partition, which works like that of a lease."""

    __slots__ = ()
