"""What the function of an effect gets in hand: the attempt."""

from __future__ import annotations

from contextlib import contextmanager
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from sqlalchemy.exc import DBAPIError

from pgfence._api.inputs import check_key, is_async_session, is_session, reject_generator, unwrap_session
from pgfence._sql.effects import finish_inside
from pgfence._sql.errors import ErrorContext, raise_translated
from pgfence._sql.idempotency import NEEDED
from pgfence._sql.sqlstate import LOCK_NOT_AVAILABLE, sqlstate_of
from pgfence.effects._attempts import AsyncRunning, Running
from pgfence.effects._functions import check_plain_function, check_value
from pgfence.errors import IdempotencyMisuseError
from pgfence.idempotency._claim import connection_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
    from sqlalchemy.orm import Session, scoped_session

    from pgfence._values.codec import Codec
    from pgfence.effects._record import Record

R = TypeVar("R")
RunningT = TypeVar("RunningT", bound="Record")
NOTHING: Any = object()


class _Attempt(Generic[RunningT]):
    """What both twins know."""

    def __init__(
        self,
        running: RunningT,
        codec: Codec[Any],
        expect: Callable[[Callable[..., Any]], None],
    ) -> None:
        self._running = running
        self._codec = codec
        self._expect = expect
        """Refuses a function whose result could not be stored, as far as its annotation tells."""
        self._completed: Any = NOTHING
        self.doing: dict[str, object] = {}
        """The steps at work, each with a mark of whoever does it."""
        self.torn: dict[str, str] = {}
        """What was done and is not known to be saved: steps, with what is to be saved, and "" for the whole."""

    def __repr__(self) -> str:
        return repr(self._running).replace("Running", "Attempt")

    @property
    def number(self) -> int:
        """Which attempt it is, from 1 on. While the key is remembered it only grows, so whoever takes orders can refuse old ones."""
        return self._running.number

    def check(self) -> None:
        """Raise unless this attempt counts as far as this process knows. No I/O: call it as often as you like.

        Raises:
            AttemptLostError: its claim could not be renewed in time, or another attempt has taken over.
            IdempotencyMisuseError: the attempt has ended.
        """
        self._running.check()

    def _derived(self, name: str) -> str:
        """Return the key of a step for the provider.

        Raises:
            TypeError, ValueError: it is no name of a step.
        """
        if ":" in check_key(name, "the name of a step"):
            raise ValueError(
                f"the name of a step must not contain a colon, which stands between the key and it: {name!r}"
            )
        return f"{self._running.key}:{name}"

    def _saved(self, name: str) -> Any:
        text = self._running.steps.get(name)
        return NOTHING if text is None else self._codec.decode(text)

    @contextmanager
    def _at(self, name: str) -> Iterator[None]:
        """Be at work at a step.

        Raises:
            AttemptLostError: the attempt does not count any more.
            IdempotencyMisuseError: somebody else is at it, or the attempt is complete.
        """
        if self._completed is not NOTHING:
            raise IdempotencyMisuseError(f"{self!r} is complete: no step comes after complete()")
        self.check()
        mark = object()
        if self.doing.setdefault(name, mark) is not mark:
            raise IdempotencyMisuseError(
                f"the step {name!r} of {self!r} is at work already: give each step a name of its own"
            )
        try:
            yield
        finally:
            del self.doing[name]

    def _encode(self, name: str, value: Any) -> None:
        try:
            self.torn[name] = self._codec.encode(value)
        except BaseException as error:
            self.torn[""] = ""
            error.add_note(f"the step {name!r} of {self!r} was done, and what it returned is not saved")
            raise

    def _complete(self, session: Session, value: Any) -> None:
        # Not by what this process believes: the server refuses a late attempt so that its transaction cannot commit.
        self._running.expect_unfinished()
        self._codec.check(value, str(self._running.wanted))
        text = self._codec.encode(value)
        connection = connection_of(session)
        try:
            answer = finish_inside(connection, *self._running.inside(text))
        except DBAPIError as error:
            if sqlstate_of(error) == LOCK_NOT_AVAILABLE:
                raise IdempotencyMisuseError(
                    f"{self!r} was completed in another transaction, which has not ended: commit it, or roll it back, first"
                ) from error
            raise_translated(error, self._running.place, ErrorContext(NEEDED))
            raise
        self._running.expect(answer)
        self._completed = value


class Attempt(_Attempt[Running]):
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
        self._expect(fn)
        derived = self._derived(name)
        saved = self._saved(name)
        if saved is not NOTHING:
            return cast("R", saved)
        with self._at(name):
            if (saved := self._saved(name)) is not NOTHING:  # by another thread, since the look
                return cast("R", saved)
            if name in self.torn:  # done, and its save had no answer
                value = self._codec.decode(self.torn[name])
            else:
                value = check_value(fn(derived), fn)
                self._encode(name, value)
            self._running.save_step(name, self.torn[name])
            del self.torn[name]
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


class AsyncAttempt(_Attempt[AsyncRunning]):
    """One attempt at an effect, for tasks."""

    async def step(self, name: str, fn: Callable[[str], Awaitable[R]], /) -> R:
        """Do a step that an attempt before this one may have done, and save what it returns; see the sync twin."""
        reject_generator(fn)
        self._expect(fn)
        derived = self._derived(name)
        saved = self._saved(name)
        if saved is not NOTHING:
            return cast("R", saved)
        with self._at(name):
            if name in self.torn:  # done, and its save had no answer
                value = self._codec.decode(self.torn[name])
            else:
                value = fn(derived)
                # A plain function has done it by now: to refuse what it returned would be to forget it.
                if isawaitable(value):
                    value = await value
                self._encode(name, value)
            await self._running.save_step(name, self.torn[name])
            del self.torn[name]
        return cast("R", value)

    async def complete(self, session: AsyncSession | async_scoped_session[Any], value: Any, /) -> None:
        """Store the result in the caller's own transaction; see the sync twin."""
        if not is_async_session(session):
            raise TypeError(f"this attempt completes in an AsyncSession, not in a {type(session).__name__}")
        await unwrap_session(session).run_sync(self._complete, value)
