"""A common interface to the drivers' own connections.

All connections must be in autocommit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from pgfence.errors import UnsupportedServerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sqlalchemy import Dialect

    from pgfence._sql.params import RawConnection, Row


_PING = "SELECT 1"

Heard: TypeAlias = "Callable[[str, str], object]"
"""A callback for the channel and payload of a notification."""


class DriverConnection(Protocol):
    """The interface of a driver's connection, sync or async."""

    raw: RawConnection
    """The driver's own connection."""
    pooled: bool
    """Whether the connection may go through a pooler, where a prepared statement must not outlive its transaction.

    The code that opens the connection sets it.
    """

    def __init__(self, driver: RawConnection) -> None: ...

    def close(self) -> None:
        """Close the connection without waiting."""
        ...

    @property
    def pid(self) -> int:
        """The id of the server process, as the driver received it when it connected."""
        ...

    def fileno(self) -> int:
        """Return the socket's current descriptor. Once the connection is closed, another file may reuse the number."""
        ...

    @property
    def in_transaction(self) -> bool | None:
        """Whether a transaction is open, or None if it is aborted."""
        ...

    @property
    def busy(self) -> bool:
        """Whether the connection is in a mode in which results cannot be read immediately, such as a pipeline."""
        ...

    def fetch(self, text: str, args: Sequence[object], *, prepare: bool = False) -> Awaitable[Row]:
        """Run a statement and return its first row."""
        ...

    async def execute_script(self, text: str) -> bool:
        """Run several statements at once, and return whether the last one returned a row."""
        ...

    async def set_autocommit(self, value: bool) -> bool:
        """Set the autocommit mode, and return the previous one."""
        ...

    async def ping(self) -> None:
        """Run a trivial query on a separate cursor."""
        ...

    reads_alone: bool
    """Whether its event loop reads from the connection even while no statement is running."""

    async def listen(self, text: str, channel: str, *, on: bool) -> None:
        """Run a LISTEN or UNLISTEN statement."""
        ...

    def on_notify(self, heard: Heard) -> None:
        """Call `heard` with the channel and payload of each notification, in the thread that reads from the connection."""
        ...

    def poll_notifies(self) -> None:
        """Read the notifications that have arrived, without waiting. Raise an error if the connection has ended."""
        ...


class _LibpqBase:
    """The common part of the drivers based on libpq."""

    pooled = False
    reads_alone = False
    raw: RawConnection
    _on_notify: Heard

    @property
    def pid(self) -> int:
        pid: int = self.raw.info.backend_pid
        return pid

    def fileno(self) -> int:
        fd: int = self.raw.fileno()
        return fd


class _SyncBase(_LibpqBase):
    async def set_autocommit(self, value: bool) -> bool:
        before: bool = self.raw.autocommit
        if before != value:
            self.raw.autocommit = value
        return before


class _PsycopgBase(_LibpqBase):
    """The common part of psycopg's connections. `psycopg` is already imported, because its dialect is in use."""

    def __init__(self, driver: RawConnection) -> None:
        from psycopg.rows import tuple_row

        self.raw = driver
        self.cursor = driver.cursor(row_factory=tuple_row)
        self._sent: set[str] = set()

    def _should_prepare(self, text: str, *, wanted: bool) -> bool:
        """Return whether to prepare a statement. Only its second and later uses are worth the round trip for preparing."""
        if not wanted or self.pooled:
            return False
        if text in self._sent:
            return True
        self._sent.add(text)
        return False

    @property
    def in_transaction(self) -> bool | None:
        from psycopg.pq import TransactionStatus

        status = self.raw.info.transaction_status
        return None if status == TransactionStatus.INERROR else bool(status != TransactionStatus.IDLE)

    @property
    def busy(self) -> bool:
        from psycopg.pq import PipelineStatus

        return bool(self.raw.pgconn.pipeline_status != PipelineStatus.OFF)

    def on_notify(self, heard: Heard) -> None:
        self._on_notify = heard
        self.raw.add_notify_handler(lambda notify: heard(notify.channel, notify.payload))

    def poll_notifies(self) -> None:
        pgconn, encoding = self.raw.pgconn, self.raw.info.encoding
        pgconn.consume_input()
        while (news := pgconn.notifies()) is not None:
            self._on_notify(news.relname.decode(encoding), news.extra.decode(encoding))

    def close(self) -> None:
        # libpq's own function sends Terminate, never waits, and works for both connection classes.
        self.raw.pgconn.finish()


class PsycopgConnection(_SyncBase, _PsycopgBase):
    async def listen(self, text: str, channel: str, *, on: bool) -> None:
        self.raw.execute(text)

    async def ping(self) -> None:
        self.raw.execute(_PING)

    async def fetch(self, text: str, args: Sequence[object], *, prepare: bool = False) -> Row:
        # Each prepared wait that fails leaves a prepared statement behind, so waits are never prepared.
        self.cursor.execute(text, args, prepare=self._should_prepare(text, wanted=prepare))
        row: Row = self.cursor.fetchone()
        return row

    async def execute_script(self, text: str) -> bool:
        self.cursor.execute(text, prepare=False)
        while self.cursor.nextset():
            pass
        return self.cursor.fetchone() is not None


