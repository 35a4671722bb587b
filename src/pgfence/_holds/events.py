"""What `configure(on_event=...)` is told, and how names are written in messages."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pgfence._process.callbacks import call_logged
from pgfence.types import Event

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from pgfence.config import Config


def format_names(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)


def emit_event(
    config: Config,
    event: str,
    names: tuple[str, ...],
    token: int | None = None,
    *,
    owner: str | None = None,
    lease_id: UUID | None = None,
) -> None:
    """Tell `configure(on_event=...)` of an event; its exception is logged."""
    hook: Callable[[Event], object] | None = config.on_event
    if hook is not None:
        what = Event(event, ", ".join(names), owner, lease_id, token, datetime.now(UTC))
        call_logged(lambda: hook(what))
