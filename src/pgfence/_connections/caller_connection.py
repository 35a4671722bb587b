"""Hold a lock on the caller's own connection."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Self

from sqlalchemy import event

from pgfence._connections.connect import judge
from pgfence._connections.connection import ConnectionGoneError, LockConnection
from pgfence._process.lifecycle import PROCESS
from pgfence._sql import server
from pgfence._sql.errors import translate_connect_error
from pgfence.errors import TransactionStateError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sqlalchemy import Connection, Engine
    from sqlalchemy.engine.interfaces import DBAPIConnection
    from sqlalchemy.pool import ConnectionPoolEntry

    from pgfence._connections.connect import R
    from pgfence._connections.drivers import DriverConnection
    from pgfence._holds.carriers import Carrier
    from pgfence._sql.params import Row
    from pgfence.config import PoolerSetting


class CallerConnection(LockConnection):
    """The caller's own connection, used for one lock.

    pgfence restores its autocommit mode, and closes it only to end a lock on it.
    """

    ours = False
    direct = False

    def __init__(
        self,
        connection: Connection,
        dbapi_connection: DBAPIConnection,
        driver: DriverConnection,
        facts: server.ServerInfo,
    ) -> None:
        super().__init__(dbapi_connection, driver, facts)
        self.connection = connection
        self._fairy = connection.connection
        self._closing = threading.RLock()
        """Held while the driver's connection is being closed, so that the pool does not give it to another user."""
        self._locks_on_it: list[CallerConnection] = connection.info.setdefault(_LOCKS, [])
        self._locks_on_it.append(self)
        pool = getattr(self._fairy, "_pool", connection.engine.pool)  # the engine has another pool after a dispose()
        # Not event.contains(), which does not find the listeners that dispose() copies to the new pool.
        if _on_pool_checkin not in tuple(pool.dispatch.checkin):
            event.listen(pool, "checkin", _on_pool_checkin)
        self.watch()
        event.listen(connection, "before_cursor_execute", self._guard)

    @classmethod
    async def borrow(cls, carrier: Carrier, connection: Connection, make_driver: type[DriverConnection]) -> Self:
        """Borrow a connection that is outside a transaction, without a round trip."""
        try:
            dbapi_connection = await carrier.call(lambda: connection.connection.dbapi_connection)
            assert dbapi_connection is not None
            driver = make_driver(connection.dialect.get_driver_connection(dbapi_connection))
            cls.check_usable(connection, dbapi_connection, driver)
        except Exception as error:
            if told := translate_connect_error(connection.engine, error):
                raise told from error
            raise
        known: tuple[DBAPIConnection, server.ServerInfo] | None = connection.info.get(_FACTS)
        facts = known[1] if known is not None and known[0] is dbapi_connection else server.UNKNOWN
        return cls(connection, dbapi_connection, driver, facts)

    async def learn(self, pooler: PoolerSetting, limit: float) -> None:
        """Read the facts about the server, check them, and cache them with the pooled connection.

        Raises:
            UnreachableError: the server does not respond within `limit` seconds.
            PoolerError, StandbyError, UnsupportedServerError: a session lock would not be safe on the connection.
        """
        engine, driver = self.connection.engine, self.driver.raw
        try:
            row = await self.fetch_row(engine, server.READ_FACTS, (), limit=limit)
            facts = server.ServerInfo.of(row, set_up=False)
            await self.carrier.call(lambda: judge(engine, facts, driver, pooler))
        except BaseException as error:
            self.give_up()
            if isinstance(error, Exception) and (told := translate_connect_error(engine, error)):
                raise told from error
            raise
        self.learn_facts(facts)
        self.connection.info[_FACTS] = self.dbapi_connection, facts

    @staticmethod
    def check_usable(connection: Connection, dbapi_connection: DBAPIConnection, driver: DriverConnection) -> None:
        """Raise an error if a session lock cannot be acquired on the connection in its current state."""
        if driver.busy:
            raise TransactionStateError(
                "this connection is in pipeline mode, where an earlier error would hide whether the lock was acquired."
                " Acquire the lock outside the pipeline"
            )
        if is_in_transaction(connection, dbapi_connection, driver):
            raise TransactionStateError(
                "a session lock must be acquired outside a transaction: commit or roll back first, or use an AUTOCOMMIT"
                " connection, AdvisoryLock(engine, ...).connect(), or a TransactionLock, which ends with the transaction"
            )

    def give_up(self) -> None:
        """Return the connection to its owner after the first statement failed, or close the connection if it is dead."""
        if self.dead is None:
            self.detach()
        else:
            self.close()

    def _guard(self, connection: Connection, *_: object) -> None:
        """Raise an error if SQLAlchemy has replaced the driver's connection."""
        # SQLAlchemy reconnects silently after a lost connection, and the statement would run without the lock.
        if connection.connection.dbapi_connection is not self.dbapi_connection:
            self.on_connection_lost(self.dead or "killed")
            hold = self.hold
            if hold is not None:
                raise hold.lost_error()

    @property
    def attached(self) -> bool:
        """Whether the driver's connection still belongs to the caller's Connection and to no other user."""
        connection = self.connection
        if self.closed or connection.closed or connection.invalidated:
            return False
        return connection.connection.dbapi_connection is self.dbapi_connection

    def check_attached(self) -> None:
        """Raise an error if the driver's connection may already belong to another user, before a statement runs on it."""
        if not self.attached:
            self.dead = self.dead or "returned"
            raise ConnectionGoneError("the Connection was closed")

    @property
    def is_in_transaction(self) -> bool:  # type: ignore[override]
        """Whether an open transaction currently blocks the release of the lock."""
        return (
            self.dead is None
            and self.attached
            and is_in_transaction(self.connection, self.dbapi_connection, self.driver)
        )

    @property
    def shared(self) -> bool:
        """Whether the caller's Connection still uses the driver's connection after another Connection was closed (StaticPool)."""
        return bool(getattr(self._fairy, "_counter", 0))

    def on_checkin(self, record: ConnectionPoolEntry) -> None:
        """End the lock because the Connection is returned to its pool. The pool opens another connection for the next user."""
        with self._closing:
            if self.closed:
                return
            self.detach()
            self.dead = self.dead or "returned"
            with contextlib.suppress(Exception):
                self.driver.close()
        # For an async driver the invalidation is soft. Otherwise the driver's close would be awaited, and a cancellation of
        # that wait would lose a pool slot.
        record.invalidate(soft=self.connection.dialect.is_async)
        self.on_connection_lost(self.dead)

    def detach(self, *, listed: bool = False) -> None:
        """Return the connection to its owner, unchanged.

        With `listed`, the connection stays in the list of connections that may hold a lock.
        """
        if self.closed:
            return
        self.closed = True
        if not listed:
            self._unlist()
        self.unwatch()
        # An interrupt in the constructor can leave the connection in the list without its listener.
        if event.contains(self.connection, "before_cursor_execute", self._guard):
            event.remove(self.connection, "before_cursor_execute", self._guard)

    def _unlist(self) -> None:
        if self in self._locks_on_it:
            self._locks_on_it.remove(self)

    def close(self) -> None:
        """Close the caller's connection, because a lock would remain on it, and invalidate it in SQLAlchemy."""
        PROCESS.notice_fork()
        with self._closing:
            attached = self.attached
            # The connection stays in the list until the driver's connection is closed, because a check-in by another thread waits
            # for that.
            self.detach(listed=attached)
            self.dead = self.dead or "killed"
            if attached:
                with contextlib.suppress(Exception):
                    self.driver.close()
                with contextlib.suppress(Exception):
                    self.invalidate()
                self._unlist()

    def invalidate(self) -> None:
        """Invalidate the connection in SQLAlchemy, because it is closed."""
        self.connection.invalidate()

    async def _send(self, engine: Engine, text: str, args: Sequence[object], prepare: bool) -> Row | None:
        return await self._use_autocommit(lambda: self.driver.fetch(text, args))

    async def _send_script(self, engine: Engine, script: tuple[str, ...]) -> bool:
        return await self._use_autocommit(lambda: self.driver.execute_script("; ".join(script)))

    async def _use_autocommit(self, ask: Callable[[], Awaitable[R]]) -> R:
        """Call `ask`, which sends a statement, in autocommit mode, and restore the previous mode."""
        self.check_attached()
        before = await self.driver.set_autocommit(True)
        try:
            return await ask()
        finally:
            # The error of the statement is more important, and a dead connection has no mode.
            with contextlib.suppress(Exception):
                await self.driver.set_autocommit(before)


def is_in_transaction(connection: Connection, dbapi_connection: DBAPIConnection, driver: DriverConnection) -> bool:
    """Return whether a transaction is open, even an aborted one."""
    # SQLAlchemy's view counts too: its begin() sends nothing until the first statement.
    return driver.in_transaction is not False or (connection.in_transaction() and not dbapi_connection.autocommit)


_FACTS = "pgfence.facts"
_LOCKS = "pgfence.locks"


def _on_pool_checkin(_: object, record: ConnectionPoolEntry) -> None:
    """End the locks on a connection that is returned to a pool."""
    # The next user of the connection would otherwise hold the lock.
    for session in list(record.info.get(_LOCKS, ())):
        if not session.shared:
            session.on_checkin(record)
