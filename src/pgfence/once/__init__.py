"""Work that is done once in each slot of time, by the process that requests the slot first."""

from __future__ import annotations

from pgfence.once._aio import AsyncOnce
from pgfence.once._claim import SlotClockError, SlotOverError
from pgfence.once._handles import AsyncSlot, Slot
from pgfence.once._slots import CatchUp
from pgfence.once._sync import Once
from pgfence.once._zones import SlotZoneError

# The module is set because a pickled error contains it, and a later release may have renamed a private module.
SlotClockError.__module__ = SlotOverError.__module__ = SlotZoneError.__module__ = __name__

__all__ = ["AsyncOnce", "AsyncSlot", "CatchUp", "Once", "Slot", "SlotClockError", "SlotOverError", "SlotZoneError"]
