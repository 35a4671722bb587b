"""One attempt at an effect, from its claim to its end.

Everything that sends statements to the server is a coroutine, which a thread runs with `run_sync`. No statement runs in a
transaction of the application.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from pgfence._connections.connection import RELEASE_BUDGET
from pgfence._leases.answers import is_retryable
from pgfence._leases.heartbeat.tasks import ReleaseTask
from pgfence._leases.request import Refused
from pgfence._process.clock import clock
from pgfence._sql.effects import effect_sql
from pgfence._sql.encoding import TextError
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, sqlstate_of
from pgfence.effects._claim import AlreadyFinished, build_request, encode_note
from pgfence.effects._ends import Lapse, describe_lapse, emit_refusal, lost_error
from pgfence.errors import IdempotencyMisuseError, LockNotHeldError, PgfenceError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgfence._leases.grant import Grant
    from pgfence._sql.effects import EffectSql
    from pgfence._sql.storage import TableNames
    from pgfence.effects._claim import EffectKey, Reply, StoredResult
    from pgfence.effects._manager import EffectManager
    from pgfence.errors import AttemptLostError

    Values = tuple[object, ...]

ALREADY_COMPLETED = -2
"""The number that the server returns to complete() if a transaction with the result was already committed."""
LONGEST_PATIENCE = 30.0
"""The maximum number of seconds that the end of an attempt waits for a server that does not respond."""
_TROUBLE = ("53", "57", "58", "XX")
"""SQLSTATE classes of problems from which the server may recover, such as a full disk or a cancel by an operator."""


async def claim(
    manager: EffectManager, place: TableNames, wanted: EffectKey, timeout: float
) -> RunningAttempt | StoredResult:
    """Claim a key for an attempt, or return what is stored under it.

    `timeout` is the number of seconds to wait for another attempt. If the server does not respond, a claim that it may have
    granted is ended in the background.
    """
    request = build_request(wanted, place, manager.config.namespace)
    try:
        running = await manager.acquire(request, timeout, partial(RunningAttempt, wanted))
    except Refused as refused:
        emit_refusal(manager.config.events, request, refused)
        if isinstance(refused, AlreadyFinished):
            return refused.result
        raise refused.__cause__ or refused from None
    assert running is not None
    return running


class RunningAttempt:
    """An attempt, whose claim is renewed until the attempt ends.

    Exactly one of `finish`, `finish_reply`, `confirm`, `free` and a lapse ends it. If it is garbage-collected before that, it
    lapses.
    """

    __slots__ = ("__weakref__", "_grant", "_inside", "_manager", "_wanted", "steps")

    def __init__(self, wanted: EffectKey, manager: EffectManager, grant: Grant) -> None:
        self._wanted = wanted
        self._manager = manager
        self._grant = grant
        self._inside = False
        """Whether the caller's transaction ends the attempt. Until that transaction ends, no other session can change the row."""
        assert isinstance(grant.checkpoint, dict)
        self.steps = {name: json.dumps(value) for name, value in grant.checkpoint.items()}
        """The results of steps, as JSON, that earlier attempts and this one have saved."""

    def __str__(self) -> str:
        return f"attempt {self.number} at {self._wanted}"

    def __del__(self) -> None:
        grant = getattr(self, "_grant", None)  # missing if the constructor was interrupted
        if grant is not None and not grant.released and grant.ours:
            grant.dropped = True
            self._manager.abandon(grant)

    @property
    def number(self) -> int:
        """The number of the attempt, starting at 1."""
        assert self._grant.token is not None
        return self._grant.token

    @property
    def wanted(self) -> EffectKey:
        return self._wanted

    @property
    def ours(self) -> bool:
        """Whether this process made the claim; False in a forked child."""
        return self._grant.ours

    @property
    def place(self) -> TableNames:
        return self._grant.place

    def remaining(self) -> float:
        """Return the seconds for which this process trusts its claim, without I/O; 0.0 if the claim is lost or has ended."""
        return self._grant.get_remaining()

    def check(self) -> None:
        """Raise an error unless the claim is valid as far as this process knows, without I/O."""
        self.check_unfinished()
        if self._grant.state == "lost":
            raise self._lost_error(None)

    def check_unfinished(self) -> None:
        """Raise an error if the attempt has ended, or if this is a forked child, without I/O."""
        if self._grant.released or not self._grant.ours:
            raise self._ended_error()

    def check_newest(self, newest: int | None, sqlstate: str | None = None) -> None:
        """Check the number of the newest attempt, which the server returned to `finish_inside` or to a step."""
        if newest is None and self._inside and self._grant.state == "held":
            raise IdempotencyMisuseError(
                f"{self._wanted} is not in the database of this session: pass a session of the effect's"
                " engine, in whose database the claim was made"
            )
        if newest == ALREADY_COMPLETED:
            raise IdempotencyMisuseError(f"{self} is already complete: a transaction with its result was committed")
        if newest != self.number:
            self._manager.heartbeat.drop(self._grant)
            self._grant.lose("superseded")
            raise self._lost_error(newest, sqlstate)

    # ------------------------------------------------------------ work

    async def save_step(self, name: str, text: str) -> None:
        """Save the result of a step, as JSON, for this attempt and later ones."""
        self.check()
        (newest,) = await self._execute(self._sql.step, name, text)
        self.check_newest(newest)
        self.steps[name] = text

    def begin_inside(self, text: str) -> tuple[TableNames, Values]:
        """Record that the caller's transaction will store the result, and return what `finish_inside` needs for that."""
        self._inside = True
        return self._grant.place, (*self._ids, *self._finish_values("done", text, None, inside=True))

    # ------------------------------------------------------------ ends

    async def finish(self, status: str, text: str) -> None:
        """Store how the attempt ended, as JSON: "done" with a result, or "failed" with an error.

        If the server does not respond, storing is retried in the background until the claim ends, and for at least 30 s.
        """
        await self._finish(self._finish_values(status, text, None))

    async def finish_reply(self, reply: Reply) -> None:
        """Store an HTTP response as the result; see `finish`."""
        await self._finish(self._finish_values("done", None, reply))

    async def _finish(self, values: Values) -> None:
        self._detach()
        try:
            (newest,) = await self._execute(self._sql.finish, *values)
        except BaseException as error:
            # This is also done after a cancellation or a signal, because the statement may not have reached the server.
            self._manager.carrier.run_cleanup(partial(self._finish_later, values, error))
            if unanswered := self._unanswered_error(error):
                raise unanswered from error
            raise
        self._note_finished(newest)

    async def confirm(self) -> bool:
        """End the attempt, and return whether a transaction of the caller has finished it."""
        self._detach()
        try:
            (newest,) = await self._execute(self._sql.finish, *self._finish_values(None, None, None))
        except Exception as error:
            if sqlstate_of(error) == LOCK_NOT_AVAILABLE:  # the transaction is still open
                return False
            if unanswered := self._unanswered_error(error):
                raise unanswered from error
            raise
        if newest != 0:
            self._note_finished(newest)
        return bool(newest != 0)

    async def is_finished(self) -> bool:
        """Return whether a transaction of the caller has finished the attempt, without ending the attempt."""
        (newest,) = await self._execute(self._sql.finish, *self._finish_values(None, None, None), seconds=0.0)
        return bool(newest == self.number)

    async def free(self) -> bool | None:
        """Free the key, so that any caller can run immediately.

        Returns False if another attempt has the key, and None if the server did not respond; freeing is then retried later.
        """
        self._detach()
        try:
            (outcome,) = await self._execute(self._sql.free, seconds=0.0)
        except BaseException as error:
            self._manager.carrier.run_cleanup(partial(self._manager.note_unanswered, self._grant, error))
            if not isinstance(error, PgfenceError) and sqlstate_of(error) is None:
                raise
            return None
        self._emit_end(released=outcome == "released")
        return bool(outcome == "released")

    async def lapse(self, ended: str) -> Lapse | None:
        """Stop renewing, leave a note for the next caller, and return the row of the key, or None if the server did not respond.

        The note contains `ended`, the error that the attempt ended with.
        """
        self._stop_renewing()
        if not self.ours:
            return None
        try:
            return Lapse(*await self._execute(self._sql.end, encode_note(ended), seconds=0.0))
        except BaseException as failure:
            self._note_later(ended)
            if not isinstance(failure, Exception):
                raise
            return None  # the caller gets the attempt's own error, not the failure to note it

    def let_lapse(self, ended: str = "") -> None:
        """Stop renewing, and leave the claim to expire, because the outcome is unknown. The call does no I/O.

        If `ended`, the error that the attempt ended with, is not empty, a note with it is sent in the background.
        """
        self._stop_renewing()
        if ended and self.ours:
            self._note_later(ended)

    # ------------------------------------------------------------ messages

    def describe_lapse(self, what: str, row: Lapse | None = None) -> str:
        """Describe what happens to the key after `let_lapse` or `lapse`."""
        return describe_lapse(self._wanted, self.number, what, row, self._left)

    def describe_freed(self, what: str, freed: bool | None) -> str:
        """Describe what happens to the key after `free`, which has returned `freed`."""
        if freed is False:
            return f"{self} ended with {what} after another attempt had taken over"
        free = (
            "the key is free" if freed else f"the server did not respond, so the key is free within {self._left:.1f} s"
        )
        return (
            f"{self} ended with {what}, which is listed in free=: {free}. The next call runs attempt {self.number + 1}"
        )

    def describe_recorded(self, what: str) -> str:
        """Describe what happens to the key after `finish("failed", ...)`."""
        return (
            f"{self} ended with {what}, which is listed in record=: it is stored as the result, and calls with this key raise it"
            f" again for {self._wanted.keep:g} s"
        )

    def _lost_error(self, newest: int | None, sqlstate: str | None = None) -> AttemptLostError:
        return lost_error(self._wanted, self.number, max(newest or 0, self.number), sqlstate)

    def _ended_error(self) -> IdempotencyMisuseError:
        why = (
            "has already ended: use an attempt only inside the function that run() calls"
            if self._grant.ours
            else "belongs to the parent process of this forked child: call run() in the child"
        )
        return IdempotencyMisuseError(f"{self} {why}")

    def _unanswered_error(self, error: BaseException) -> UnreachableError | None:
        if not isinstance(error, UnreachableError):
            return None
        again = "" if self._inside else " Storing it is retried in the background."
        return UnreachableError(
            f"the server did not respond while the result of {self} was being stored: {error}.{again} Call again with the key to"
            " find out whether it was stored"
        )

    # ------------------------------------------------------------ statements

    @property
    def _sql(self) -> EffectSql:
        return effect_sql(self._grant.place, self._manager.style)

    @property
    def _ids(self) -> tuple[str, str, int]:
        return self._grant.stored, str(self._grant.lease_id), self.number

    @property
    def _left(self) -> float:
        """Seconds until the claim ends, as far as this process knows."""
        return max(0.0, self._grant.row_deadline - clock())

    async def _execute(self, text: str, *values: object, seconds: float | None = None) -> Any:
        if seconds is None:
            seconds = min(max(self._left, RELEASE_BUDGET), LONGEST_PATIENCE)
        args = (*self._ids, *values)
        return await self._manager.execute_with_retry(self._grant.place, text, args, seconds, self._is_retryable)

    def _is_retryable(self, error: BaseException) -> bool:
        # If the row is locked, the caller's own transaction has locked it, and ends the attempt.
        return isinstance(error, UnreachableError) if self._inside else is_retryable(error)

    def _finish_values(
        self, status: str | None, text: str | None, reply: Reply | None, *, inside: bool = False
    ) -> Values:
        response: Values = (None, None, None)
        if reply is not None:
            response = reply.status, json.dumps(reply.headers), reply.body
        return self._wanted.keep, status, text, *response, not inside

    def _finish_later(self, values: Values, error: BaseException) -> None:
        """Store the outcome in the background, unless the server itself has rejected it."""
        if isinstance(error, TextError):
            return  # the outcome can never be stored
        silent = isinstance(error, UnreachableError) or sqlstate_of(error) is None
        if not silent and not str(sqlstate_of(error)).startswith(_TROUBLE):
            return
        if not silent:
            error.add_note(
                f"storing the result of {self} is retried in the background: call again with the key to find out whether it was"
                " stored"
            )
        # The server checks the id of the claim, so a late statement does no harm.
        until = max(self._grant.row_deadline, clock() + LONGEST_PATIENCE)
        self._end_later(lambda sql: sql.finish_late, (self._grant.stored, *self._ids, *values), until)

    def _note_later(self, ended: str) -> None:
        self._end_later(lambda sql: sql.end, (*self._ids, encode_note(ended)), self._grant.row_deadline)

    def _end_later(self, text: Callable[[EffectSql], str], args: Values, until: float) -> None:
        grant = self._grant
        self._manager.heartbeat.end_later(ReleaseTask(grant.place, text, args, until, grant.family))

    def _note_finished(self, newest: int) -> None:
        self._emit_end(released=newest == self.number)
        if newest != self.number:
            raise self._lost_error(newest)

    def _emit_end(self, *, released: bool) -> None:
        event, reason = ("released", None) if released else ("lost", "superseded")
        self._grant.emit(self._grant.config.events, event, reason=reason)

    def _detach(self) -> None:
        """Claim the right to end the attempt, and stop its heartbeat."""
        try:
            self._manager.detach(self._grant)
        except LockNotHeldError:
            raise self._ended_error() from None

    def _stop_renewing(self) -> None:
        with suppress(LockNotHeldError):
            self._manager.let_lapse(self._grant)
