"""The context managers that `connect()`, `begin()` and `TransactionLock.hold()` return."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Generic, Never, TypeVar

from pgfence._process.coroutines import run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

T = TypeVar("T")


# contextlib.contextmanager is not used, because its objects are also decorators, and a decorated coroutine function would run
# without the lock.
class _NoDecorator:
    def __call__(self, _: object) -> Never:
        """Raise an error, because these context managers are not decorators."""
        raise TypeError(
            "this context manager is not a decorator: use a with block inside the function, or wrap() if the class has one"
        )


class EnterOnly(_NoDecorator, AbstractContextManager[None, None]):
    """Acquire on entering, and check on leaving that the lock is still held. An exception of the block takes precedence."""

    def __init__(self, acquire: Callable[[], Callable[[], None]]) -> None:
        self._acquire = acquire
        # This is a list, because the block may be entered again before it is left.
        self._checks: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        self._checks.append(self._acquire())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        check = self._checks.pop()
        if error is None:
            check()


class AsyncHold(_NoDecorator, AbstractAsyncContextManager[None, None]):
    """Acquire on entering an async block, as `EnterOnly` does."""

    def __init__(self, acquire: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> None:
        self._acquire = acquire
        self._checks: list[Callable[[], Awaitable[None]]] = []

    async def __aenter__(self) -> None:
        self._checks.append(await self._acquire())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        check = self._checks.pop()
        if error is None:
            await check()


class _SafeSteps(_NoDecorator, Generic[T]):
    """A block whose own error on leaving does not replace the caller's exception, unless it was raised from that exception."""

    def __init__(
        self, inner: AbstractContextManager[T, bool | None] | AbstractAsyncContextManager[T, bool | None]
    ) -> None:
        self._inner = inner

    async def _enter(self) -> T:
        inner = self._inner
        if isinstance(inner, AbstractAsyncContextManager):
            return await inner.__aenter__()
        return inner.__enter__()

    async def _exit(self, error: BaseException | None) -> None:
        kind, tb = (None, None) if error is None else (type(error), error.__traceback__)
        inner = self._inner
        try:
            if isinstance(inner, AbstractAsyncContextManager):
                await inner.__aexit__(kind, error, tb)
            else:
                inner.__exit__(kind, error, tb)
        except Exception as failure:
            # A failure that was raised `from` the caller's error replaces it.
            if error is None or failure.__cause__ is error:
                raise
            attach(error, failure, "while the block ended")


class SafeContext(_SafeSteps[T], AbstractContextManager[T, None]):
    """The context manager of a sync block."""

    def __enter__(self) -> T:
        return run_sync(self._enter)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        run_sync(self._exit, error)


class AsyncSafeContext(_SafeSteps[T], AbstractAsyncContextManager[T, None]):
    """The context manager of an async block."""

    async def __aenter__(self) -> T:
        return await self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._exit(error)


def attach(error: BaseException, failure: BaseException, when: str) -> None:
    """Note on the caller's exception that the clean-up failed too."""
    if failure is not error:
        error.add_note(f"{when}: {type(failure).__name__}: {failure}")
