"""Wait for a lock in the server. The first slice waits in the server's own queue, and the others in the order of the tickets.

A waiter far from the front of a queue that does not move sleeps on the client instead, and looks now and then whether it moves.
A look costs the server less than a slice. When the queue moves again, the waiters at the front, which never sleep, get the lock
while the others wake up.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pgfence._connections.connection import RELEASE_BUDGET, WAIT_GRACE
from pgfence._holds.wait_plan import LONGEST_SLEEP, choose_sleep, to_milliseconds
from pgfence._process.clock import clock
from pgfence._sql.read_write import WriteSql, build_turnstile
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, sqlstate_of
from pgfence._sql.ticket_queue import (
    AWAKE,
    CHECK_TICKETS,
    COUNT_TICKETS,
    LEAVE,
    build_batch,
    build_look,
    build_wait_for_batch,
    build_wait_for_keys,
    build_wait_for_turn,
)
from pgfence._sql.token import TokenSql

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from pgfence._connections.connection import LockConnection
    from pgfence._holds.wait_plan import Wait
    from pgfence._locks.acquisition import Acquisition
    from pgfence._sql.advisory import LockSql


COUNT_EVERY = 32
"""The number of slices after which a waiter at the front of the queue counts the tickets ahead again. They only become fewer,
unless a count missed an owner between two slices."""
LOOK_EVERY = 4
"""The number of slices after which a waiter checks again whether the owners of the tickets ahead still make progress."""
STILL_FOR = 1.5
"""Seconds without a change at the front of the queue after which a waiter sleeps."""
LOOKS = 20
"""The least number of looks after which a waiter that sleeps checks the tickets again, so that it notices if all waiters at the
front have stopped. A waiter with more tickets ahead looks as often as there are tickets."""
SIGN_EVERY = 2.0
"""Seconds after which a waiter that sleeps gives another sign that it has not stopped."""


class ServerWait:
    """The wait of one contender on its connection. After an error its state is unknown, and the connection is closed."""

    __slots__ = (
        "ahead",
        "count_at",
        "engine",
        "front",
        "gave_sign",
        "has_batch",
        "has_ticket",
        "has_turn",
        "has_turnstile",
        "looks",
        "session",
        "sleeps",
        "slices",
        "sql",
        "still_since",
    )

    def __init__(self, engine: Engine, session: LockConnection, sql: LockSql) -> None:
        self.engine = engine
        self.session = session
        self.sql = sql
        self.has_batch = False
        self.has_ticket = False
        self.has_turn = False
        self.has_turnstile = False
        self.slices = 0
        self.count_at: float = 1 if session.ours and not isinstance(sql, WriteSql) else math.inf
        """The number of slices after which it counts the tickets ahead. Writers, and waits on your own Connection, never sleep."""
        self.sleeps = False
        self.looks = 0
        """How often it still looks before it checks the tickets again."""
        self.front: int | None = None
        """The first ticket of the queue at the last check, if enough others wait in the server."""
        self.ahead = 0
        self.still_since = 0.0
        self.gave_sign = 0.0

    async def run_step(self, step: Wait, call: Acquisition[LockSql]) -> bool | None:
        """Wait for at most one slice. Return whether the lock was granted, or None if the waiter needs a ticket now."""
        if isinstance(self.sql, WriteSql):
            return await self._wait_as_writer(self.sql, step.seconds, call)
        # None is returned immediately, before a query for the holders, during which other waiters would take tickets.
        if not step.queued:
            return await self.wait_without_ticket(step.seconds)
        if self.sleeps and await self._sleep(call):
            return False
        if not self.has_turn and not await self.wait_for_turn(step.seconds):
            return False
        return await self.wait_in_turn(min(step.seconds, call.left))

    async def _check_tickets(self) -> None:
        """Find the next ticket ahead whose owner has not stopped, and decide whether to go on sleeping."""
        row = await self.session.fetch_row(self.engine, CHECK_TICKETS, (), limit=RELEASE_BUDGET)
        next_ahead, front, ahead = row
        self.has_turn = not next_ahead
        self._note_front(front, ahead)

    def _note_front(self, front: int | None, ahead: int) -> None:
        """Decide whether to sleep: behind enough others that wait in the server, in a queue that does not move."""
        self.ahead = ahead
        if front != self.front:
            self.front, self.still_since = front, clock()
        self.sleeps = front is not None and clock() - self.still_since >= STILL_FOR
        self.looks = max(LOOKS, self.ahead)

    async def _sleep(self, call: Acquisition[LockSql]) -> bool:
        """Look whether the queue has moved, and sleep on the client if not. Return whether it slept."""
        session, left = self.session, call.left - LONGEST_SLEEP
        if left <= 0:  # the end of the wait is spent in the server, so that a lock that becomes free then is not missed
            return False
        if not self.looks:
            await self._check_tickets()
        if not self.sleeps or await self._has_moved():
            self.sleeps, self.slices, self.count_at = False, 0, 1
            return False
        session.alarm = session.carrier.make_event()
        try:
            if session.dead is None:  # checked after the event exists, because another thread reports the loss
                await session.alarm.wait(min(choose_sleep(self.ahead), left), call.cancel)
        finally:
            session.alarm = None
        return True

    async def _has_moved(self) -> bool:
        """Return whether the first ticket, or the one ahead, was returned since they were checked."""
        assert self.front is not None
        now, self.looks = clock(), self.looks - 1
        gives_sign = now - self.gave_sign >= SIGN_EVERY
        text, args = build_look(self.sql.base, self.front, self.sql.style, gives_sign=gives_sign)
        if gives_sign:
            self.gave_sign = now
        return bool(await self.session.fetch_value(self.engine, text, args, limit=WAIT_GRACE))

    async def _wait_as_writer(self, sql: WriteSql, length: float, call: Acquisition[LockSql]) -> bool:
        """Wait for one slice in the order of the tickets, or together with a writer whose turn it is.

        The writer with the turnstile is the first one. When it has its turn, it waits for the readers that hold the lock now,
        and all other writers wait for the key at the same time. They are served one after the other, before the next
        readers.
        """
        if not self.has_turnstile:
            self.has_turnstile = await self._lock_or_unlock(build_turnstile(sql.keys, sql.style, on=True))
        # A millisecond is enough to take the ticket, and to see whether it is the first.
        if not self.has_turn and not await self.wait_for_turn(0.0):
            if not self.has_turnstile:
                statements = build_wait_for_batch(sql.keys, to_milliseconds(length))
                if not await self.session.run_script(self.engine, statements, limit=length + WAIT_GRACE):
                    return False
            else:
                if not self.has_batch:
                    self.has_batch = await self._lock_or_unlock(build_batch(sql.keys, sql.style, closed=True))
                if not await self.wait_for_turn(length):
                    return False
        await self._open_batch()
        granted = await self.wait_in_turn(min(length, call.left))
        if granted:
            await self._open_turnstile()
        return granted

    async def _lock_or_unlock(self, statement: tuple[str, tuple[object, ...]]) -> bool:
        text, args = statement
        return bool(await self.session.fetch_value(self.engine, text, args, limit=RELEASE_BUDGET))

    async def _open_batch(self) -> None:
        if self.has_batch and not await self._lock_or_unlock(build_batch(self.sql.keys, self.sql.style, closed=False)):
            self.session.close_after_use = True
        self.has_batch = False

    async def _open_turnstile(self) -> None:
        if self.has_turnstile and not await self._lock_or_unlock(
            build_turnstile(self.sql.keys, self.sql.style, on=False)
        ):
            self.session.close_after_use = True
        self.has_turnstile = False

    async def wait_without_ticket(self, length: float) -> bool | None:
        """Wait for up to `length` seconds in the server's own queue.

        Return True if the lock was granted, False if the time has passed, and None immediately if other waiters have tickets.
        """
        session, sql, milliseconds = self.session, self.sql, to_milliseconds(length, len(self.sql.keys))
        if isinstance(sql, TokenSql):
            return await session.lock_with_token(self.engine, sql, milliseconds, unless_queued=True)
        try:
            args, limit = sql.wait_args(milliseconds), length + WAIT_GRACE
            row = await session.fetch_row(self.engine, sql.wait_text, args, limit=limit, prepare=False)
        except Exception as error:
            if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                return False
            raise
        return True if row is not None and row[0] else None

    async def wait_for_turn(self, length: float) -> bool:
        """Wait for up to `length` seconds until this waiter's ticket is the first. The first call takes the ticket."""
        self.slices += 1
        statements = build_wait_for_turn(
            self.sql.keys,
            to_milliseconds(length),
            has_ticket=self.has_ticket,
            looks=self.slices % LOOK_EVERY == 0,
        )
        self.has_turn = await self.session.run_script(self.engine, statements, limit=length + WAIT_GRACE)
        self.has_ticket = True
        if not self.has_turn and self.slices >= self.count_at and length:
            row = await self.session.fetch_row(self.engine, COUNT_TICKETS, (), limit=RELEASE_BUDGET)
            self._note_front(*row)
            self.count_at = self.slices + (COUNT_EVERY if self.ahead < AWAKE else LOOK_EVERY)
        return self.has_turn

    async def wait_in_turn(self, length: float) -> bool:
        """Wait for up to `length` seconds for the lock, with the first ticket, which is returned with the grant or by `leave`."""
        session, sql, milliseconds = self.session, self.sql, to_milliseconds(length, len(self.sql.keys))
        if not isinstance(sql, TokenSql):
            statements = build_wait_for_keys(sql.keys, milliseconds, shared=sql.shared)
            return await session.run_script(self.engine, statements, limit=length + WAIT_GRACE)
        granted = bool(await session.lock_with_token(self.engine, sql, milliseconds))
        if granted:
            await self.leave()
        return granted

    async def leave(self) -> None:
        """Return the ticket, and open the turnstile and the batch."""
        await self._open_batch()
        await self._open_turnstile()
        if not self.has_ticket:
            return
        if await self.session.fetch_value(self.engine, LEAVE, (), limit=RELEASE_BUDGET) is False:
            # The ticket was no longer held. What released it may have released the lock too.
            self.session.close_after_use = True
