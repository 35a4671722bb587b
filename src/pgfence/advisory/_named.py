"""What both twins know: where to lock, and on which names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pgfence._sql import activity
from pgfence._sql.advisory import LockSql
from pgfence.keys import resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from pgfence._sql.advisory import Style
    from pgfence.config import Config
    from pgfence.grants import Holder
    from pgfence.keys import LockKey, Name

THREE_WAYS = (
    "a Session cannot keep a session lock: it gives its connection back at every commit. Use {0}TransactionLock for work in"
    " its transaction, connect() for work on the lock's own connection, or the engine for everything else"
)


class Named:
    """What both twins know: where to lock, and on which names."""

    _engine: Any
    _names: Sequence[Name]
    _namespace: str | None
    _labels: tuple[str, ...]
    _made: tuple[str, Style, LockSql]
    """The statements, and the namespace and style that they were made with."""
    _found: tuple[Any, LockSql] | None = None
    """The domain that was found last, and the statements for it, for an engine that is its own lock engine."""

    def __init__(self, engine: Any, names: Sequence[Name], namespace: str | None) -> None:
        self._engine = engine
        self._names = tuple(names)
        self._namespace = namespace
        assumed = namespace or ""
        self._made = assumed, "format", LockSql(resolve(names, assumed), "format")
        self._labels = tuple(dict.fromkeys(name if isinstance(name, str) else name.label for name in names))

    def _named(self, names: Sequence[Name]) -> Self:
        other = object.__new__(type(self))
        Named.__init__(other, self._engine, names, self._namespace)
        return other

    def _in_terms_of(self, config: Config, style: Style) -> LockSql:
        """The statements for this engine's namespace and driver, made once."""
        namespace = config.namespace if self._namespace is None else self._namespace
        made = self._made
        if made[0] != namespace or made[1] != style:
            # Assigned at once: another thread at its first use must not see a new namespace beside old keys.
            self._made = made = namespace, style, LockSql(resolve(self._names, namespace), style)
        return made[2]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self._labels))}>"


def look(connection: Connection, keys: tuple[LockKey, ...]) -> list[Holder]:
    """Look on the caller's own connection, and leave no transaction behind that was not there before."""
    began = not connection.in_transaction()
    try:
        return activity.holders(connection, keys)
    finally:
        if began:
            connection.rollback()


def lock_engine(engine: Any, config: Any) -> Any:
    other = config.lock_engine
    if other is None:
        return engine
    if callable(other):
        other = other()
    if hasattr(other, "sync_engine") != hasattr(engine, "sync_engine"):
        raise TypeError(
            f"the lock_engine of this {type(engine).__name__} is of the other world: {type(other).__name__}"
        )
    return other
