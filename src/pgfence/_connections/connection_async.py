"""Lock connections over async drivers. Each belongs to one event loop, and the driver may report its end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pgfence._connections.caller_connection import CallerConnection
from pgfence._connections.connect import run_without_loop
from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET, LockConnection
from pgfence._holds.carriers import TaskCarrier, keep_task, run_on_loop
from pgfence._process.lifecycle import make_weak_method
from pgfence._process.monitor import reason_of

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from pgfence._connections.drivers import DriverConnection
    from pgfence._holds.hold import Hold
    from pgfence._sql import server


class AsyncLockConnection(LockConnection):
    def __init__(self, dbapi_connection: DBAPIConnection, driver: DriverConnection, facts: server.ServerInfo) -> None:
        super().__init__(dbapi_connection, driver, facts)
        self.loop = asyncio.get_running_loop()
        self.carrier = TaskCarrier(self.loop)
        self._probing: asyncio.Future[None] | None = None
        """The running probe, if any: async drivers run one statement at a time."""
        if hasattr(driver.raw, "add_termination_listener"):
            # asyncio may notice the end and close the socket before the monitor wakes up, and epoll forgets closed sockets.
            self._listener = make_weak_method(self._on_termination)
            driver.raw.add_termination_listener(self._listener)

    def _on_termination(self, _: object) -> None:
        if not self.closed:
            self.on_connection_lost(reason_of(self.dup) if self.dup >= 0 else "killed")

    @property
    def turn(self) -> AsyncLockConnection:  # type: ignore[override]
        return self

    def acquire(self, _: bool, /) -> bool:
        """Return whether no probe is running."""
        return self._probing is None

    def release(self) -> None:
        """Do nothing, because a probe that starts now checks for itself whether the lock is still held."""

    async def wait_for_probe(self) -> None:
        if self._probing is not None:
            await asyncio.wait({self._probing}, timeout=RELEASE_BUDGET)
        if self._probing is not None:
            self.abort()  # the server does not respond to the probe either, so aborting ends the probe
            await asyncio.wait({self._probing})

    def probe(self, hold: Hold[LockConnection]) -> None:
        async def ask() -> None:
            self.begin(STATEMENT_BUDGET)
            try:
                await self.driver.ping()
            except Exception:
                self.on_connection_lost("cut off")
            else:
                hold.in_doubt = False
            finally:
                self.statement_started = 0.0
                self._probing = None

        def start() -> None:
            if self.hold is hold and self._probing is None:
                self._probing = asyncio.ensure_future(ask())
                keep_task(self._probing)

        run_on_loop(self.loop, start)


class AsyncCallerConnection(CallerConnection, AsyncLockConnection):
    """The caller's own connection, used for one lock. Statements run between the caller's transactions, in autocommit."""

    def detach(self, *, listed: bool = False) -> None:
        if not self.closed and hasattr(self.driver.raw, "remove_termination_listener"):
            self.driver.raw.remove_termination_listener(self._listener)
        super().detach(listed=listed)

    def invalidate(self) -> None:
        if self.connection.dialect.has_terminate:
            self.connection.invalidate()
        else:
            # This dialect awaits in its close method, although the driver's connection is already closed.
            run_without_loop(self.connection.invalidate)
