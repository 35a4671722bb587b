"""The verbs of everything that is held: `try_acquire`, `acquire`, `hold`, and `wrap` for functions.

A primitive says how one attempt is made; this file says what the verbs make of it, sync and async.
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

_GENERATOR = "the lock would end before its body runs. Use hold() inside it"
P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=Held, default=Held)
AH = TypeVar("AH", bound=AsyncHeld, default=AsyncHeld)


def _list_hints(handle: str) -> dict[str, str]:
    """Return what other libraries' locks have, and where it is here."""
    return {**dict.fromkeys(HANDLE_NAMES, f"it belongs to the handle, {handle}"), "locked": "use is_held()"}


class LockBase(Guided, ABC, Generic[H]):
    """The sync verbs."""

    _block = "`with lock.hold():`"
    _decorator = "`@lock.wrap()`"
    _absent = _list_hints("`held = lock.acquire()` or `with lock.hold() as held:`")

    _names: Sequence[Name]

    @abstractmethod
    def try_acquire(self) -> H | None:
        """Try once, without waiting. None: it is held, by another contender or by the caller itself."""

    @abstractmethod
    def acquire(self, *, timeout: Seconds | None = None) -> H:
        """Wait for the lock."""

    @abstractmethod
    def _rename(self, names: Sequence[Name]) -> Self:
        """The same lock on other names."""

    @abstractmethod
    def holders(self) -> list[Holder]:
        """Return who holds it at this moment, as the server sees it. Looking never takes a lock."""

    def _find_holders_quietly(self) -> list[Holder]:
        """Return the holders for a message about a lock that is held; the server may be away by now, which changes nothing."""
        try:
            return self.holders()
        except UnreachableError:
            return []

    def is_held(self) -> bool:
        """Say whether anybody holds it at this moment. Looking never takes a lock."""
        return bool(self.holders())

    def hold(self, *, timeout: Seconds | None = None, on_loss: OnLoss = "cancel") -> AbstractContextManager[H, None]:
        """Hold the lock for the length of a `with` block.

        Not promised: that the block stops at a loss. Sync code cannot be interrupted: `check()` or `on_lost()` tell it.

        Args:
            timeout: seconds to wait; None is the configured default, `math.inf` for ever, 0 does not wait.
            on_loss: "cancel": leaving the block after a loss raises LockLostError. "flag": it does not; look at `lost`.

        Raises:
            PgfenceError: on entering, as `acquire`.
            LockLostError: on leaving, unless the block itself raised.
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
        """Return a decorator: the function runs while the lock is held.

        Names that are text are `str.format` templates over the arguments of the call: `"close:{tenant_id}"`; `{{` stands for
        a brace.

        Args:
            timeout: seconds to wait. None is the configured default; with `busy="skip"` or a callable it does not wait.
            busy: when it is not free: "raise" LockTimeoutError; "skip" the call and return None; or a callable that gets
                the LockTimeoutError and returns (or raises) the exception to raise instead.
            unreachable: what to do if the server cannot be reached at the end of the timeout: "raise" UnreachableError; "run"
                unprotected, which is your decision; "skip", only together with `busy="skip"`. A wrong password, host or
                database raises in any case. If this process has found a lease or slot held before the outage, "run" retries
                until that holder's TTL is over.

        Raises:
            TypeError: at decoration, for a coroutine function (use the Async twin) or a generator (hold inside it).
            ValueError: at decoration, for a template field that is no argument; at once, for choices that do not go together.
        """
        policy = Policy(timeout, busy, unreachable)

        def decorate(fn: Callable[P, R]) -> Callable[P, R | None]:
            reject_coroutine(fn, "a sync lock would end before it runs. Use the Async twin")
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
    """What `hold()` returns. Several threads may share it, each for a block of its own."""

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
        # A block may be left by another thread than the one that entered it.
        handle = self._handles.pop(THREADS.get_contender(), None) or self._handles.popitem()[1]
        handle._leave(exc, flag=self._flag)

    def __call__(self, _: object) -> Never:
        """Refuse to be a decorator."""
        raise TypeError("hold() is no decorator: use wrap()")


class AsyncLockBase(Guided, ABC, Generic[AH]):
    """The async verbs."""

    _block = "`async with lock.hold():`"
    _decorator = "`@lock.wrap()`"
    _absent = _list_hints("`held = await lock.acquire()` or `async with lock.hold() as held:`")

    _names: Sequence[Name]

    @abstractmethod
    async def try_acquire(self) -> AH | None:
        """Try once, without waiting. None: it is held, by another contender or by the caller itself."""

    @abstractmethod
    async def acquire(self, *, timeout: Seconds | None = None) -> AH:
        """Wait for the lock."""

    @abstractmethod
    def _rename(self, names: Sequence[Name]) -> Self:
        """The same lock on other names."""

    @abstractmethod
    async def holders(self) -> list[Holder]:
        """Return who holds it at this moment, as the server sees it. Looking never takes a lock."""

    async def _find_holders_quietly(self) -> list[Holder]:
        """Return the holders for a message about a lock that is held; see the sync twin."""
        try:
            return await self.holders()
        except UnreachableError:
            return []

    async def is_held(self) -> bool:
        """Say whether anybody holds it at this moment. Looking never takes a lock."""
        return bool(await self.holders())

    def hold(
        self, *, timeout: Seconds | None = None, on_loss: OnLoss = "cancel"
    ) -> AbstractAsyncContextManager[AH, None]:
        """Hold the lock for the length of an `async with` block.

        Args:
            timeout: seconds to wait; None is the configured default, `math.inf` for ever, 0 does not wait.
            on_loss: "cancel": a loss cancels the block, and leaving it raises LockLostError. "flag": neither; look at `lost`.

        Raises:
            PgfenceError: on entering, as `acquire`.
            LockLostError: on leaving, unless the block itself raised something else.
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
        """Return a decorator for coroutine functions: the function runs while the lock is held, and is cancelled at a loss.

        Arguments and errors are those of the sync twin; anything but a coroutine function is a TypeError at decoration.
        """
        policy = Policy(timeout, busy, unreachable)

        def decorate(fn: Callable[P, Coro[R]]) -> Callable[P, Coro[R | None]]:
            reject_generator(fn, _GENERATOR)
            if not inspect.iscoroutinefunction(fn):
                raise TypeError(
                    f"{describe_function(fn)} is no coroutine function: the async lock guards only those. Use the sync twin"
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
    """What `hold()` returns. Several tasks may share it, each for a block of its own."""

    def __init__(self, lock: AsyncLockBase[AH], timeout: Seconds | None, *, flag: bool) -> None:
        super().__init__(flag=flag)
        self._lock = lock
        self._timeout = timeout
        self._others: dict[asyncio.Task[object] | None, CancelOnLoss] = {}
        """The blocks of further tasks, while the first one's goes on."""

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
        """Refuse to be a decorator."""
        raise TypeError("hold() is no decorator: use wrap()")
