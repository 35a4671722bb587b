"""Functions under a lock: what `wrap()` returns, what it does when the lock is busy, and names from a call's arguments."""

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

# Never is what every generator accepts from send(): this fits all of them.
AnyGenerator: TypeAlias = Generator[object, Never, object] | AsyncGenerator[object, Never]

Busy = Literal["raise", "skip"] | Callable[[LockTimeoutError], BaseException]
Unreachable = Literal["raise", "skip", "run"]


class Wrap(Protocol):
    """What `wrap()` returns: a decorator that keeps the signature."""

    @overload
    @deprecated("a sync lock ends before an async function runs: use the Async twin")
    def __call__(self, fn: Callable[P, Coro[R]], /) -> Never: ...
    @overload
    @deprecated("a lock cannot be held over a generator: hold() inside it")
    def __call__(self, fn: Callable[P, AnyGenerator], /) -> Never: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


class WrapSkip(Protocol):
    """What `wrap(busy="skip")` returns: the function's result, or None when it was skipped."""

    @overload
    @deprecated("a sync lock ends before an async function runs: use the Async twin")
    def __call__(self, fn: Callable[P, Coro[R]], /) -> Never: ...
    @overload
    @deprecated("a lock cannot be held over a generator: hold() inside it")
    def __call__(self, fn: Callable[P, AnyGenerator], /) -> Never: ...
    @overload
    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R | None]: ...


class AsyncWrap(Protocol):
    """As `Wrap`, for coroutine functions."""

    def __call__(self, fn: Callable[P, Coro[R]], /) -> Callable[P, Coro[R]]: ...


class AsyncWrapSkip(Protocol):
    """As `WrapSkip`, for coroutine functions."""

    def __call__(self, fn: Callable[P, Coro[R]], /) -> Callable[P, Coro[R | None]]: ...


def find_unsafe_time(error: UnreachableError) -> float:
    """Return the seconds left of the TTL of a holder that was known before the server went away; 0.0 if none was."""
    return max(0.0, error._held_until - clock()) if error._held_until is not None else 0.0


class Policy:
    """What a decorated call does when the lock is busy or the server is away."""

    __slots__ = ("_busy", "_unreachable", "timeout", "tries")

    def __init__(self, timeout: Seconds | None, busy: Busy, unreachable: Unreachable) -> None:
        if not callable(busy):
            check_choice("busy", busy, ("raise", "skip"))
        check_choice("unreachable", unreachable, ("raise", "skip", "run"))
        if unreachable == "skip" and busy != "skip":
            raise ValueError('unreachable="skip" returns None, and so goes only with busy="skip"')
        self.timeout = 0 if timeout is None and busy != "raise" else timeout
        self.tries = busy == "skip" and self.timeout == 0
        """Skipping needs no error that names the holder, which would cost a round trip."""
        self._busy = busy
        self._unreachable = unreachable

    def handle_busy(self, error: LockTimeoutError) -> None:
        """Do what was asked for when the lock is busy: skip, or raise."""
        if callable(self._busy):
            raise self._busy(error) from error
        if self._busy == "raise":
            raise error

    def find_retry_time(self, error: UnreachableError) -> float:
        """Return for how many seconds to retry before the call runs unprotected; 0.0: it need not wait."""
        return find_unsafe_time(error) if self._unreachable == "run" and error.retryable else 0.0

    def skips(self, error: UnreachableError) -> bool:
        """Whether the call ends here; False: it runs without protection, as its author decided."""
        if self._unreachable == "raise" or not error.retryable:
            raise error
        log.warning(
            "no server: the call %s. %s", "is skipped" if self._unreachable == "skip" else "runs UNPROTECTED", error
        )
        return self._unreachable == "skip"


class _Lock(Protocol[H_co]):
    def try_acquire(self) -> H_co | None: ...
    def acquire(self, *, timeout: Seconds | None = None) -> H_co: ...


class _AsyncLock(Protocol[H_co]):
    async def try_acquire(self) -> H_co | None: ...
    async def acquire(self, *, timeout: Seconds | None = None) -> H_co: ...


def acquire_for_call(lock: _Lock[H_co], policy: Policy) -> H_co | None:
    """Acquire what a decorated call needs; a call that may run without a server first outlasts the TTL of a known holder."""
    timeout, tries = policy.timeout, policy.tries
    while True:
        try:
            return lock.try_acquire() if tries else lock.acquire(timeout=timeout)
        except UnreachableError as error:
            timeout, tries = policy.find_retry_time(error), False
            if not timeout:
                raise


async def acquire_for_call_async(lock: _AsyncLock[H_co], policy: Policy) -> H_co | None:
    """Acquire what a decorated call needs; see the sync twin."""
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
    """Return a function from a call's arguments to its names; None when no name depends on them.

    Args:
        names: those that are texts may be templates.
        fn: whose arguments they name.
        fill: what makes a name of a template and of the arguments.

    Raises:
        ValueError: a field of a template is no argument of the function.
    """
    texts = {name for name in names if isinstance(name, str)}
    fields = {field for text in texts for field in _list_fields(text)}
    if not fields and not any("{" in text or "}" in text for text in texts):
        return None
    signature = inspect.signature(fn)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for field in fields:
        root = field.replace("[", ".").split(".", 1)[0]
        if root not in signature.parameters and not (takes_any and root.isidentifier()):
            raise ValueError(
                f"the field {{{field}}} of a name is no argument of {describe_function(fn)}; it has ({', '.join(signature.parameters)})."
                " Double a brace that is meant literally"
            )

    def choose_names(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Name]:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = {**kwargs, **bound.arguments}
        return [fill(name, **values) if isinstance(name, str) else name for name in names]

    return choose_names


def _list_fields(text: str) -> Iterator[str]:
    """Yield the fields of a template, those inside a format specification too."""
    for _, field, specification, _ in string.Formatter().parse(text):
        if field is not None:
            yield field
        if specification:
            yield from _list_fields(specification)
