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
    _sql: LockSql
    _in: str
    """The namespace that `_sql` was made with."""
    _home: Any = None
    """The domain that was found last, for an engine that is its own lock engine."""

    def __init__(self, engine: Any, names: Sequence[Name], namespace: str | None) -> None:
        self._engine = engine
        self._names = tuple(names)
        self._namespace = namespace
        self._in = namespace or ""
        self._sql = LockSql(resolve(names, self._in), "format")
        self._labels = tuple(dict.fromkeys(name if isinstance(name, str) else name.label for name in names))

    def _named(self, names: Sequence[Name]) -> Self:
        other = object.__new__(type(self))
        Named.__init__(other, self._engine, names, self._namespace)
        return other

    def _in_terms_of(self, config: Config, style: Style) -> LockSql:
        """The statements for this engine's namespace and driver, made once."""
        namespace = config.namespace if self._namespace is None else self._namespace
        if namespace != self._in or style != self._sql.style:
            self._in = namespace
            self._sql = LockSql(resolve(self._names, namespace), style)
        return self._sql

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
