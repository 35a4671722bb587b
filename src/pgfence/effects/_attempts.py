"""One attempt at an effect, from its claim to its end, for whatever runs under it.

Nothing here knows of functions or requests: texts go in, and come back as they were. Every call is a round trip on a session
of ours, and none is made in a transaction of the user.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pgfence._api.inputs import check_async_engine_source, check_engine_source
from pgfence._leases.request import Refused
from pgfence._process.coroutines import run_sync
from pgfence._sql.sqlstate import sqlstate_of
from pgfence.effects._claim import AlreadyFinished, claim_of
from pgfence.effects._ends import Lapse
from pgfence.effects._manager import EffectManager
from pgfence.effects._record import Record
from pgfence.effects._wanted import EffectKey, Reply, StoredResult
from pgfence.errors import PgfenceError
from pgfence.lease import _aio as lease_aio
from pgfence.lease import _sync as lease_sync

if TYPE_CHECKING:
    from pgfence._api.inputs import AsyncEngineSource, EngineSource

__all__ = ["AsyncRunning", "EffectKey", "Reply", "Running", "StoredResult", "claim", "claim_async"]

WHY = "a key is claimed by a commit of its own before the work begins"


def claim(engine: EngineSource, wanted: EffectKey, timeout: float) -> Running | StoredResult:
    """Claim a key for an attempt, or return what came of it before.

    Args:
        engine: an Engine, or a function that returns one.
        wanted: what is asked for.
        timeout: seconds to wait for another attempt; 0 does not wait.

    Raises:
        IdempotencyKeyReusedError: the key belongs to another payload, whatever its state.
        IdempotencyInProgressError: another attempt is at work, and did not end within the timeout.
        AttemptLostError: one was lost, and `wanted.takeover` allows no other.
        UnreachableError: no answer; a claim nobody heard of is ended in the background.
        SchemaError: the tables are missing, too old, or not open to this role.
        StandbyError: nothing can be written on this server.
    """
    what = "an effect"
    manager, place = lease_sync.manager_for(check_engine_source(engine, what, WHY), what, EffectManager)
    try:
        running = run_sync(
            manager.acquire(claim_of(wanted, place, manager.config.namespace), timeout, partial(Running, wanted))
        )
    except AlreadyFinished as settled:
        return settled.result
    except Refused as refused:
        raise _answer(refused) from None
    assert running is not None
    return running


async def claim_async(engine: AsyncEngineSource, wanted: EffectKey, timeout: float) -> AsyncRunning | StoredResult:
    """Claim a key for an attempt, or return what came of it before; see `claim`."""
    what = "an effect"
    manager, place = lease_aio.manager_for(check_async_engine_source(engine, what, WHY), what, EffectManager)
    try:
        running = await manager.acquire(
            claim_of(wanted, place, manager.config.namespace), timeout, partial(AsyncRunning, wanted)
        )
    except AlreadyFinished as settled:
        return settled.result
    except Refused as refused:
        raise _answer(refused) from None
    assert running is not None
    return running


def _answer(refused: Refused) -> BaseException:
    return refused.__cause__ or refused


class Running(Record):
    """An attempt at work, for threads. Its claim is renewed until one of `finish`, `finish_reply`, `free` and `let_lapse`.

    Each of these ends it, once. One that is dropped before lapses.
    """

    _manager: EffectManager

    def save_step(self, name: str, text: str) -> None:
        """Save what a step came to, so that an attempt after this one has it.

        Args:
            name: of the step.
            text: JSON.

        Raises:
            AttemptLostError: this attempt does not count any more.
            IdempotencyMisuseError: it has ended.
            UnreachableError: no answer: nobody knows whether it is saved.
        """
        self.check()
        self._saved(
            name, text, run_sync(self._manager.execute_with_retry(*self._step(name, text), self._patience, self._again))
        )

    def finish(self, status: str, text: str) -> None:
        """Store what came of it: "done" with a result or "failed" with an error, as JSON.

        Raises:
            AttemptLostError: another attempt counts by now; nothing is stored.
            IdempotencyMisuseError: it has ended before.
            UnreachableError: no answer. It is tried again in the background for a while.
        """
        self._end(status, text, None)

    def finish_reply(self, reply: Reply) -> None:
        """Store a reply of HTTP; otherwise as `finish`."""
        self._end("done", None, reply)

    def _end(self, status: str, text: str | None, reply: Reply | None) -> None:
        self._leave()
        statement = self._finish(status, text, reply)
        try:
            row = run_sync(self._manager.execute_with_retry(*statement, self._patience, self._again))
        except BaseException as error:
            self._manager.carrier.run_cleanup(partial(self._unfinished, statement[2], error))
            if told := self._unanswered(error):
                raise told from error
            raise
        self._finished(row)

    def confirm(self) -> bool:
        """Say whether it is finished, by a transaction of the caller; this ends the attempt here.

        Raises:
            AttemptLostError: another attempt counts by now.
        """
        self._leave()
        try:
            return self._confirmed(
                run_sync(self._manager.execute_with_retry(*self._finish(None, None, None), self._patience, self._again))
            )
        except Exception as error:
            if self._held_up(error):
                return False
            if told := self._unanswered(error):
                raise told from error
            raise

    def free(self) -> bool | None:
        """Let anybody run at once: it is known that nothing came of this attempt. Without an answer it is tried in the background.

        Returns whether it was freed: False where another attempt has the key, None without an answer.
        """
        self._leave()
        try:
            return self._freed(run_sync(self._manager.execute_with_retry(*self._free(), 0.0)))
        except BaseException as error:
            self._manager.carrier.run_cleanup(partial(self._manager.note_unanswered, self._grant, error))
            if not isinstance(error, PgfenceError) and sqlstate_of(error) is None:
                raise
            return None

    def lapse(self, ended: str) -> Lapse | None:
        """Stop renewing, leave a note for the next caller, and return the row of the key; None without an answer.

        Args:
            ended: what the attempt ended with.
        """
        self._stop()
        if not self.ours:
            return None
        try:
            return Lapse(*run_sync(self._manager.execute_with_retry(*self._note(ended), 0.0)))
        except BaseException as failure:
            self._note_later(ended)
            if not isinstance(failure, Exception):
                raise
            return None  # what it ended with counts, and not that it could not be noted


class AsyncRunning(Record):
    """An attempt at work, for tasks; see `Running`. A cancel during one of its ends is made up for in the background."""

    _manager: EffectManager

    async def save_step(self, name: str, text: str) -> None:
        """Save what a step came to; see the sync twin."""
        self.check()
        self._saved(
            name, text, await self._manager.execute_with_retry(*self._step(name, text), self._patience, self._again)
        )

    async def finish(self, status: str, text: str) -> None:
        """Store what came of it; see the sync twin."""
        await self._end(status, text, None)

    async def finish_reply(self, reply: Reply) -> None:
        """Store a reply of HTTP; otherwise as `finish`."""
        await self._end("done", None, reply)

    async def _end(self, status: str, text: str | None, reply: Reply | None) -> None:
        self._leave()
        statement = self._finish(status, text, reply)
        try:
            row = await self._manager.execute_with_retry(*statement, self._patience, self._again)
        except BaseException as error:
            self._unfinished(statement[2], error)
            if told := self._unanswered(error):
                raise told from error
            raise
        self._finished(row)

    async def confirm(self) -> bool:
        """Say whether it is finished, by a transaction of the caller; see the sync twin."""
        self._leave()
        try:
            return self._confirmed(
                await self._manager.execute_with_retry(*self._finish(None, None, None), self._patience, self._again)
            )
        except Exception as error:
            if self._held_up(error):
                return False
            if told := self._unanswered(error):
                raise told from error
            raise

    async def free(self) -> bool | None:
        """Let anybody run at once; see the sync twin."""
        self._leave()
        try:
            return self._freed(await self._manager.execute_with_retry(*self._free(), 0.0))
        except BaseException as error:
            self._manager.note_unanswered(self._grant, error)
            if not isinstance(error, PgfenceError) and sqlstate_of(error) is None:
                raise
            return None

    async def lapse(self, ended: str) -> Lapse | None:
        """Stop renewing, leave a note for the next caller, and return the row of the key; see the sync twin."""
        self._stop()
        if not self.ours:
            return None
        try:
            return Lapse(*await self._manager.execute_with_retry(*self._note(ended), 0.0))
        except BaseException as failure:
            self._note_later(ended)
            if not isinstance(failure, Exception):
                raise
            return None  # what it ended with counts, and not that it could not be noted
