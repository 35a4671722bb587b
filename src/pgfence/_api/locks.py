"""The base classes of locks, with the methods `try_acquire`, `acquire`, `hold`, `wrap`, `holders` and `is_held`.

A lock class implements `try_acquire`, `acquire` and `holders`. The base classes in this module add the other methods.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Generic, Literal, Never, ParamSpec, Self, overload

from typing_extensions import TypeVar

from pgfence._api.cancel_on_loss import CancelOnLoss
from pgfence._api.decorators import Policy, acquire_for_call, acquire_for_call_async, compile_templates
from pgfence._api.handles import AsyncHeld, Held
from pgfence._api.inputs import check_choice, describe_function, reject_coroutine, reject_generator
from pgfence._api.misuse import HANDLE_NAMES, Guided
from pgfence._holds.carriers import THREADS
from pgfence.errors import LockTimeoutError, UnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from pgfence._api.decorators import AsyncWrap, AsyncWrapSkip, Busy, Unreachable, Wrap, WrapSkip
    from pgfence._holds.queue import Contender
    from pgfence._process.clock import Seconds
    from pgfence._process.coroutines import Coro
    from pgfence.keys import Name
    from pgfence.types import Holder, OnLoss

_GENERATOR = "the lock would be released before its body runs. Use hold() inside it"
P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=Held, default=Held)
AH = TypeVar("AH", bound=AsyncHeld, default=AsyncHeld)


def _list_hints(handle: str) -> dict[str, str]:
    """Return the attributes that locks of other libraries have, each with what to use instead."""
    return {**dict.fromkeys(HANDLE_NAMES, f"it belongs to the handle, {handle}"), "locked": "use is_held()"}


class LockBase(Guided, ABC, Generic[H]):
    """The methods of a sync lock."""

    _block = "`with lock.hold():`"
    _decorator = "`@lock.wrap()`"
    _absent = _list_hints("`held = lock.acquire()` or `with lock.hold() as held:`")

    _names: Sequence[Name]

    @abstractmethod
    def try_acquire(self) -> H | None:
        """Try once to acquire the lock, without waiting. Returns None if the lock is held, even if the caller itself holds it."""

    @abstractmethod
    def acquire(self, *, timeout: Seconds | None = None) -> H:
        """Acquire the lock, waiting until it is free or the timeout has passed."""

    @abstractmethod
    def _rename(self, names: Sequence[Name]) -> Self:
        """Return the same lock with other names."""

    @abstractmethod
    def holders(self) -> list[Holder]:
        """Return the current holders, as the server reports them, without taking a lock."""

    def _find_holders_quietly(self) -> list[Holder]:
        """Return the holders for an error message, or an empty list if the server has become unreachable."""
        try:
            return self.holders()
        except UnreachableError:
            return []

    def is_held(self) -> bool:
        """Return whether any process holds the lock at this moment, without taking a lock; errors are the same as for `holders`."""
        return bool(self.holders())

    def hold(self, *, timeout: Seconds | None = None, on_loss: OnLoss = "cancel") -> AbstractContextManager[H, None]:
        """Hold the lock for the duration of a `with` block.

        Limitations: the block continues after a loss, because sync code cannot be interrupted. Use `check()` or `on_lost()`.

        Args:
            timeout: the same as for `acquire`.
            on_loss: with "cancel", leaving the block after a loss raises LockLostError. With "flag", it does not, so check `lost`.

        Raises:
            PgfenceError: on entering, the same errors as `acquire`.
            LockLostError: on leaving after a loss, unless the block itself raised an exception.
            TransactionStateError: on leaving, if the lock is on your own Connection, and a transaction is open there. The
                transaction is rolled back, and the connection is closed.
        """
        if on_loss != "cancel":
            check_choice("on_loss", on_loss, ("cancel", "flag"))
        return HoldContext(self, timeout, flag=on_loss == "flag")

    @overload
    def wrap(
        self,
        *,
        timeout: Seconds | None = None,
        busy: Literal["raise"] = "raise",
        unreachable: Literal["raise", "run"] = "raise",
    ) -> Wrap: ...
    @overload
    def wrap(
        self, *, timeout: Seconds | None = None, busy: Literal["skip"], unreachable: Unreachable = "raise"
    ) -> WrapSkip: ...
    @overload
    def wrap(
        self,
        *,
        timeout: Seconds | None = None,
        busy: Callable[[LockTimeoutError], BaseException],
        unreachable: Literal["raise", "run"] = "raise",
    ) -> Wrap: ...
    def wrap(
        self, *, timeout: Seconds | None = None, busy: Busy = "raise", unreachable: Unreachable = "raise"
    ) -> object:
        """Return a decorator that runs a function while holding the lock.

        Names that are str are `str.format` templates, which are filled with the arguments of the call, for example
        `"close:{tenant_id}"`. To write a literal brace, double it. A call raises the same errors as `hold`.

        Args:
            timeout: seconds to wait. None means the configured default or, if `busy` is "skip" or a callable, no waiting.
            busy: what to do if the lock is not free. "raise" raises LockTimeoutError, and "skip" skips the call and returns None.
                A callable gets the LockTimeoutError and returns (or raises) the exception to raise instead.
            unreachable: what to do if the server cannot be reached within the timeout. "raise" raises UnreachableError, "run"
                runs the function unprotected, and "skip" skips the call, which requires `busy="skip"`. A wrong password, host
                or database always raises an error. If this process saw another holder of the lease or slot before the outage,
                "run" retries until that holder's TTL has passed.

        Raises:
            TypeError: at decoration, for a coroutine function (use the Async class) or a generator function (use `hold()` inside
                it).
            ValueError: at decoration, if a name is not a valid template, or one of its fields is not an argument of the function;
                when `wrap` is called, if an option has an unknown value, or two options contradict each other.
        """
        policy = Policy(timeout, busy, unreachable)

        def decorate(fn: Callable[P, R]) -> Callable[P, R | None]:
            reject_coroutine(fn, "a sync lock would be released before it runs. Use the Async class")
            reject_generator(fn, _GENERATOR)
            choose_names = compile_templates(self._names, fn)

            @functools.wraps(fn)
            def run_guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
                lock = self._rename(choose_names(args, kwargs)) if choose_names else self
                try:
                    handle = acquire_for_call(lock, policy)
                except LockTimeoutError as error:
                    policy.handle_busy(error)
                    return None
                except UnreachableError as error:
                    if policy.skips(error):
                        return None
                    return fn(*args, **kwargs)
                if handle is None:
                    return None
                with handle:
                    return fn(*args, **kwargs)

            return run_guarded

        return decorate


class HoldContext(AbstractContextManager[H, None]):
    """The context manager that `hold()` returns. Several threads may share it, each for its own block."""

    __slots__ = ("_flag", "_handles", "_lock", "_timeout")

    def __init__(self, lock: LockBase[H], timeout: Seconds | None, *, flag: bool) -> None:
        self._lock = lock
        self._timeout = timeout
        self._flag = flag
        self._handles: dict[Contender, H] = {}

    def __enter__(self) -> H:
        handle = self._lock.acquire(timeout=self._timeout)
        self._handles[THREADS.get_contender()] = handle
        return handle

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        # A block may be left by a different thread than the one that entered it.
        handle = self._handles.pop(THREADS.get_contender(), None) or self._handles.popitem()[1]
        handle._leave(exc, flag=self._flag)

    def __call__(self, _: object) -> Never:
        """Raise an error, because `hold()` is not a decorator."""
        raise TypeError("hold() is not a decorator: use wrap()")


class AsyncLockBase(Guided, ABC, Generic[AH]):
    """The methods of an async lock."""

    _block = "`async with lock.hold():`"
    _decorator = "`@lock.wrap()`"
    _absent = _list_hints("`held = await lock.acquire()` or `async with lock.hold() as held:`")

    _names: Sequence[Name]

    @abstractmethod
    async def try_acquire(self) -> AH | None:
        """Try once to acquire the lock, without waiting. Returns None if the lock is held, even if the caller itself holds it."""

    @abstractmethod
    async def acquire(self, *, timeout: Seconds | None = None) -> AH:
        """Acquire the lock, waiting until it is free or the timeout has passed."""

    @abstractmethod
    def _rename(self, names: Sequence[Name]) -> Self:
        """Return the same lock with other names."""

    @abstractmethod
    async def holders(self) -> list[Holder]:
        """Return the current holders, as the server reports them, without taking a lock."""

    async def _find_holders_quietly(self) -> list[Holder]:
        """Return the holders for an error message, or an empty list if the server has become unreachable."""
        try:
            return await self.holders()
        except UnreachableError:
            return []

    async def is_held(self) -> bool:
        """Return whether any process holds the lock at this moment, without taking a lock; errors are the same as for `holders`."""
        return bool(await self.holders())

    def hold(
        self, *, timeout: Seconds | None = None, on_loss: OnLoss = "cancel"
    ) -> AbstractAsyncContextManager[AH, None]:
        """Hold the lock for the duration of an `async with` block.

        Args:
            timeout: the same as for `acquire`.
            on_loss: with "cancel", a loss cancels the block, and leaving it raises LockLostError. With "flag", neither
                happens, so check `lost`.

        Raises:
            PgfenceError: on entering, the same errors as `acquire`.
            LockLostError: on leaving after a loss, unless the block itself raised another exception.
            TransactionStateError: on leaving, if the lock is on your own AsyncConnection, and a transaction is open there. The
                transaction is rolled back, and the connection is closed.
        """
        if on_loss != "cancel":
            check_choice("on_loss", on_loss, ("cancel", "flag"))
        return AsyncHoldContext(self, timeout, flag=on_loss == "flag")

    @overload
    def wrap(
        self,
        *,
        timeout: Seconds | None = None,
        busy: Literal["raise"] = "raise",
        unreachable: Literal["raise", "run"] = "raise",
    ) -> AsyncWrap: ...
    @overload
    def wrap(
        self, *, timeout: Seconds | None = None, busy: Literal["skip"], unreachable: Unreachable = "raise"
    ) -> AsyncWrapSkip: ...
    @overload
    def wrap(
        self,
        *,
        timeout: Seconds | None = None,
        busy: Callable[[LockTimeoutError], BaseException],
        unreachable: Literal["raise", "run"] = "raise",
    ) -> AsyncWrap: ...
    def wrap(
        self, *, timeout: Seconds | None = None, busy: Busy = "raise", unreachable: Unreachable = "raise"
    ) -> object:
        """Return a decorator that runs a coroutine function while holding the lock, and cancels it if the lock is lost.

        Arguments and errors are the same as for the sync `wrap`. Decorating anything other than a coroutine function raises
        TypeError.
        """
        policy = Policy(timeout, busy, unreachable)

        def decorate(fn: Callable[P, Coro[R]]) -> Callable[P, Coro[R | None]]:
            reject_generator(fn, _GENERATOR)
            if not inspect.iscoroutinefunction(fn):
                raise TypeError(
                    f"{describe_function(fn)} is not a coroutine function, and an async lock wraps only those. Use the sync class"
                )
            choose_names = compile_templates(self._names, fn)

            @functools.wraps(fn)
            async def run_guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
                lock = self._rename(choose_names(args, kwargs)) if choose_names else self
                try:
                    handle = await acquire_for_call_async(lock, policy)
                except LockTimeoutError as error:
                    policy.handle_busy(error)
                    return None
                except UnreachableError as error:
                    if policy.skips(error):
                        return None
                    return await fn(*args, **kwargs)
                if handle is None:
                    return None
                watching = CancelOnLoss()
                watching.start(handle)
                async with watching:
                    return await fn(*args, **kwargs)

            return run_guarded

        return decorate


class AsyncHoldContext(CancelOnLoss, AbstractAsyncContextManager[AH, None]):
    """The context manager that `hold()` returns. Several tasks may share it, each for its own block."""

    def __init__(self, lock: AsyncLockBase[AH], timeout: Seconds | None, *, flag: bool) -> None:
        super().__init__(flag=flag)
        self._lock = lock
        self._timeout = timeout
        self._others: dict[asyncio.Task[object] | None, CancelOnLoss] = {}
        """The blocks of further tasks while the first task's block is open."""

    async def __aenter__(self) -> AH:
        handle = await self._lock.acquire(timeout=self._timeout)
        if self._task is None:
            self.start(handle)
        else:
            other = CancelOnLoss(flag=self._flag)
            other.start(handle)
            self._others[other._task] = other
        return handle

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        if self._others and (other := self._others.pop(asyncio.current_task(), None)) is not None:
            await other.__aexit__(kind, exc, tb)
            return
        try:
            await super().__aexit__(kind, exc, tb)
        finally:
            self._task = None

    def __call__(self, _: object) -> Never:
        """Raise an error, because `hold()` is not a decorator."""
        raise TypeError("hold() is not a decorator: use wrap()")
