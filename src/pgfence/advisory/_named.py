"""What both twins know: where to lock, and on which names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pgfence._api.inputs import is_async_session, is_async_sessionmaker, is_sessionmaker
from pgfence._sql import activity
from pgfence._sql.advisory import LockSql
from pgfence._sql.storage import table_names_of
from pgfence._sql.token import TokenSql
from pgfence.keys import check_names, list_labels, qualify_name, resolve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection

    from pgfence._locks.manager import LockManager
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config, HasDialect
    from pgfence.keys import LockKey, Name
    from pgfence.types import Holder

THREE_WAYS = (
    "a Session cannot keep a session lock: it gives its connection back at every commit. Use {0}TransactionLock for work in"
    " its transaction, connect() for work on the lock's own connection, or the engine for everything else"
)


def expect_no_session(engine: object) -> None:
    """Raise for a Session, in whatever form.

    Raises:
        TypeError: it is a session, a scoped session or a factory of sessions, sync or async.
    """
    asynchronous = is_async_session(engine) or is_async_sessionmaker(engine)
    if asynchronous or hasattr(engine, "get_bind") or hasattr(engine, "registry") or is_sessionmaker(engine):
        raise TypeError(THREE_WAYS.format("Async" if asynchronous else ""))


class LockNames:
    """What both twins know: where to lock, and on which names."""

    _engine: Any
    _names: Sequence[Name]
    _namespace: str | None
    _token: bool
    _labels: tuple[str, ...]
    _made: tuple[str, ParamStyle, TableNames | None, LockSql] | None = None
    """The statements, and what they were made with: namespace, style, and where our tables are if they are needed."""
    _found: tuple[LockManager, LockSql] | None = None
    """The manager that was found last, and the statements for it, for an engine that is its own lock engine."""

    def __init__(self, engine: object, names: Sequence[Name], namespace: str | None, token: bool) -> None:
        self._engine = engine
        self._names = tuple(names)
        self._namespace = namespace
        self._token = token
        # Their keys are made at the first use, once: the engine may have a namespace by then.
        check_names(self._names, namespace or "")
        if token:
            self._get_text(namespace or "")
        self._labels = list_labels(names)

    def _rename(self, names: Sequence[Name]) -> Self:
        other = object.__new__(type(self))
        LockNames.__init__(other, self._engine, names, self._namespace, self._token)
        return other

    def _in_terms_of(self, engine: HasDialect, config: Config, style: ParamStyle) -> LockSql:
        """The statements for this engine's namespace, driver and tables, made once."""
        namespace = config.namespace if self._namespace is None else self._namespace
        place = table_names_of(engine) if self._token else None
        made = self._made
        if made is None or made[:3] != (namespace, style, place):
            keys = resolve(self._names, namespace)
            sql = LockSql(keys, style)
            if place is not None:
                sql = TokenSql(keys[0], self._get_text(namespace), place, style)
            # Assigned at once: another thread at its first use must not see a new namespace beside old keys.
            self._made = made = namespace, style, place, sql
        return made[3]

    def _get_text(self, namespace: str) -> str:
        """Return the text under which the token stands.

        Raises:
            ValueError: there is not exactly one name, or it is too long.
            TypeError: it is a ready key, which has no text.
        """
        if len(self._names) != 1:
            raise ValueError("token=True takes exactly one name: a token belongs to one resource")
        return qualify_name(self._names[0], namespace, "the name of a lock with a token")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(map(repr, self._labels))}>"


def look_on_connection(connection: Connection, keys: tuple[LockKey, ...]) -> list[Holder]:
    """Look on the caller's own connection, and leave no transaction behind that was not there before."""
    began = not connection.in_transaction()
    try:
        return activity.find_holders(connection, keys)
    finally:
        if began:
            connection.rollback()


def lock_engine(engine: Any, config: Config) -> Any:
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
