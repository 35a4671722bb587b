"""List the grants that a heartbeat keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pgfence._leases.grant import Grant
    from pgfence._leases.heartbeat.service import HeartbeatService


def list_grants(heartbeat: HeartbeatService) -> list[Grant]:
    with heartbeat._lock:
        return list(heartbeat._queue.schedule)
