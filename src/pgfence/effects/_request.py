"""Options of an effect, checked once for the sync and async classes, and the handling of results and errors."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, NoReturn, TypeAlias, cast, get_type_hints

from typing_extensions import TypeVar

from pgfence._api.contexts import attach
from pgfence._api.inputs import DAY, check_error_classes, check_keep, check_key, describe_function
from pgfence._api.misuse import Guided
from pgfence._leases.terms import ttl_of
from pgfence._process.clock import seconds
from pgfence._values import errors
from pgfence._values.codec import Codec
from pgfence._values.fingerprint import fingerprint
from pgfence.effects._claim import EffectKey
from pgfence.effects._ends import describe_error
from pgfence.effects._handles import NOTHING
from pgfence.effects._manager import EffectManager
from pgfence.effects._running import claim
from pgfence.errors import AttemptLostError, IdempotencyMisuseError, PgfenceError
from pgfence.lease._engines import EngineSourceT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pgfence._process.clock import Seconds
    from pgfence.effects._claim import StoredResult
    from pgfence.effects._handles import _Attempt
    from pgfence.effects._running import RunningAttempt
    from pgfence.lease._engines import EngineKind

T = TypeVar("T", default=Any)
End: TypeAlias = Literal["record", "free", "lapse", "lost"]

log = logging.getLogger("pgfence.idempotency")

WHY = "a key is claimed in a separate transaction before the work begins"
_MEANINGS = ". If this error means that nothing was done, add its class to free=; if it is the result of the work, add its class to record="


class EffectOptions(Guided, Generic[EngineSourceT, T]):
    """The options of an effect and its runs, for the sync and async classes."""

    _engines: EngineKind[EngineSourceT]

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
                f"keep={self._wanted.keep:g} is shorter than ttl={self._wanted.ttl:g}: a caller that retries when the claim of an"
                " attempt expires, up to ttl seconds later, could find that the result was already deleted, and run the work again."
                " Pass a longer keep= or a shorter ttl="
            )
        self._codec = Codec.of(result)
        self._reached = None if result is None else frozenset(self._codec.classes.values())
        self._timeout = seconds(timeout)
        self._record = check_error_classes(record)
        self._free = check_error_classes(free, "free")
        self._engine = self._engines.bind(engine, type(self).__name__, WHY)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._wanted.scope!r} {self._wanted.key!r}>"

    # ------------------------------------------------------------ the function and its result

    def _check_function(self, fn: Callable[..., object]) -> None:
        """Raise an error if the annotation of a function shows that its result could not be stored."""
        if why := _find_unstorable(fn, self._reached):
            raise IdempotencyMisuseError(f"{describe_function(fn)} was not called: {why}")

    def _replay(self, stored: StoredResult) -> T:
        """Return what is stored, or raise the recorded error."""
        if stored.text is None:
            raise IdempotencyMisuseError(
                f"{self._wanted} was used over HTTP, so an HTTP response is stored under it, which run() cannot return: use"
                " another key or scope for this effect"
            )
        if stored.status == "failed":
            raise errors.decode(stored.text, self._record, self._codec, str(self._wanted))
        return self._codec.decode(stored.text)

    def _encode(self, value: T, attempt: _Attempt) -> str:
        attempt.unsaved[""] = ""
        try:
            self._codec.check(value, str(self._wanted))
            return self._codec.encode(value)
        except BaseException as error:
            error.add_note(f"{attempt._running} was done, but its result could not be stored")
            raise

    # ------------------------------------------------------------ one run, sync and async

    async def _claim(self) -> RunningAttempt | StoredResult:
        manager, place = self._engine.find_manager(EffectManager)
        return await claim(manager, place, self._wanted, self._timeout)

    async def _succeed(self, attempt: _Attempt, value: T) -> T:
        """End an attempt whose function has returned, and return the result that is stored."""
        running = attempt._running
        try:
            if attempt._completed is not NOTHING:
                if not await running.confirm():
                    raise IdempotencyMisuseError(
                        f"{attempt._running} was completed in a transaction that was not committed before the function returned, so no"
                        " result is stored: commit the transaction inside the function"
                    )
                return cast("T", attempt._completed)
            text = self._encode(value, attempt)
        except BaseException as error:
            await self._fail(attempt, error)
            raise
        await running.finish("done", text)
        return value

    async def _fail(self, attempt: _Attempt, error: BaseException) -> None:
        """End an attempt that has no result. The error takes precedence over failures of this method."""
        how, text = self._choose_end(error, attempt)
        running, kind = attempt._running, describe_error(error)
        describe: Callable[[str], str]
        try:
            if how in ("record", "free") and await attempt._may_be_committed():
                how = "lapse"
            match how:
                case "record":
                    await running.finish("failed", text)
                    describe = running.describe_recorded
                case "free":
                    describe = partial(running.describe_freed, freed=await running.free())
                case "lapse" if isinstance(error, Exception):
                    describe = partial(running.describe_lapse, row=await running.lapse(kind))
                case "lapse":  # an interrupt or a cancellation must not wait for the server
                    running.let_lapse(kind)
                    describe = running.describe_lapse
                case "lost":  # the error already says what happened
                    running.let_lapse()
                    return
            self._log_end(error, attempt, how, describe)
        except Exception as failure:
            attach(error, failure, "while ending the attempt")

    def _choose_end(self, error: BaseException, attempt: _Attempt) -> tuple[End, str]:
        """Return how an attempt ends with an error, and the JSON of a recorded error."""
        if isinstance(error, AttemptLostError):
            return "lost", ""
        # If something may have been done without being saved, such as a running step, the outcome is unknown whatever the error
        # is.
        if attempt.unsaved or attempt.in_progress:
            return "lapse", ""
        # `Exception` in `record` or `free` does not include pgfence's errors, which count only if one of their own classes is
        # listed.
        if errors.is_among(error, self._record):
            try:
                return "record", errors.encode(cast("Exception", error), self._codec)
            except Exception as failure:
                attach(error, failure, "while this error was being recorded")
                return "lapse", ""
        return ("free" if errors.is_among(error, self._free) else "lapse"), ""

    def _log_end(self, error: BaseException, attempt: _Attempt, how: End, describe: Callable[[str], str]) -> None:
        """Note on an error what happens to the key of the attempt, and log it."""
        if not attempt._running.ours:  # this is a forked child, and the parent still runs the attempt
            return
        known = attempt.unsaved or attempt.in_progress or attempt._completed is not NOTHING
        named = how != "lapse" or known or isinstance(error, PgfenceError) or not isinstance(error, Exception)
        error.add_note(describe("this error") + ("" if named else _MEANINGS))
        log.log(logging.WARNING if how == "lapse" else logging.INFO, "%s", describe(describe_error(error)))


def _find_unstorable(fn: Callable[..., object], reached: frozenset[type] | None) -> str | None:
    """Return why the annotated result of a function could not be stored, or None if the annotation does not show it.

    `reached` contains the classes that the option `result` allows, or is None if the option was not given.
    """
    try:
        annotation = getattr(fn, "__annotations__", {}).get("return")
        if annotation is None:
            return None
        alone = SimpleNamespace(__annotations__={"return": annotation})
        returns = get_type_hints(alone, getattr(fn, "__globals__", {}))["return"]
    except Exception:  # an annotation that cannot be evaluated says nothing about the result
        return None
    if returns in (Never, NoReturn):
        return None
    try:
        found = Codec.of(returns).classes.values()
    except TypeError as error:
        return str(error) if reached is None else None
    for one in found:
        # The annotation may be a base class of a class that `result` contains.
        if not any(issubclass(other, one) for other in reached or ()):
            return f"it returns an instance of {one.__qualname__}, which could not be stored. Pass result={one.__qualname__}"
    return None
