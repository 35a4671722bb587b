"""The key that `idempotent` returns, under which a function is run or a block is entered."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Concatenate, Generic, ParamSpec, TypeVar, cast

from pgfence._api.contexts import attach
from pgfence._api.inputs import reject_coroutine, unwrap_session
from pgfence._api.misuse import Guided
from pgfence._process.coroutines import run_sync
from pgfence._values.errors import is_among
from pgfence.errors import IdempotencyMisuseError
from pgfence.idempotency import _claim

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from types import TracebackType

    from sqlalchemy.orm import Session

    from pgfence._api.inputs import AnyAsyncSession, SyncSession

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Op(Generic[T]):
    """One execution of a block under an idempotency key."""

    def __init__(self, call: _claim.KeyCall[T], claim: _claim.Claim[T]) -> None:
        self._call = call
        self._claim = claim
        self._read = False
        self._value = claim.result
        self._complete = claim.replayed

    def __repr__(self) -> str:
        return f"<Op {self._call.scope!r} {self._call.key!r}{' replayed' if self._claim.replayed else ''}>"

    @property
    def replayed(self) -> bool:
        """Whether the work was done earlier. In that case, `result` is the stored result, and the block has nothing to do."""
        self._read = True
        return self._claim.replayed

    @property
    def result(self) -> T:
        """The result of the work, from this execution or the first one.

        Raises:
            IdempotencyMisuseError: the work was not done before, and `complete()` was not called yet.
        """
        self._read = True
        if not self._complete:
            raise IdempotencyMisuseError(f"{self._call} has no result yet: call complete(value) to set it")
        return cast("T", self._value)

    def complete(self, value: T, /) -> None:
        """Set the result of the work, which is stored in the caller's transaction at the end of the block.

        Args:
            value: the result. It must be of a type that can be stored and, if the option `result` was given, of that type; see
                `idempotent`.

        Raises:
            IdempotencyMisuseError: the key already has a result; or the value is not of the type `result`.
        """
        if self._complete:
            how = (
                "already had a stored result: check op.replayed before doing the work"
                if self._claim.replayed
                else "already has a result: call op.complete(value) once"
            )
            raise IdempotencyMisuseError(f"{self._call} {how}")
        self._call.codec.check(value, str(self._call))
        self._value = value
        self._complete = True

    def _find_omission(self) -> IdempotencyMisuseError | None:
        """Return the error for a block that ended without an exception and did not do what it must, or None."""
        if self._claim.replayed and not self._read:
            return IdempotencyMisuseError(
                f"{self._call} already had a stored result, but the block did not check op.replayed, so its work was done a second"
                " time. Roll back, and begin the block with `if op.replayed`"
            )
        if not self._complete:
            return IdempotencyMisuseError(
                f"the block of {self._call} ended without op.complete(value), so this transaction cannot commit: roll back, and"
                " call op.complete(value) at the end of the block"
            )
        return None

    def _is_recorded(self, error: BaseException | None) -> bool:
        return error is not None and is_among(error, self._call.record) and not self._claim.replayed


class _KeyBase(Guided, ABC, Generic[T]):
    """The common part of the sync and async keys."""

    _decorator = "idempotent(...).run(fn), or decorate the function with @idempotent_call(key=..., scope=...)"

    def __init__(self, call: _claim.KeyCall[T]) -> None:
        self._call = call
        self._op: Op[T] | None = None
        self._used = False

    def __del__(self) -> None:
        if not getattr(self, "_used", True) and not sys.is_finalizing():
            warnings.warn(
                f"{self._call} was requested but never used, so no work was done under it. Use {self._block}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _note_misuse(self) -> None:
        self._used = True  # the error that follows already reports the problem

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._call.scope!r} {self._call.key!r}>"

    def _start(self, claim: _claim.Claim[T]) -> Op[T]:
        self._op = Op(self._call, claim)
        return self._op

    def _mark_entered(self) -> None:
        self._used = True
        if self._op is not None:
            raise IdempotencyMisuseError(
                f"the block of {self._call} was entered before: call idempotent() again for another block"
            )

    @abstractmethod
    async def _run(self, work: Callable[Concatenate[Session, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run sync code on the session."""

    async def _enter(self) -> Op[T]:
        self._mark_entered()
        return self._start(await self._run(_claim.claim, self._call))

    async def _exit(self, exc: BaseException | None) -> None:
        op = self._op
        assert op is not None
        if exc is None:
            if owed := op._find_omission():
                raise owed
            if not op._claim.replayed:
                await self._run(_claim.complete, self._call, op._claim, op.result)
        elif op._is_recorded(exc):
            try:
                await self._run(_claim.record, self._call, op._claim, cast("Exception", exc))
            except Exception as failure:
                attach(exc, failure, "while this error was being recorded")


class Idem(_KeyBase[T]):
    """A key in the transaction of a Session; see `idempotent`. It warns if it is garbage-collected unused."""

    _block = "idempotent(...).run(fn), or `with idempotent(...) as op:`"

    def __init__(self, session: SyncSession, call: _claim.KeyCall[T]) -> None:
        super().__init__(call)
        self._given = session

    def run(self, fn: Callable[[], T], /) -> T:
        """Run a function under the key, or return the stored result.

        Args:
            fn: the function that does the work in the session's transaction. It must not commit.

        Raises:
            TypeError: `fn` is a coroutine function; nothing was requested.
            IdempotencyMisuseError: this key object was used before, or the result is not of the type `result` or cannot be stored.
            PgfenceError: the same errors as on entering the block.
        """
        self._used = True
        reject_coroutine(fn, "it needs an AsyncSession")
        with self as op:
            if op.replayed:
                return op.result
            value = fn()
            op.complete(value)
            return value
        raise AssertionError  # unreachable, because the block above swallows no exception

    async def _run(self, work: Callable[Concatenate[Session, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return work(unwrap_session(self._given), *args, **kwargs)

    def __enter__(self) -> Op[T]:
        return run_sync(self._enter)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        run_sync(self._exit, exc)


class AsyncIdem(_KeyBase[T]):
    """A key in the transaction of an AsyncSession; see `idempotent`. It warns if it is garbage-collected unused."""

    _block = "await idempotent(...).run(fn), or `async with idempotent(...) as op:`"

    def __init__(self, session: AnyAsyncSession, call: _claim.KeyCall[T]) -> None:
        super().__init__(call)
        self._given = session

    async def run(self, fn: Callable[[], Awaitable[T]], /) -> T:
        """Run a coroutine function under the key, or return the stored result.

        Args:
            fn: the function that does the work in the session's transaction. It must not commit.

        Raises:
            TypeError: `fn` has returned something that cannot be awaited. Roll back what it did.
            IdempotencyMisuseError: this key object was used before, or the result is not of the type `result` or cannot be stored.
            PgfenceError: the same errors as on entering the block.
        """
        async with self as op:
            if op.replayed:
                return op.result
            value = await fn()
            op.complete(value)
            return value
        raise AssertionError  # unreachable, because the block above swallows no exception

    async def _run(self, work: Callable[Concatenate[Session, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await unwrap_session(self._given).run_sync(work, *args, **kwargs)

    async def __aenter__(self) -> Op[T]:
        return await self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None, /
    ) -> None:
        await self._exit(exc)
