"""Call the application's callbacks and log their exceptions."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


log = logging.getLogger("pgfence.advisory")


def call_logged(listener: Callable[[], object]) -> None:
    """Call a listener. If it raises an exception, log it, because it must affect neither the lock nor the other listeners."""
    try:
        listener()
    except Exception:
        log.exception("a callback of a lock failed")
