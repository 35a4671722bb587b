"""Build the request that ends the sessions with leaked locks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgfence._admin.requests import build_audit_fields
from pgfence._process.clock import seconds
from pgfence._sql.leaks import ReleaseRequest
from pgfence._sql.storage import table_names_of

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

    from pgfence._process.clock import Seconds


def build_release_request(
    engine: Engine | AsyncEngine, *, reason: str, actor: str | None, idle_for: Seconds
) -> ReleaseRequest:
    """Check the arguments, and return the request that ends the sessions with leaked locks."""
    reason, actor = build_audit_fields(reason, actor)
    return ReleaseRequest(table_names_of(engine), seconds(idle_for, "idle_for"), reason, actor)
