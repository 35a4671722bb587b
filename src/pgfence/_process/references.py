"""References that keep nothing alive."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Engine


def weak_method(method: Any) -> Any:
    """Return a call of a bound method that does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        target = reference()
        return None if target is None else target(*args)

    return call


def when_disposed(engine: Engine, method: Any) -> None:
    """Have a bound method called after each `engine.dispose()`, without keeping its object alive.

    `event.listen` would mark the engine as one with events, and from then on each statement of each of its connections would
    look for listeners.
    """
    dispatch = engine.dispatch
    collection: Any = dispatch.engine_disposed.for_modify(dispatch)
    # A copy made by execution_options() has its own beside those of the engine it was made from.
    getattr(collection, "local", collection).listeners.append(weak_method(method))
