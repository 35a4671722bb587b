"""What the function of an effect gets in hand: the attempt."""

from __future__ import annotations

from contextlib import contextmanager
from inspect import isawaitable, iscoroutine
from typing import TYPE_CHECKING, TypeVar, cast

from sqlalchemy.exc import DBAPIError

from pgfence._api.inputs import (
    check_key,
    describe_function,
    is_async_session,
    is_session,
    reject_coroutine,
    reject_generator,
    unwrap_session,
)
from pgfence._process.coroutines import run_sync
from pgfence._sql.effects import finish_inside
from pgfence._sql.errors import ErrorContext, raise_translated
from pgfence._sql.idempotency import NEEDED
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, sqlstate_of
from pgfence.errors import IdempotencyMisuseError
from pgfence.idempotency._claim import connection_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from typing import Any

    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from pgfence._values.codec import Codec
    from pgfence.effects._running import RunningAttempt

R = TypeVar("R")
NOTHING: object = object()
_SYNC_ONLY = "it needs an AsyncIdempotentEffect"


class _Attempt:
    """What both twins of an attempt share."""

    def __init__(
        self,
        running: RunningAttempt,
        codec: Codec[Any],
        check_function: Callable[[Callable[..., object]], None],
    ) -> None:
        self._running = running
        self._codec = codec
        self._check_function = check_function
        """Rejects a function whose result could not be stored, as far as its annotation tells."""
        self._completed = NOTHING
        """The result that `complete` has stored."""
        self.in_progress: dict[str, object] = {}
        """The steps that run, each with a mark of the thread or task that does it."""
        self.unsaved: dict[str, str] = {}
        """Results by step that may not be saved yet. The key "" stands for the whole attempt."""

    def __repr__(self) -> str:
        wanted = self._running.wanted
        return f"<{type(self).__name__} {self.number} at {wanted.scope!r} {wanted.key!r}>"

    @property
    def number(self) -> int:
        """Which attempt it is, from 1 on. While the key is remembered it only grows, so a provider can reject older ones."""
        return self._running.number

    def check(self) -> None:
        """Raise unless this attempt counts as far as this process knows. No I/O: call it as often as you like.

        Raises:
            AttemptLostError: its claim could not be renewed in time, or another attempt has taken over.
            IdempotencyMisuseError: the attempt has ended.
        """
        self._running.check()

    def _prepare_step(self, name: str, fn: Callable[..., object]) -> str:
        """Check a step, and return its key for the provider.

        Raises:
            IdempotencyMisuseError: what it returns could not be stored.
            TypeError, ValueError: it has no name of a step.
        """
        self._check_function(fn)
        if ":" in check_key(name, "the name of a step"):
            raise ValueError(
                f"the name of a step must not contain a colon, which stands between the key and it: {name!r}"
            )
        return f"{self._running.wanted.key}:{name}"

    def _load(self, name: str, *, unsaved: bool = False) -> object:
        text = self._running.steps.get(name)
        if text is None and unsaved:
            text = self.unsaved.get(name)
        return NOTHING if text is None else self._codec.decode(text)

    @contextmanager
    def _mark_step(self, name: str) -> Iterator[None]:
        """Be in a step.

        Raises:
            AttemptLostError: the attempt does not count any more.
            IdempotencyMisuseError: another thread or task is in it, or the attempt is complete.
        """
        if self._completed is not NOTHING:
            raise IdempotencyMisuseError(f"{self!r} is complete: no step comes after complete()")
        self.check()
        mark = object()
        if self.in_progress.setdefault(name, mark) is not mark:
            raise IdempotencyMisuseError(
                f"the step {name!r} of {self!r} is at work already: give each step a name of its own"
            )
        try:
            yield
        finally:
            del self.in_progress[name]

    async def _save(self, name: str, value: object) -> None:
        if name in self._running.steps:
            return
        if name not in self.unsaved:
            try:
                self.unsaved[name] = self._codec.encode(value)
            except BaseException as error:
                self.unsaved[""] = ""
                error.add_note(f"the step {name!r} of {self!r} was done, and what it returned is not saved")
                raise
        await self._running.save_step(name, self.unsaved[name])
        del self.unsaved[name]

    def _complete(self, session: Session, value: object) -> None:
        # Not by what this process knows: the server rejects a late attempt so that its transaction cannot commit.
        self._running.check_unfinished()
        self._codec.check(value, str(self._running.wanted))
        text = self._codec.encode(value)
        connection = connection_of(session)
        try:
            newest = finish_inside(connection, *self._running.begin_inside(text))
        except DBAPIError as error:
            if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                raise IdempotencyMisuseError(
                    f"{self!r} was completed in another transaction, which has not ended: commit it, or roll it back, first"
                ) from error
            raise_translated(error, self._running.place, ErrorContext(NEEDED))
            raise
        self._running.check_newest(newest)
        self._completed = value


