"""Names, engine and statements of an advisory lock, shared by the sync and async classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

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
    """Raise TypeError if the engine of a lock is a session, a scoped session or a session factory, sync or async."""
    asynchronous = is_async_session(engine) or is_async_sessionmaker(engine)
    if asynchronous or hasattr(engine, "get_bind") or hasattr(engine, "registry") or is_sessionmaker(engine):
        raise TypeError(THREE_WAYS.format("Async" if asynchronous else ""))


class LockNames:
    """The common part of `AdvisoryLock` and `AsyncAdvisoryLock`."""

    _public_name: ClassVar[str] = ""
    _counterpart: ClassVar[str]
    """The class that messages recommend for engines of the other kind."""
    _engine: Any
    _names: Sequence[Name]
    _namespace: str | None
    _token: bool
    _labels: tuple[str, ...]
    _made: tuple[str, ParamStyle, TableNames | None, LockSql] | None = None
    """The statements, with the namespace, style and tables (None without a token) that they were built for."""
    _found: tuple[LockManager, LockSql] | None = None
    """The last manager and its statements, which are reused if the engine has no separate lock engine."""

    def __init__(self, engine: object, names: Sequence[Name], namespace: str | None, token: bool) -> None:
        self._engine = engine
        self._names = tuple(names)
        self._namespace = namespace
        self._token = token
        # The keys are computed at first use, because the engine's namespace may be configured after this.
        check_names(self._names, namespace or "")
        if token:
            self._get_text(namespace or "")
        self._labels = list_labels(names)

    def _rename(self, names: Sequence[Name]) -> Self:
        other = object.__new__(type(self))
        LockNames.__init__(other, self._engine, names, self._namespace, self._token)
        return other

    def _in_terms_of(self, engine: HasDialect, config: Config, style: ParamStyle) -> LockSql:
        """Return the statements for this engine's namespace, driver and tables. They are built once and then reused."""
        namespace = config.namespace if self._namespace is None else self._namespace
        place = table_names_of(engine) if self._token else None
        made = self._made
        if made is None or made[:3] != (namespace, style, place):
            keys = resolve(self._names, namespace)
            sql = self._build_sql(keys, style)
            if place is not None:
                sql = TokenSql(keys[0], self._get_text(namespace), place, style)
            # This is a single assignment, because another thread must not combine the new namespace with the old keys.
            self._made = made = namespace, style, place, sql
        return made[3]

    def _build_sql(self, keys: tuple[LockKey, ...], style: ParamStyle) -> LockSql:
        return LockSql(keys, style)

    def _get_text(self, namespace: str) -> str:
        """Return the name under which the token is stored.

        Raises:
            ValueError: the number of names is not one, or the name is too long.
            TypeError: the name is a LockKey, which has no text.
        """
        if len(self._names) != 1:
            raise ValueError(
                f"token=True takes exactly one name, not {len(self._names)}, because a token belongs to one resource"
            )
        return qualify_name(self._names[0], namespace, "the name of a lock with a token")

    def __repr__(self) -> str:
        return f"<{type(self)._public_name or type(self).__name__} {', '.join(map(repr, self._labels))}>"


def look_on_connection(connection: Connection, keys: tuple[LockKey, ...]) -> list[Holder]:
    """Return the holders, queried on the caller's own connection.

    The query leaves no transaction open that was not open before.
    """
    began = not connection.in_transaction()
    try:
        return activity.find_holders(connection, keys)
    finally:
        if began:
            connection.rollback()