class AsyncPsycopgConnection(_PsycopgBase):
    async def listen(self, text: str, channel: str, *, on: bool) -> None:
        await self.raw.execute(text)

    async def ping(self) -> None:
        await self.raw.execute(_PING)

    async def fetch(self, text: str, args: Sequence[object], *, prepare: bool = False) -> Row:
        await self.cursor.execute(text, args, prepare=self._should_prepare(text, wanted=prepare))
        row: Row = await self.cursor.fetchone()
        return row

    async def execute_script(self, text: str) -> bool:
        await self.cursor.execute(text, prepare=False)
        while self.cursor.nextset():
            pass
        return await self.cursor.fetchone() is not None

    async def set_autocommit(self, value: bool) -> bool:
        before: bool = self.raw.autocommit
        if before != value:
            await self.raw.set_autocommit(value)
        return before


class Psycopg2Connection(_SyncBase):
    def __init__(self, driver: RawConnection) -> None:
        from psycopg2.extensions import cursor

        self.raw = driver
        self.cursor = driver.cursor(cursor_factory=cursor)

    @property
    def in_transaction(self) -> bool | None:
        from psycopg2.extensions import TRANSACTION_STATUS_IDLE, TRANSACTION_STATUS_INERROR

        status = self.raw.info.transaction_status
        return None if status == TRANSACTION_STATUS_INERROR else bool(status != TRANSACTION_STATUS_IDLE)

    @property
    def busy(self) -> bool:
        return False

    async def ping(self) -> None:
        with self.raw.cursor() as cursor:
            cursor.execute(_PING)

    def on_notify(self, heard: Heard) -> None:
        self._on_notify = heard

    def poll_notifies(self) -> None:
        self.raw.poll()
        while self.raw.notifies:
            news = self.raw.notifies.pop(0)
            self._on_notify(news.channel, news.payload)

    async def listen(self, text: str, channel: str, *, on: bool) -> None:
        with self.raw.cursor() as cursor:
            cursor.execute(text)

    async def fetch(self, text: str, args: Sequence[object], *, prepare: bool = False) -> Row:
        self.cursor.execute(text, args)
        row: Row = self.cursor.fetchone()
        return row

    async def execute_script(self, text: str) -> bool:
        self.cursor.execute(text)
        return self.cursor.fetchone() is not None

    def close(self) -> None:
        self.raw.close()


class AsyncpgConnection:
    pooled = False
    reads_alone = True
    _on_notify: Heard

    def __init__(self, driver: RawConnection) -> None:
        self.raw = driver

    @property
    def pid(self) -> int:
        pid: int = self.raw.get_server_pid()
        return pid

    def fileno(self) -> int:
        return find_descriptor(self.raw)

    @property
    def in_transaction(self) -> bool | None:
        # asyncpg does not distinguish an aborted transaction from an open one.
        return bool(self.raw.is_in_transaction())

    @property
    def busy(self) -> bool:
        return False

    async def ping(self) -> None:
        await self.raw.execute(_PING)

    def on_notify(self, heard: Heard) -> None:
        self._on_notify = heard

    def poll_notifies(self) -> None:
        """Do nothing, because the event loop reads notifications."""

    async def listen(self, text: str, channel: str, *, on: bool) -> None:
        # asyncpg sends the statement itself, and ignores notifications on channels without a listener.
        change = self.raw.add_listener if on else self.raw.remove_listener
        await change(channel, self._on_notification)

    def _on_notification(self, _driver: object, _pid: int, channel: str, payload: str) -> None:
        self._on_notify(channel, payload)

    def fetch(self, text: str, args: Sequence[object], *, prepare: bool = False) -> Awaitable[Row]:
        if self.pooled:
            return self._fetch_unprepared(text, args)
        row: Awaitable[Row] = self.raw.fetchrow(text, *args)
        return row

    async def _fetch_unprepared(self, text: str, args: Sequence[object]) -> Row:
        # asyncpg always prepares, in a separate round trip. A transaction keeps both round trips on the same server connection.
        async with self.raw.transaction():
            statement = await self.raw.prepare(text, name="")
            row: Row = await statement.fetchrow(*args)
            return row

    async def execute_script(self, text: str) -> bool:
        status: str = await self.raw.execute(text)
        return status == "SELECT 1"

    async def set_autocommit(self, value: bool) -> bool:
        # asyncpg never begins a transaction implicitly.
        return True

    def close(self) -> None:
        self.raw.terminate()


SYNC_DRIVERS: dict[str, type[DriverConnection]] = {"psycopg": PsycopgConnection, "psycopg2": Psycopg2Connection}
ASYNC_DRIVERS: dict[str, type[DriverConnection]] = {
    "psycopg": AsyncPsycopgConnection,
    "psycopg_async": AsyncPsycopgConnection,
    "asyncpg": AsyncpgConnection,
}


def choose_driver_connection(dialect: Dialect) -> type[DriverConnection]:
    """Return the connection class for a dialect's driver.

    Raises:
        UnsupportedServerError: the driver is not supported, or does not match the engine (asyncpg under a sync Engine).
    """
    drivers = ASYNC_DRIVERS if dialect.is_async else SYNC_DRIVERS
    if dialect.driver not in drivers:
        raise UnsupportedServerError(
            f"the driver {dialect.driver} does not support {'async' if dialect.is_async else 'sync'} engines: use one of"
            f" {', '.join(sorted(drivers))}"
        )
    return drivers[dialect.driver]


def find_descriptor(driver: RawConnection) -> int:
    """Return the descriptor of the socket of a driver's connection, or -1 if the driver does not expose it."""
    if hasattr(driver, "fileno"):
        fd: int = driver.fileno()
        return fd
    # asyncpg gives no public access to its socket. Without the descriptor, only asyncpg's termination listener reports a loss.
    transport = getattr(driver, "_transport", None)
    socket = transport.get_extra_info("socket") if transport is not None else None
    return -1 if socket is None else int(socket.fileno())
