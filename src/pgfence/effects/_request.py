"""What both twins of an effect know: the arguments, read once, and what is decided about values and errors."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, cast

from typing_extensions import TypeVar

from pgfence._api.contexts import attach
from pgfence._api.inputs import DAY, check_error_classes, check_keep, check_key, describe_function
from pgfence._api.misuse import Guided
from pgfence._leases.terms import ttl_of
from pgfence._process.clock import seconds
from pgfence._values import errors
from pgfence._values.codec import Codec
from pgfence._values.fingerprint import fingerprint
from pgfence.effects._ends import kind_of
from pgfence.effects._functions import find_unreached
from pgfence.effects._wanted import EffectKey
from pgfence.errors import AttemptLostError, IdempotencyMisuseError, PgfenceError
from pgfence.lease._request import EngineSourceT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgfence._process.clock import Seconds
    from pgfence.effects._handles import _Attempt
    from pgfence.effects._wanted import StoredResult

T = TypeVar("T", default=Any)
End: TypeAlias = Literal["record", "free", "lapse", "lost"]

log = logging.getLogger("pgfence.idempotency")

_MEANINGS = ". If this error means that nothing was done, name its class in free=; if it is the result of the work, name it in record="


class EffectOptions(Guided, ABC, Generic[EngineSourceT, T]):
    """The arguments of an effect, for both twins."""

    _block = _decorator = "run(fn), which calls fn(attempt)"
    _absent = dict.fromkeys(("acquire", "complete", "hold", "step", "wrap"), f"use {_block}")

    def __init__(
        self,
        engine: EngineSourceT,
        key: str,
        *,
        scope: str,
        payload: object = None,
        result: type[T] | None = None,
        ttl: Seconds = 60,
        keep: Seconds = DAY,
        timeout: Seconds = 0,
        record: Sequence[type[Exception]] = (),
        free: Sequence[type[Exception]] = (),
        takeover: bool = True,
    ) -> None:
        if not isinstance(takeover, bool):
            raise TypeError(f"takeover must be True or False, not {takeover!r}")
        self._wanted = EffectKey(
            scope=check_key(scope, "the scope"),
            key=check_key(key, "the key"),
            fingerprint=fingerprint(payload),
            ttl=ttl_of(ttl),
            keep=check_keep(keep),
            takeover=takeover,
        )
        if self._wanted.keep < self._wanted.ttl:
            raise ValueError(
                f"keep={self._wanted.keep:g} is shorter than ttl={self._wanted.ttl:g}: the result would be forgotten before a dead"
                " attempt is given up"
            )
        self._codec = Codec.of(result)
        self._reached = None if result is None else frozenset(self._codec.classes.values())
        self._timeout = seconds(timeout)
        self._record = check_error_classes(record)
        self._free = check_error_classes(free, "free")
        self._engine = self._check_engine(engine, type(self).__name__)

    @staticmethod
    @abstractmethod
    def _check_engine(engine: object, what: str) -> EngineSourceT:
        """Reject what is not a source of an engine of this kind."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._wanted.scope!r} {self._wanted.key!r}>"

    def _expect(self, fn: Callable[..., Any]) -> None:
        """Refuse a function whose result could not be stored, as far as its annotation tells and nobody has told `result`.

        Raises:
            IdempotencyMisuseError: it returns something that only `result` could name.
        """
        if why := find_unreached(fn, self._reached):
            raise IdempotencyMisuseError(f"{describe_function(fn)} was not called: {why}")

    def _replay(self, stored: StoredResult) -> T:
        """Return what is stored, or raise the recorded error."""
        if stored.text is None:
            raise IdempotencyMisuseError(f"{self._wanted} was used over HTTP: what is stored is a reply")
        if stored.status == "failed":
            raise errors.decode(stored.text, self._record, self._codec, str(self._wanted))
        value: T = self._codec.decode(stored.text)
        return value

    def _encoded(self, value: Any, attempt: _Attempt[Any]) -> str:
        attempt.torn[""] = ""
        try:
            self._codec.check(value, str(self._wanted))
            return self._codec.encode(value)
        except BaseException as error:
            error.add_note(f"{attempt!r} was done, and nobody will know: what came of it is not stored")
            raise

    def _uncommitted(self, attempt: _Attempt[Any]) -> IdempotencyMisuseError:
        return IdempotencyMisuseError(
            f"{attempt!r} was completed in a transaction that was not committed by the end of the function: nothing is stored"
        )

    def _end_of(self, error: BaseException, attempt: _Attempt[Any]) -> tuple[End, str]:
        """Return how an attempt ends by an error, and of a recorded one its JSON.

        What was done and is not known to be saved is unknown, whatever the error is, and so is what another thread or task is
        still doing. And nobody means an error of ours who says `Exception`: it counts only where a class of ours is named.
        """
        if isinstance(error, AttemptLostError):
            return "lost", ""
        if attempt.torn or attempt.doing:
            return "lapse", ""
        if errors.is_among(error, self._record):
            try:
                return "record", errors.encode(cast("Exception", error), self._codec)
            except Exception as failure:
                attach(error, failure, "while it was recorded")
                return "lapse", ""
        return ("free" if errors.is_among(error, self._free) else "lapse"), ""

    def _tell(self, error: BaseException, attempt: _Attempt[Any], how: End, told: Callable[[str], str]) -> None:
        """Say on the error, and in the log, what becomes of the key of an attempt that ended with it."""
        if how == "lost" or not attempt._running.ours:  # the error says it, or the parent of this child will
            return
        unsaved = attempt.torn or attempt.doing
        named = how != "lapse" or unsaved or isinstance(error, PgfenceError) or not isinstance(error, Exception)
        error.add_note(told("this error") + ("" if named else _MEANINGS))
        log.log(logging.WARNING if how == "lapse" else logging.INFO, "%s", told(kind_of(error)))
