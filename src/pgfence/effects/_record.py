"""What both twins of an attempt at work know and say. No I/O."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pgfence._connections.connection import RELEASE_BUDGET
from pgfence._holds.events import emit_event
from pgfence._leases.answers import ask_again
from pgfence._leases.heartbeat.tasks import ReleaseTask, row_until
from pgfence._process.clock import clock
from pgfence._sql.effects import effect_sql
from pgfence._sql.encoding import TextError
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, sqlstate_of
from pgfence.effects._ends import lapsed, note_of
from pgfence.errors import AttemptLostError, IdempotencyMisuseError, LockNotHeldError, UnreachableError

if TYPE_CHECKING:
    from pgfence._leases.grant import Grant
    from pgfence._sql.effects import EffectSql
    from pgfence._sql.storage import TableNames
    from pgfence.effects._ends import Lapse
    from pgfence.effects._manager import EffectManager
    from pgfence.effects._wanted import EffectKey, Reply

    Statement = tuple[TableNames, str, tuple[Any, ...]]

COMPLETE = -2
"""What the server answers to complete() where it was committed before."""
_TROUBLE = ("53", "57", "58", "XX")
"""Classes of errors by which a server speaks of itself: a full disk, an operator's cancel. Later it may answer."""
LONGEST_PATIENCE = 30.0
"""Seconds that the end of an attempt waits for a server that does not answer, at most."""


