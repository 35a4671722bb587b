"""The statements of leases, each on a connection that is kept for nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pgfence._connections.connection import RELEASE_BUDGET, STATEMENT_BUDGET
from pgfence._connections.pool import LockPool
from pgfence._leases import terms
from pgfence._leases.answers import is_rejection, is_retryable, statement_error
from pgfence._process import threads
from pgfence._process.clock import clock
from pgfence._process.lifecycle import PROCESS
from pgfence._sql.errors import missing_tables_error
from pgfence._sql.lease import lease_sql
from pgfence._sql.params import style_of
from pgfence._sql.sqlstate import NO_RIGHT
from pgfence._sql.storage import LEASES, WHERE
from pgfence._sql.tables import build_check, judge
from pgfence.errors import SchemaError, UnreachableError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine

    from pgfence._connections.connection import LockConnection
    from pgfence._holds.carriers import Carrier
    from pgfence._leases.acquisition import LeaseAcquisition
    from pgfence._leases.terms import LeaseKind
    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.config import Config


class LeaseStatements:
    """What is asked of one engine's server, for the threads of this process or for the tasks of one loop."""

    family: ClassVar[LeaseKind] = "lease"
    noun: ClassVar[str] = "the lease"
    needed: ClassVar[int] = LEASES
    """The version of the tables that these grants need."""
    warm: ClassVar[int] = 1
    """How many idle connections are kept."""
    tells: ClassVar[bool] = True
    """Whether a release is told of (NOTIFY)."""

    def __init__(self, engine: Engine, config: Config, carrier: Carrier) -> None:
        threads.require_native_threads()
        self.engine = engine
        self.config = config
        self.carrier = carrier
        self.style: ParamStyle = style_of(engine.dialect)
        self.pid = PROCESS.pid
        self.pool = LockPool(engine, config, carrier, _hold_nothing, any_pooler=True, warm=self.warm)
        self._checked: set[TableNames] = set()
        """Where the tables were found to be as they should."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop whose tasks share it."""
        return self.carrier.loop

    async def _checkout(self, call: LeaseAcquisition | None = None) -> LockConnection:
        left = RELEASE_BUDGET if call is None else max(call.left, RELEASE_BUDGET)
        session = await self.pool.checkout(left, cancel=call.cancel if call else None)
        if session is None:
            raise self.build_no_connection_error(call)
        return session

    def build_no_connection_error(self, call: LeaseAcquisition | None) -> Exception:
        """Return that all connections are in use."""
        if call is not None and call.waits:
            return call.build_no_connection_error()
        return UnreachableError("all connections for leases are in use (max_lock_connections)")

    async def _ask(
        self, place: TableNames, text: str, args: Sequence[object], *, limit: float = STATEMENT_BUDGET
    ) -> Any:
        """Run one statement on a session that holds nothing, and return its row."""
        session = await self._checkout()
        kept = False
        try:
            row = await session.fetch_row(self.engine, text, args, limit=limit)
            kept = True
        except Exception as error:
            kept = is_rejection(session, error)
            if told := statement_error(self, error, place, server_spoke=kept):
                raise told from error
            raise
        finally:
            (self.pool.checkin if kept else self.pool.discard)(session)
        return row

    async def execute_with_retry(
        self,
        place: TableNames,
        text: str,
        args: Sequence[object],
        seconds: float,
        again: Callable[[BaseException], bool] = is_retryable,
    ) -> Any:
        """Run a statement that may be repeated until the server answers, for about so many seconds, and return its row.

        Args:
            place: of the tables.
            text: the statement.
            args: its parameters.
            seconds: after which no other try is made.
            again: says after which errors one is made.

        Raises:
            UnreachableError: it has not answered: nobody knows whether it was done.
            Exception: what the server said.
        """
        until, failures = clock() + seconds, 0
        while True:
            try:
                return await self._ask(place, text, args, limit=RELEASE_BUDGET)
            except Exception as error:
                failures += 1
                if clock() > until or not again(error):
                    raise
            await self.carrier.sleep(terms.retry_after(failures, 10.0))

    async def verify(self, place: TableNames, limit: float = RELEASE_BUDGET) -> None:
        """Look once whether the tables are as they should be.

        Raises:
            SchemaError: they are not.
        """
        if place in self._checked:
            return
        text = build_check(place, self.needed)
        if self.style != "numeric":
            text = text.replace("%", "%%")
        try:
            row = await self._ask(place, text, (), limit=limit)
        except SchemaError as error:
            if error.sqlstate == NO_RIGHT:
                raise
            where = await self._ask(place, WHERE, (), limit=limit)
            raise missing_tables_error(place, self.needed, error.sqlstate, where) from error.__cause__
        if refusal := judge(row, place, self.needed):
            raise refusal
        self._checked.add(place)

    async def look(self, place: TableNames, stored: str) -> Any:
        """Return the row of `look`, or None when nobody has it."""
        await self.verify(place)
        return await self._ask(place, lease_sql(place, self.style).look, (stored,))


def _hold_nothing(_: object) -> None:
    """Sessions of leases hold nothing: one that dies is found dead when it is next wanted."""
