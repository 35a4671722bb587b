"""An advisory lock with a fencing token. One statement in one transaction takes the lock and the token.

The server function takes the transaction-level lock, then raises the token in the name's row, and then takes the session-level
lock, which can neither wait nor fail any more. So the function returns a token if the lock is held, and NULL otherwise. After
SQLSTATE 55P03, which occurs if the row stays locked for too long, no lock is held either. The function catches its own timeouts,
so that a wait does not write to the server's log.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from pgfence._sql import activity
from pgfence._sql.advisory import LockSql
from pgfence._sql.encoding import translate_text_errors
from pgfence._sql.errors import ErrorContext, raise_translated
from pgfence._sql.params import call, mark
from pgfence._sql.storage import LEASES
from pgfence._sql.ticket_queue import HAS_TICKETS
from pgfence.errors import TransactionStateError
from pgfence.keys import unqualify_name

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from pgfence._sql.params import ParamStyle
    from pgfence._sql.storage import TableNames
    from pgfence.keys import LockKey
    from pgfence.types import Holder

STRANGE_BACKEND = -1
"""The function's result if the statement is executed by a different server process than expected."""
ROW_WAIT = 2.0
"""Seconds that the function waits for the name's row, in addition to the wait for the lock."""
RETRIES = 10
"""The number of retries after SQLSTATE 40001, which a default isolation level above READ COMMITTED may cause."""


class TokenSql(LockSql):
    """The statements of a lock with a token, on one key."""

    __slots__ = ("lock_text", "lock_unless_queued", "name", "place")
    kind = "session lock"
    hands_over = False
    context = ErrorContext(
        LEASES,
        on_primary="A token is written to a row, so turn off default_transaction_read_only",
        read_only=TransactionStateError,
        deadlock=LockSql.context.deadlock,
        fewer_locks=LockSql.context.fewer_locks,
    )

    def __init__(self, key: LockKey, name: str, place: TableNames, style: ParamStyle) -> None:
        super().__init__((key,), style)
        self.name = name
        """The stored name to which the token belongs."""
        self.place = place
        asked = call(place, style, "lock_with_token_v2", "integer, bigint, text, integer, text, integer")
        self.lock_text = f"SELECT {asked}"
        self.lock_unless_queued = f"{self.lock_text} WHERE NOT {HAS_TICKETS.format(mark(style, 7))}"
        """As `lock_text`, with the base of the queue as an additional parameter; no row if other waiters have tickets."""

    @property
    def row(self) -> tuple[TableNames, str]:
        """The row of the lease table that holds the token."""
        return self.place, self.name

    def lock_args(self, backend_pid: int, milliseconds: int) -> tuple[object, ...]:
        """Return the parameters of `lock_text`; with 0 milliseconds, the statement does not wait for the lock."""
        return backend_pid, self.keys[0].value, self.name, milliseconds, socket.gethostname(), os.getpid()

    def holders(self, connection: Connection) -> list[Holder]:
        """Return the holders of the key and of a lease with that name, which also blocks the lock, in two round trips."""
        # Imported here, because most programs with locks have no leases, and a lock is seldom described.
        from pgfence._sql.lease import lease_sql

        look = lease_sql(self.place, self.style).look
        try:
            with translate_text_errors(connection, self.name):
                leases = connection.exec_driver_sql(look, (self.name,)).all()
        except DBAPIError as error:
            raise_translated(error, self.place, self.context)
            raise
        found = [activity.build_lease_holder(unqualify_name(self.name), row) for row in leases]
        sessions = activity.with_token(super().holders(connection), found)
        return sessions + [one for one in found if one.kind != "session lock"]
