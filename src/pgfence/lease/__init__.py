"""Leases, sync and async: locks that expire, are renewed automatically and have a fencing token."""

from __future__ import annotations

from pgfence._leases.terms import Heartbeat
from pgfence.lease._aio import AsyncLease
from pgfence.lease._sync import Lease
from pgfence.types import Json, LeaseRef

__all__ = ["AsyncLease", "Heartbeat", "Json", "Lease", "LeaseRef"]
