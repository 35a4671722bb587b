"""Lock connections over sync drivers. A mutex keeps the monitor's probe and the unlock from running at the same time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pgfence._connections.caller_connection import CallerConnection
from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET, LockConnection
from pgfence._holds.carriers import THREADS
from pgfence._process.coroutines import run_sync
from pgfence._process.monitor import MONITOR

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import DBAPIConnection

    from pgfence._connections.drivers import DriverConnection
    from pgfence._holds.hold import Hold
    from pgfence._sql import server


class SyncLockConnection(LockConnection):
    carrier = THREADS

    def __init__(self, dbapi_connection: DBAPIConnection, driver: DriverConnection, facts: server.ServerInfo) -> None:
        super().__init__(dbapi_connection, driver, facts)
        self.turn = self._turn = threading.Lock()

    async def wait_for_probe(self) -> None:
        if not self._turn.acquire(timeout=RELEASE_BUDGET):
            self.abort()  # the server does not respond to the probe either, so aborting ends the probe
            self._turn.acquire()

    def probe(self, hold: Hold[LockConnection]) -> None:
        def ask() -> None:
            with self._turn:
                if self.hold is not hold:
                    return
                self.begin(STATEMENT_BUDGET)
                try:
                    run_sync(self.driver.ping)
                except Exception:
                    self.on_connection_lost("cut off")
                else:
                    hold.in_doubt = False
                finally:
                    self.statement_started = 0.0

        MONITOR.post(ask)


class SyncCallerConnection(CallerConnection, SyncLockConnection):
    """The caller's own connection, used for one lock. Statements run between the caller's transactions, in autocommit."""
