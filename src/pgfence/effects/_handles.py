"""The attempt that is passed to the function of an effect."""

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
from pgfence._sql.effects import LATE_ATTEMPT, finish_inside
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
    """The common part of the sync and async attempts."""

    def __init__(
        self,
        running: RunningAttempt,
        codec: Codec[Any],
        check_function: Callable[[Callable[..., object]], None],
    ) -> None:
        self._running = running
        self._codec = codec
        self._check_function = check_function
        """Rejects a function whose result could not be stored, as far as its annotation shows."""
        self._completed = NOTHING
        """The result that `complete` has stored."""
        self.in_progress: dict[str, object] = {}
        """The steps that are running, each with a mark of its call."""
        self.unsaved: dict[str, str] = {}
        """The names of steps that were done but perhaps not saved, with their values as JSON. The step "" is the whole effect."""

    def __repr__(self) -> str:
        wanted = self._running.wanted
        return f"<{type(self).__name__} {self.number} at {wanted.scope!r} {wanted.key!r}>"

    @property
    def number(self) -> int:
        """The number of the attempt, starting at 1.

        The number only grows while the key is kept, so a provider can reject older attempts.
        """
        return self._running.number

    def check(self) -> None:
        """Raise an error unless this attempt is still valid as far as this process knows. The check does no I/O.

        Raises:
            AttemptLostError: the claim could not be renewed in time, or another attempt has taken over.
            IdempotencyMisuseError: the attempt has ended, or this is a forked child.
        """
        self._running.check()

    def _prepare_step(self, name: str, fn: Callable[..., object]) -> str:
        """Check a step, and return its key for the provider."""
        self._check_function(fn)
        if ":" in check_key(name, "the name of a step"):
            raise ValueError(
                f"the name of a step must not contain a colon, which separates the key from the name: {name!r}"
            )
        return f"{self._running.wanted.key}:{name}"

    def _load(self, name: str, *, unsaved: bool = False) -> object:
        text = self._running.steps.get(name)
        if text is None and unsaved:
            text = self.unsaved.get(name)
        return NOTHING if text is None else self._codec.decode(text)

    @contextmanager
    def _mark_step(self, name: str) -> Iterator[None]:
        """Mark a step as running inside the block."""
        if self._completed is not NOTHING:
            raise IdempotencyMisuseError(f"{self._running} is complete: steps must come before complete()")
        self.check()
        mark = object()
        if self.in_progress.setdefault(name, mark) is not mark:
            raise IdempotencyMisuseError(
                f"the step {name!r} of {self._running} is already running: give each step a different name"
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
                error.add_note(f"the step {name!r} of {self._running} was done, but its result could not be saved")
                raise
        await self._running.save_step(name, self.unsaved[name])
        del self.unsaved[name]

    async def _may_be_committed(self) -> bool:
        """Return whether a transaction of `complete` was committed or may still be; True if the server did not respond."""
        try:
            return self._completed is not NOTHING and await self._running.is_finished()
        except Exception:
            return True

    def _complete(self, session: Session, value: object) -> None:
        # The claim is not checked in this process, because the server rejects a late attempt, whose transaction cannot commit.
        self._running.check_unfinished()
        self._codec.check(value, str(self._running.wanted))
        text = self._codec.encode(value)
        connection = connection_of(session)
        try:
            newest = finish_inside(connection, *self._running.begin_inside(text))
        except DBAPIError as error:
            if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                raise IdempotencyMisuseError(
                    f"{self._running} was completed in another transaction that is still open: commit it or roll it back first"
                ) from error
            raise_translated(error, self._running.place, ErrorContext(NEEDED))
            raise
        self._running.check_newest(newest, LATE_ATTEMPT)
        self._completed = value


class Attempt(_Attempt):
    """One attempt at an effect, for threads."""

    def step(self, name: str, fn: Callable[[str], R], /) -> R:
        """Do a step and save its result, or return the result that an earlier attempt has saved.

        Guarantees: a step that was saved is not done again while the key is kept, and returns an equal value. A step starts only
        while the claim is valid as far as this process knows.

        Limitations: a step that is not saved may nevertheless have been done, because an attempt may die after doing the step
        and before saving it. Pass the derived key to the provider as its idempotency key. A provider that supports idempotency
        keys then executes the request only once.

        Args:
            name: the name of the step, unique in the effect. It follows the rules for keys and contains no colon. Steps with the
                same name return the same value.
            fn: called with the derived key, `<key>:<name>`, which is the same in each attempt. The derived key does not contain
                the scope. If one account at the provider serves several scopes, the key must include them.

        Raises:
            AttemptLostError: this attempt is no longer valid. The step was not done, or was done and not saved.
            IdempotencyMisuseError: the result cannot be stored, the step is already running in this attempt, or the attempt has
                ended or was completed. If the annotation shows that the result cannot be stored, the error is raised before `fn`
                runs.
            UnreachableError: the server did not respond, and it is unknown whether the result was saved.
            TypeError, ValueError: `name` is not usable; or `fn` is a coroutine or generator function.
        """
        check_plain_function(fn)
        key = self._prepare_step(name, fn)
        if (value := self._load(name)) is NOTHING:
            with self._mark_step(name):
                # By now, another thread may have saved the step; or the step was done, and saving it got no response.
                if (value := self._load(name, unsaved=True)) is NOTHING:
                    value = check_value(fn(key), fn)
                run_sync(self._save, name, value)
        return cast("R", value)

    def complete(self, session: Session | scoped_session[Any], value: Any, /) -> None:
        """Store the result in your own transaction, so that it is committed together with the rows of the application.

        Guarantees: if the transaction commits, the key is done with this result, and `run` returns it. An attempt that is no
        longer valid is rejected here, and PostgreSQL has aborted its transaction. No other attempt takes over until the
        transaction has ended.

        Limitations: these guarantees do not apply inside a savepoint if the program swallows the rejection and rolls back to the
        savepoint.

        Args:
            session: the session whose transaction stores the result. The transaction must end before the function returns.
            value: the result. It must be of a type that can be stored and, if the option `result` was given, of that type.

        Raises:
            AttemptLostError: this attempt is no longer valid. Roll back.
            IdempotencyMisuseError: the value is not of the type `result`, or cannot be stored; or the attempt was already
                completed by a transaction that was committed or is still open, or has ended; or the database of the session does
                not contain the key.
            TransactionStateError: the connection is in autocommit or in psycopg's pipeline mode.
            SchemaError, StandbyError: the database of the session has no tables of pgfence, or accepts no writes.
            UnreachableError: the session's connection could not be opened.
            TypeError: `session` is not a Session.
        """
        if not is_session(session):
            raise TypeError(f"Attempt.complete() needs a Session, not {type(session).__name__}")
        self._complete(unwrap_session(session), value)


class AsyncAttempt(_Attempt):
    """One attempt at an effect, for tasks."""

    async def step(self, name: str, fn: Callable[[str], Awaitable[R]], /) -> R:
        """Do a step and save its result, or return the saved result; see `Attempt.step`."""
        reject_generator(fn)
        key = self._prepare_step(name, fn)
        if (value := self._load(name)) is NOTHING:
            with self._mark_step(name):
                if (value := self._load(name, unsaved=True)) is NOTHING:
                    value = fn(key)
                    # A plain function has already run, and rejecting its result would lose it.
                    if isawaitable(value):
                        value = await value
                await self._save(name, value)
        return cast("R", value)

    async def complete(self, session: AsyncSession | async_scoped_session[Any], value: Any, /) -> None:
        """Store the result in your own transaction; see `Attempt.complete`."""
        if not is_async_session(session):
            raise TypeError(f"AsyncAttempt.complete() needs an AsyncSession, not {type(session).__name__}")
        await unwrap_session(session).run_sync(self._complete, value)


def check_plain_function(fn: Callable[..., object]) -> None:
    """Raise TypeError for a coroutine or generator function, because calling it does not run its body."""
    reject_coroutine(fn, _SYNC_ONLY)
    reject_generator(fn)


def check_value(value: R, fn: Callable[..., R]) -> R:
    """Return the value of a function, which must not be a coroutine.

    Raises:
        TypeError: the value is a coroutine, which has not run.
    """
    if iscoroutine(value):
        value.close()
        raise TypeError(f"{describe_function(fn)} returned a coroutine, which has not run: {_SYNC_ONLY}")
    return value