class Record:
    """An attempt at work: what was claimed, and what is known of it."""

    __slots__ = ("__weakref__", "_grant", "_inside", "_manager", "_steps", "wanted")

    def __init__(self, wanted: EffectKey, manager: EffectManager, grant: Grant) -> None:
        self.wanted = wanted
        self._manager: Any = manager
        self._grant = grant
        self._inside = False
        """Whether a transaction of the caller was told to end it: until that is over, nobody else gets at the row."""
        self._steps: dict[str, str] = {name: json.dumps(value) for name, value in grant.checkpoint.items()}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number} at {self.wanted.scope!r} {self.wanted.key!r}>"

    def __del__(self) -> None:
        grant = getattr(self, "_grant", None)  # an interrupt may have torn its making
        if grant is not None and not grant.released and grant.ours:
            grant.dropped = True
            self._manager.abandon(grant)

    @property
    def number(self) -> int:
        """Which attempt it is: 1 for the first. It grows with each, so what is stored with a lower one is older."""
        assert self._grant.token is not None
        return self._grant.token

    @property
    def steps(self) -> dict[str, str]:
        """What attempts before this one, and this one, have saved, as JSON."""
        return self._steps

    @property
    def key(self) -> str:
        """What the client repeats."""
        return self.wanted.key

    @property
    def ours(self) -> bool:
        """Whether this process has claimed it, and not the parent of a forked child."""
        return self._grant.ours

    @property
    def place(self) -> TableNames:
        """Of the tables."""
        return self._grant.place

    def remaining(self) -> float:
        """Return the seconds for which this process believes in its claim, 0.0 when it is lost or over. No I/O."""
        return self._grant.remaining()

    def check(self) -> None:
        """Raise unless the claim stands as far as this process knows. No I/O.

        Raises:
            AttemptLostError: it was lost.
            IdempotencyMisuseError: the attempt has ended, or this is a forked child.
        """
        self.expect_unfinished()
        if self._grant.state == "lost":
            raise self._lost(None)

    def expect_unfinished(self) -> None:
        """Raise if the attempt has ended here. No I/O.

        Raises:
            IdempotencyMisuseError: the attempt has ended, or this is a forked child.
        """
        if self._grant.released or not self._grant.ours:
            raise self._over()

    def let_lapse(self, ended: str = "") -> None:
        """Stop renewing: it is not known what the attempt did, until its claim ends. No I/O: a note is sent in the background.

        Args:
            ended: what it ended with, for the next caller; empty for no note.
        """
        self._stop()
        if ended and self.ours:
            self._note_later(ended)

    def lapsed(self, what: str, row: Lapse | None = None) -> str:
        """Say what becomes of the key after `let_lapse` or `lapse`."""
        return lapsed(self.wanted, self.number, what, row, self._left)

    def freed(self, what: str, answer: bool | None) -> str:
        """Say what becomes of the key after `free`, whose answer this is."""
        if answer is False:
            return f"attempt {self.number} at {self.wanted} ended with {what} after another attempt had taken over"
        free = (
            "the key is free" if answer else f"the server gave no answer, and the key is free within {self._left:.1f} s"
        )
        return (
            f"attempt {self.number} at {self.wanted} ended with {what}, which is named in free=: {free}. The next call runs"
            f" attempt {self.number + 1}"
        )

    def recorded(self, what: str) -> str:
        """Say what becomes of the key after `finish("failed", ...)`."""
        return (
            f"attempt {self.number} at {self.wanted} ended with {what}, which is named in record=: it is stored as the result,"
            f" and for {self.wanted.keep:g} s calls with this key raise it again"
        )

    def inside(self, text: str) -> tuple[TableNames, tuple[Any, ...]]:
        """Return what `finish_inside` needs to store a result in the caller's transaction."""
        self._inside = True
        return self._grant.place, self._finish("done", text, None, inside=True)[2]

    def expect(self, answer: int | None) -> None:
        """Judge the answer of `finish_inside`, or of a step.

        Raises:
            AttemptLostError: another attempt counts by now.
            IdempotencyMisuseError: the session sees no such key; or a transaction that completed it was committed before.
        """
        if answer is None and self._inside and self._grant.state == "held":
            raise IdempotencyMisuseError(
                f"{self.wanted} is not in the database of this session: the claim was made in the one of the effect's engine"
            )
        if answer == COMPLETE:
            raise IdempotencyMisuseError(
                f"attempt {self.number} at {self.wanted} is complete already: a transaction with its result was committed"
            )
        if answer != self.number:
            self._manager.heartbeat.drop(self._grant)
            self._grant.lose("superseded")
            raise self._lost(answer)

    # ------------------------------------------------------------ for the twins

    @property
    def _sql(self) -> EffectSql:
        return effect_sql(self._grant.place, self._manager.style)

    @property
    def _left(self) -> float:
        """Seconds until the claim ends, as far as this process knows."""
        return max(0.0, row_until(self._grant) - clock())

    @property
    def _mine(self) -> tuple[str, str, int]:
        return self._grant.stored, str(self._grant.lease_id), self.number

    @property
    def _patience(self) -> float:
        left = row_until(self._grant) - clock()
        return min(max(left, RELEASE_BUDGET), LONGEST_PATIENCE)

    def _again(self, error: BaseException) -> bool:
        """Say whether to try again: a row that is locked is so by the transaction that was told to end the attempt."""
        return isinstance(error, UnreachableError) if self._inside else ask_again(error)

    def _step(self, name: str, text: str) -> Statement:
        return self._grant.place, self._sql.step, (*self._mine, name, text)

    def _finish(self, status: str | None, text: str | None, reply: Reply | None, *, inside: bool = False) -> Statement:
        told: tuple[Any, ...] = (None, None, None)
        if reply is not None:
            told = reply.status, json.dumps(reply.headers), reply.body
        return self._grant.place, self._sql.finish, (*self._mine, self.wanted.keep, status, text, *told, not inside)

    def _free(self) -> Statement:
        return self._grant.place, self._sql.free, self._mine

    def _stop(self) -> None:
        """Stop renewing, unless that was done before."""
        with suppress(LockNotHeldError):
            self._manager.let_lapse(self._grant)

    def _note(self, ended: str) -> Statement:
        return self._grant.place, self._sql.end, (*self._mine, note_of(ended))

    def _note_later(self, ended: str) -> None:
        grant, args = self._grant, self._note(ended)[2]
        self._manager.heartbeat.end_later(
            ReleaseTask(grant.place, lambda sql: sql.end, args, row_until(grant), grant.family)
        )

    def _leave(self) -> None:
        """Take the right to end it, and stop its heartbeat."""
        try:
            self._manager.detach(self._grant)
        except LockNotHeldError:
            raise self._over() from None

    def _saved(self, name: str, text: str, row: Any) -> None:
        self.expect(row[0])
        self._steps[name] = text

    def _finished(self, row: Any) -> None:
        event = "released" if row[0] == self.number else "lost"
        grant = self._grant
        emit_event(grant.config, event, grant.names, grant.token, owner=grant.label, lease_id=grant.lease_id)
        if row[0] != self.number:
            raise self._lost(row[0])

    def _confirmed(self, row: Any) -> bool:
        if row[0] == 0:
            return False
        self._finished(row)
        return True

    def _freed(self, row: Any) -> bool:
        event = "released" if row[0] == "released" else "lost"
        grant = self._grant
        emit_event(grant.config, event, grant.names, grant.token, owner=grant.label, lease_id=grant.lease_id)
        return event == "released"

    def _unfinished(self, args: tuple[Any, ...], error: BaseException) -> None:
        """Have it stored in the background, unless the server itself has refused what is to be stored."""
        if isinstance(error, TextError):
            return  # it can never be stored
        silent = isinstance(error, UnreachableError) or sqlstate_of(error) is None
        if silent or str(sqlstate_of(error)).startswith(_TROUBLE):
            if not silent:
                error.add_note(
                    f"the server is asked again for a while to store the result of attempt {self.number} at {self.wanted}: ask"
                    " for the key again to learn what came of it"
                )
            grant = self._grant
            args = grant.stored, *args
            # The server decides by the id of the claim, so that it does no harm to come late.
            until = max(row_until(grant), clock() + LONGEST_PATIENCE)
            self._manager.heartbeat.end_later(
                ReleaseTask(grant.place, lambda sql: sql.finish_late, args, until, grant.family)
            )

    def _unanswered(self, error: BaseException) -> UnreachableError | None:
        if not isinstance(error, UnreachableError):
            return None
        again = "" if self._inside else " It is tried again in the background for a while."
        return UnreachableError(
            f"the server gave no answer when the result of attempt {self.number} at {self.wanted} was to be stored: {error}."
            f"{again} Ask for the key again to learn what came of it"
        )

    def _held_up(self, error: Exception) -> bool:
        """Say whether a transaction has the row of the key locked."""
        return sqlstate_of(error) == LOCK_NOT_AVAILABLE

    def _lost(self, newest: int | None) -> AttemptLostError:
        newest = max(newest or 0, self.number)
        why = (
            f"attempt {newest} has taken over"
            if newest > self.number
            else "its claim was not renewed in time, or was ended"
        )
        return AttemptLostError(
            f"attempt {self.number} at {self.wanted} does not count any more: {why}. Nothing that it says is stored; what it"
            " did outside the database stands",
            scope=self.wanted.scope,
            key=self.wanted.key,
            attempt=self.number,
            newest=newest,
            retry_after=1.0,
        )

    def _over(self) -> IdempotencyMisuseError:
        why = "has ended already" if self._grant.ours else "belongs to the parent of this forked child"
        return IdempotencyMisuseError(f"attempt {self.number} at {self.wanted} {why}")
