"""The types and the policy of `wrap()`, and the names that are built from a call's arguments."""

from __future__ import annotations

import inspect
import string
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TYPE_CHECKING, Literal, Never, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from typing_extensions import deprecated

from pgfence._api.inputs import check_choice, describe_function
from pgfence._process.callbacks import log
from pgfence._process.clock import clock
from pgfence.errors import LockTimeoutError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pgfence._process.clock import Seconds
    from pgfence._process.coroutines import Coro
    from pgfence.keys import Name

P = ParamSpec("P")
R = TypeVar("R")
H_co = TypeVar("H_co", covariant=True)

# The send type is contravariant, so Never matches all generators.
AnyGenerator: TypeAlias = Generator[object, Never, object] | AsyncGenerator[object, Never]

Busy = Literal["raise", "skip"] | Callable[[LockTimeoutError], BaseException]
Unreachable = Literal["raise", "skip", "run"]


class Wrap(Protocol):
    """The type of the decorator that `wrap()` returns. It keeps the signature of the function."""

    @overload
    @deprecated("a sync lock would be released before an async function runs: use the Async class")
    def __call__(self, fn: Callable[P, Coro[R]], /) -> Never: ...
    @overload
    @deprecated("a lock would be released before the body of a generator runs: use hold() inside the generator")
    def __call__(self, fn: Callable[P, AnyGenerator], /) -> Never: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


class WrapSkip(Protocol):
    """The type of the decorator that `wrap(busy="skip")` returns. A decorated function returns None if its call is skipped."""

    @overload
    @deprecated("a sync lock would be released before an async function runs: use the Async class")
    def __call__(self, fn: Callable[P, Coro[R]], /) -> Never: ...
    @overload
    @deprecated("a lock would be released before the body of a generator runs: use hold() inside the generator")
    def __call__(self, fn: Callable[P, AnyGenerator], /) -> Never: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R | None]: ...


class AsyncWrap(Protocol):
    """`Wrap` for coroutine functions."""

    def __call__(self, fn: Callable[P, Coro[R]], /) -> Callable[P, Coro[R]]: ...


class AsyncWrapSkip(Protocol):
    """`WrapSkip` for coroutine functions."""

    def __call__(self, fn: Callable[P, Coro[R]], /) -> Callable[P, Coro[R | None]]: ...


def find_unsafe_time(error: UnreachableError) -> float:
    """Return how many seconds are left of the TTL of the holder known before the outage, or 0.0 if no holder was known."""
    return max(0.0, error._held_until - clock()) if error._held_until is not None else 0.0


class Policy:
    """The rules for what a decorated call does if the lock is held or the server is unreachable."""

    __slots__ = ("_busy", "_unreachable", "timeout", "tries")

    def __init__(self, timeout: Seconds | None, busy: Busy, unreachable: Unreachable) -> None:
        if not callable(busy):
            check_choice("busy", busy, ("raise", "skip"))
        check_choice("unreachable", unreachable, ("raise", "skip", "run"))
        if unreachable == "skip" and busy != "skip":
            raise ValueError('unreachable="skip" returns None, and therefore requires busy="skip"')
        self.timeout = 0 if timeout is None and busy != "raise" else timeout
        self.tries = busy == "skip" and self.timeout == 0
        """Whether the call tries once, without waiting, because a skipped call does not need the name of the holder."""
        self._busy = busy
        self._unreachable = unreachable

    def handle_busy(self, error: LockTimeoutError) -> None:
        """Raise an error for a lock that is held, or return if the call is to be skipped."""
        if callable(self._busy):
            raise self._busy(error) from error
        if self._busy == "raise":
            raise error

    def find_retry_time(self, error: UnreachableError) -> float:
        """Return for how many seconds to retry before the call runs unprotected, or 0.0 for no retry."""
        return find_unsafe_time(error) if self._unreachable == "run" and error.retryable else 0.0

    def skips(self, error: UnreachableError) -> bool:
        """Return True if the call is to be skipped, and False if it is to run unprotected. Otherwise, raise the error."""
        if self._unreachable == "raise" or not error.retryable:
            raise error
        log.warning(
            "the server is unreachable, so the call %s: %s",
            "is skipped" if self._unreachable == "skip" else "runs UNPROTECTED",
            error,
        )
        return self._unreachable == "skip"


class _Lock(Protocol[H_co]):
    def try_acquire(self) -> H_co | None: ...
    def acquire(self, *, timeout: Seconds | None = None) -> H_co: ...


class _AsyncLock(Protocol[H_co]):
    async def try_acquire(self) -> H_co | None: ...
    async def acquire(self, *, timeout: Seconds | None = None) -> H_co: ...


def acquire_for_call(lock: _Lock[H_co], policy: Policy) -> H_co | None:
    """Acquire the lock of a decorated call. A call that may run without a server first waits out the TTL of a known holder."""
    timeout, tries = policy.timeout, policy.tries
    while True:
        try:
            return lock.try_acquire() if tries else lock.acquire(timeout=timeout)
        except UnreachableError as error:
            # A holder that was known before the outage may still be running: an unprotected call must not run beside it.
            timeout, tries = policy.find_retry_time(error), False
            if not timeout:
                raise


async def acquire_for_call_async(lock: _AsyncLock[H_co], policy: Policy) -> H_co | None:
    """Acquire the lock of a decorated call, as `acquire_for_call` does."""
    timeout, tries = policy.timeout, policy.tries
    while True:
        try:
            return await (lock.try_acquire() if tries else lock.acquire(timeout=timeout))
        except UnreachableError as error:
            timeout, tries = policy.find_retry_time(error), False
            if not timeout:
                raise


def compile_templates(
    names: Sequence[Name], fn: Callable[..., object], fill: Callable[..., str] = str.format
) -> Callable[[tuple[object, ...], Mapping[str, object]], list[Name]] | None:
    """Return a function that builds the names from a call's arguments, or None if no name is a template.

    Raises:
        ValueError: a name is not a valid template, or a field of a template is not an argument of `fn`.
    """
    texts = list(dict.fromkeys(name for name in names if isinstance(name, str)))
    fields = [(text, field) for text in texts for field in _list_all_fields(text)]
    if not fields and not any("{" in text or "}" in text for text in texts):
        return None
    signature = inspect.signature(fn)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for text, field in fields:
        root = field.replace("[", ".").split(".", 1)[0]
        if root not in signature.parameters and not (takes_any and root.isidentifier()):
            function, arguments = describe_function(fn), ", ".join(signature.parameters)
            missing = f"{function} has no argument {root!r}" if root else f"a field must name an argument of {function}"
            raise ValueError(
                f"the template {text!r} contains the field {{{field}}}, but {missing}:"
                f" {f'its arguments are ({arguments})' if arguments else 'it has no arguments'}. To write a literal brace, double it"
            )

    def choose_names(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Name]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {**kwargs, **bound.arguments}
        return [fill(name, **values) if isinstance(name, str) else name for name in names]

    return choose_names


def _list_all_fields(text: str) -> list[str]:
    """Return the fields of a template.

    Raises:
        ValueError: the text is not a valid template.
    """
    try:
        return list(_list_fields(text))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a valid template ({error}). To write a literal brace, double it") from None


def _list_fields(text: str) -> Iterator[str]:
    """Yield the fields of a template, including those inside a format specification."""
    for _, field, specification, _ in string.Formatter().parse(text):
        if field is not None:
            yield field
        if specification:
            yield from _list_fields(specification)
