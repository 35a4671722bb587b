"""References that keep nothing alive."""

from __future__ import annotations

import weakref
from typing import Any


def weak_method(method: Any) -> Any:
    """Return a call of a bound method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        return None if target is None else target(*args)

    return call
