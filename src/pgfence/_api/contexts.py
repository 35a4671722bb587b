"""Context managers, and nothing else: what `connect()`, `begin()` and `TransactionLock.hold()` return.

`contextlib.contextmanager` would make decorators of them as well, and a decorated coroutine function would run unguarded.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import TYPE_CHECKING, Any, Never, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

T = TypeVar("T")

_NO_DECORATOR = "this is no decorator: use a with block inside the function, or wrap() where there is one"


class EnterOnly(AbstractContextManager[None, None]):
    """Acquire on entering, and check on leaving that what was acquired is still held. The caller's exception wins."""

    def __init__(self, acquire: Callable[[], Callable[[], None]]) -> None:
        self._acquire = acquire
        self._checks: list[Callable[[], None]] = []

    def __call__(self, _: object) -> Never:
        """Refuse to be a decorator."""
        raise TypeError(_NO_DECORATOR)

    def __enter__(self) -> None:
        self._checks.append(self._acquire())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        check = self._checks.pop()
        if error is None:
            check()


class AsyncHold(AbstractAsyncContextManager[None, None]):
    """Acquire on entering, and check on leaving that what was acquired is still held. The caller's exception wins."""

    def __init__(self, acquire: Callable[[], Awaitable[Callable[[], Awaitable[None]]]]) -> None:
        self._acquire = acquire
        self._checks: list[Callable[[], Awaitable[None]]] = []

    def __call__(self, _: object) -> Never:
        """Refuse to be a decorator."""
        raise TypeError(_NO_DECORATOR)

    async def __aenter__(self) -> None:
        self._checks.append(await self._acquire())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        check = self._checks.pop()
        if error is None:
            await check()


class SafeContext(AbstractContextManager[T, None]):
    """A context manager whose end never puts an error of its own in the place of the caller's."""

    def __init__(self, inner: AbstractContextManager[T, Any]) -> None:
        self._inner = inner

    def __call__(self, _: object) -> Never:
        """Refuse to be a decorator."""
        raise TypeError(_NO_DECORATOR)

    def __enter__(self) -> T:
        return self._inner.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._inner.__exit__(kind, error, tb)
        except Exception as failure:
            if error is None or failure.__cause__ is error:  # the latter says on purpose what the error stands for
                raise
            attach(error, failure, "while the block ended")


class AsyncSafeContext(AbstractAsyncContextManager[T, None]):
    """A context manager whose end never puts an error of its own in the place of the caller's."""

    def __init__(self, inner: AbstractAsyncContextManager[T, Any]) -> None:
        self._inner = inner

    def __call__(self, _: object) -> Never:
        """Refuse to be a decorator."""
        raise TypeError(_NO_DECORATOR)

    async def __aenter__(self) -> T:
        return await self._inner.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self._inner.__aexit__(kind, error, tb)
        except Exception as failure:
            if error is None or failure.__cause__ is error:  # the latter says on purpose what the error stands for
                raise
            attach(error, failure, "while the block ended")


def attach(error: BaseException, failure: BaseException, when: str) -> None:
    """Note on the caller's error that the clean-up failed too: the caller's error wins."""
    if failure is not error:
        error.add_note(f"{when}: {type(failure).__name__}: {failure}")
