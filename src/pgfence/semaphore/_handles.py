"""The handles of permits."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast, final

from pgfence.fence.handles import AsyncHeldLease, HeldLease, _HasToken

if TYPE_CHECKING:
    from pgfence._leases.grant import Grant
    from pgfence.types import LeaseRef


class _PermitHandle(_HasToken):
    """The common part of the sync and async permits."""

    __slots__ = ()

    @property
    def weight(self) -> int:
        """The number of permits that this handle holds. Reading it does no I/O."""
        return len(cast("Grant", self._hold).rows)

    @property
    def _own_tokens(self) -> dict[str, int]:
        return dict(cast("Grant", self._hold).rows)

    def _check_resources(self, resources: tuple[str, ...]) -> None:
        raise ValueError(
            f"a permit fences only its own resource, not {resources[0]!r}: each permit has its own series of tokens, and the gate of"
            " a shared resource would admit only the newest of them. Call begin() or fence() without a resource"
        )

    def _check_single(self) -> None:
        if self.weight > 1:
            raise ValueError(
                f"a permit of weight {self.weight} cannot be handed over: acquire several permits of weight 1, and hand each of them over"
            )


@final
class Permit(_PermitHandle, HeldLease):
    """One or more permits of a semaphore, held like a lease. Call `release`, or use the handle as a context manager.

    Guarantees and limitations are the same as for `HeldLease`. `begin()` and `fence()` without a resource enter the gate of this
    permit, so that a stale holder of the same permit is rejected there; other holders of the semaphore are not affected.
    """

    __slots__ = ()

    def hand_over(self) -> LeaseRef:
        """Renew the permit a last time, and return a reference for `Lease.adopt` in another process.

        This handle is then released.

        Raises:
            ValueError: the weight is above 1.
            LockLostError, LockNotHeldError, UnreachableError: the permit could not be renewed; see `renew`.
        """
        self._check_single()
        return super().hand_over()


@final
class AsyncPermit(_PermitHandle, AsyncHeldLease):
    """One or more permits of a semaphore; see `Permit`."""

    __slots__ = ()

    async def hand_over(self) -> LeaseRef:
        """Renew the permit a last time, and return a reference for another process; see `Permit.hand_over`."""
        self._check_single()
        return await super().hand_over()
