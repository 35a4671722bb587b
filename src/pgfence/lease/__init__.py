"""Leases: locks that expire, renew themselves and bring a fencing token, sync and async."""

from __future__ import annotations

from pgfence._leases.grant import Heartbeat
from pgfence.lease._aio import AsyncLease
from pgfence.lease._request import Json, LeaseRef
from pgfence.lease._sync import Lease

__all__ = ["AsyncLease", "Heartbeat", "Json", "Lease", "LeaseRef"]
