"""Calls of code that is not ours: what it raises is logged."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


log = logging.getLogger("pgfence.advisory")


def call_logged(listener: Callable[[], object]) -> None:
    """Call a listener; its exception is logged, for it must not break the lock or the other listeners."""
    try:
        listener()
    except Exception:
        log.exception("a callback of a lock failed")