class Attempt(_Attempt):
    """One attempt at an effect, for threads."""

    def step(self, name: str, fn: Callable[[str], R], /) -> R:
        """Do a step that an attempt before this one may have done, and save what it returns.

        Promised: a step that was saved is never done again, and returns an equal value; before a step is done the claim stands,
        as far as this process knows. Not promised: that a step of which nothing is saved was not done, for an attempt may die
        in between; so pass the derived key to the provider, who then does it once.

        Args:
            name: of the step, once in each effect: the rules of keys, without a colon. The same name gets the same value.
            fn: gets the derived key, `<key>:<name>`, which is the same in each attempt. It is the key alone, without the scope:
                where one provider's account serves several scopes, the key has to name them.

        Raises:
            AttemptLostError: this attempt does not count any more; the step was not done, or was done and is not saved.
            IdempotencyMisuseError: its value cannot be stored: where the annotation of `fn` tells, before it runs; or the step
                is at work in another place of this attempt.
            UnreachableError: no answer: nobody knows whether it is saved.
            TypeError, ValueError: `name` cannot be the name of a step; or `fn` is a coroutine or generator function.
        """
        check_plain_function(fn)
        key = self._prepare_step(name, fn)
        if (value := self._load(name)) is NOTHING:
            with self._mark_step(name):
                # Saved by another thread since the look; or done, and its save had no answer.
                if (value := self._load(name, unsaved=True)) is NOTHING:
                    value = check_value(fn(key), fn)
                run_sync(self._save, name, value)
        return cast("R", value)

    def complete(self, session: Session | scoped_session[Any], value: Any, /) -> None:
        """Store the result in the caller's own transaction, so that it is committed together with the rows of the business.

        Promised: if the transaction commits, the key is done with this result, and `run` returns it. An attempt that does not
        count any more is refused here, and PostgreSQL has aborted its transaction; none takes over until the transaction has
        ended. Not promised: that inside a savepoint, to which a program rolls back that swallows the refusal.

        Args:
            session: its transaction must end before the function returns.
            value: of the type of `result`, if that was given, and of the types that can be stored.

        Raises:
            AttemptLostError: this attempt does not count any more: roll back.
            IdempotencyMisuseError: the value is not of the type of `result`, or cannot be stored; or the attempt was completed before, by a transaction that was
                committed or has not ended.
            TransactionStateError: autocommit.
            TypeError: it is no session of this half.
        """
        if not is_session(session):
            raise TypeError(f"this attempt completes in a Session, not in a {type(session).__name__}")
        self._complete(unwrap_session(session), value)


class AsyncAttempt(_Attempt):
    """One attempt at an effect, for tasks."""

    async def step(self, name: str, fn: Callable[[str], Awaitable[R]], /) -> R:
        """Do a step that an attempt before this one may have done, and save what it returns; see the sync twin."""
        reject_generator(fn)
        key = self._prepare_step(name, fn)
        if (value := self._load(name)) is NOTHING:
            with self._mark_step(name):
                if (value := self._load(name, unsaved=True)) is NOTHING:
                    value = fn(key)
                    # A plain function has done it by now: to reject what it returned would be to forget it.
                    if isawaitable(value):
                        value = await value
                await self._save(name, value)
        return cast("R", value)

    async def complete(self, session: AsyncSession | async_scoped_session[Any], value: Any, /) -> None:
        """Store the result in the caller's own transaction; see the sync twin."""
        if not is_async_session(session):
            raise TypeError(f"this attempt completes in an AsyncSession, not in a {type(session).__name__}")
        await unwrap_session(session).run_sync(self._complete, value)


def check_plain_function(fn: Callable[..., object]) -> None:
    """Raise TypeError for a coroutine function or a generator function: nothing of it runs when it is called."""
    reject_coroutine(fn, _SYNC_ONLY)
    reject_generator(fn)


def check_value(value: R, fn: Callable[..., R]) -> R:
    """Reject a coroutine in the place of a value.

    Raises:
        TypeError: it is one; nothing of it has run.
    """
    if iscoroutine(value):
        value.close()
        raise TypeError(f"{describe_function(fn)} returned a coroutine, of which nothing has run: {_SYNC_ONLY}")
    return value
