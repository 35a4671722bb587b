"""Check and unwrap what callers pass: engines, sessions, functions, texts and numbers."""

from __future__ import annotations

import inspect
import os
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast, overload

from sqlalchemy import Engine

from pgfence._process.clock import seconds
from pgfence.config import config_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import (
        AsyncConnection,
        AsyncEngine,
        AsyncSession,
        async_scoped_session,
        async_sessionmaker,
    )
    from sqlalchemy.orm import Session, scoped_session, sessionmaker
    from typing_extensions import TypeIs

    from pgfence._process.clock import Seconds
    from pgfence.config import Config

    SyncSession: TypeAlias = Session | scoped_session[Any]
    AnyAsyncSession: TypeAlias = AsyncSession | async_scoped_session[Any]
    SyncWork: TypeAlias = SyncSession | Connection
    AsyncWork: TypeAlias = AnyAsyncSession | AsyncConnection

EngineSource: TypeAlias = Engine | Callable[[], Engine]
AsyncEngineSource: TypeAlias = "AsyncEngine | Callable[[], AsyncEngine]"

ORM = "sqlalchemy.orm"
ASYNCIO = "sqlalchemy.ext.asyncio"


def find_loaded_classes(module: str, *names: str) -> tuple[type[Any], ...]:
    """Return classes of a module, or an empty tuple if the module was never imported."""
    # If the module was never imported, its classes have no instances. Importing it would slow down every program.
    loaded = sys.modules.get(module)
    return () if loaded is None else tuple(getattr(loaded, name) for name in names)


# ---------------------------------------------------------------- sessions


def is_session(given: object) -> TypeIs[SyncSession]:
    """Return whether an object is a Session or a scoped_session."""
    return isinstance(given, find_loaded_classes(ORM, "Session", "scoped_session"))


def is_async_session(given: object) -> TypeIs[AnyAsyncSession]:
    """Return whether an object is an AsyncSession or an async_scoped_session."""
    return isinstance(given, find_loaded_classes(ASYNCIO, "AsyncSession", "async_scoped_session"))


def is_sessionmaker(given: object) -> TypeIs[sessionmaker[Any]]:
    return isinstance(given, find_loaded_classes(ORM, "sessionmaker"))


def is_async_sessionmaker(given: object) -> TypeIs[async_sessionmaker[Any]]:
    return isinstance(given, find_loaded_classes(ASYNCIO, "async_sessionmaker"))


def is_async_engine(given: object) -> TypeIs[AsyncEngine]:
    return isinstance(given, find_loaded_classes(ASYNCIO, "AsyncEngine"))


def is_async_connection(given: object) -> TypeIs[AsyncConnection]:
    return isinstance(given, find_loaded_classes(ASYNCIO, "AsyncConnection"))


@overload
def unwrap_session(work: SyncSession) -> Session: ...
@overload
def unwrap_session(work: AnyAsyncSession) -> AsyncSession: ...
@overload
def unwrap_session(work: SyncWork) -> Session | Connection: ...
@overload
def unwrap_session(work: AsyncWork) -> AsyncSession | AsyncConnection: ...
def unwrap_session(work: Any) -> Any:
    """Return the current session of a scoped session. Return any other object unchanged."""
    scoped = find_loaded_classes(ORM, "scoped_session") + find_loaded_classes(ASYNCIO, "async_scoped_session")
    return work.registry() if isinstance(work, scoped) else work


# ---------------------------------------------------------------- engines


HELD_ON_OWN_CONNECTION = "the lock is held on a dedicated connection, so pass the engine"
LEASE_OUTLIVES = "a lease outlives transactions and connections. To write under it, use lease.begin({0}sessionmaker)"


def check_engine_source(engine: object, what: str, why: str = LEASE_OUTLIVES.format("")) -> EngineSource:
    """Return what the caller passed as an engine, after checking that it is an Engine or a function.

    In messages, `what` is the class or function that needs the engine, and `why` explains why sessions and connections are
    rejected.

    Raises:
        TypeError: the argument is neither an Engine nor a function.
    """
    if not isinstance(engine, Engine):
        instead = f"create_engine(), or the async counterpart of {what}" if hasattr(engine, "sync_engine") else ""
        _check_source(engine, f"{what} needs an Engine", why, instead)
    return cast("EngineSource", engine)


def check_async_engine_source(
    engine: object, what: str, why: str = LEASE_OUTLIVES.format("async_")
) -> AsyncEngineSource:
    """Return what the caller passed as an engine, after checking that it is an AsyncEngine or a function."""
    if not is_async_engine(engine):
        instead = f"create_async_engine(), or the sync counterpart of {what}" if isinstance(engine, Engine) else ""
        _check_source(engine, f"{what} needs an AsyncEngine", why, instead)
    return cast("AsyncEngineSource", engine)


def _check_source(given: object, needs: str, why: str, instead: str) -> None:
    """Raise TypeError unless an object is a function. A sessionmaker is callable and must be rejected explicitly."""
    attributes = ("get_bind", "registry", "exec_driver_sql")
    if is_sessionmaker(given) or is_async_sessionmaker(given) or any(hasattr(given, name) for name in attributes):
        raise TypeError(f"{needs}, not {type(given).__name__}: {why}")
    if instead:
        raise TypeError(f"{needs}, not {type(given).__name__}: use {instead}")
    if not callable(given):
        raise TypeError(f"{needs}, or a function that returns one, not {type(given).__name__}")


def resolve_engine(source: EngineSource, what: str, twin: str = "its async counterpart") -> Engine:
    """Return the engine of a source. In messages, `what` is the class that needs it, and `twin` is the class for async engines.

    Raises:
        TypeError: the source is an AsyncEngine, or the function does not return a sync Engine.
    """
    engine = source if isinstance(source, Engine) else source()
    if not isinstance(engine, Engine) or engine.dialect.is_async:  # type: ignore[redundant-expr]
        raise _wrong_engine_error(engine, what, "a sync Engine", twin)
    return engine


def resolve_async_engine(source: AsyncEngineSource, what: str, twin: str = "its sync counterpart") -> AsyncEngine:
    """Return the engine of a source; see `resolve_engine`."""
    engine = source if is_async_engine(source) else source()
    if not is_async_engine(engine):
        raise _wrong_engine_error(engine, what, "an AsyncEngine", twin)
    return engine


def _wrong_engine_error(returned: object, what: str, wanted: str, twin: str) -> TypeError:
    if isinstance(returned, Engine) and returned.dialect.is_async:
        return TypeError(
            f"{what} needs {wanted}, not one with the async driver {returned.dialect.driver}: create the engine with"
            f" create_async_engine() and use {twin}, or choose a sync driver"
        )
    if hasattr(returned, "dialect"):
        return TypeError(f"{what} needs {wanted}, not {type(returned).__name__}: use {twin}")
    return TypeError(
        f"the function that was passed to {what} as an engine must return {wanted}, not {type(returned).__name__}"
    )


# ---------------------------------------------------------------- functions


def describe_function(fn: object) -> str:
    """Return the name of a function for messages.

    The arguments of a functools.partial are omitted, because they may be secrets.
    """
    while isinstance(fn, partial):
        fn = fn.func
    return f"{getattr(fn, '__qualname__', fn)}()"


def reject_generator(fn: Callable[..., object], why: str = "calling it does not run its body") -> None:
    """Raise TypeError for a generator function, sync or async."""
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(f"{describe_function(fn)} is a generator function: {why}")


def expect_callable(cb: object) -> None:
    """Raise TypeError for a callback that cannot be called."""
    if not callable(cb):
        raise TypeError(f"a callback must be callable, not {type(cb).__name__}")


def reject_coroutine(fn: Callable[..., object], why: str) -> None:
    """Raise TypeError for a coroutine function, or for an object whose `__call__` is one."""
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(type(fn).__call__):
        raise TypeError(f"{describe_function(fn)} is a coroutine function: {why}")


# ---------------------------------------------------------------- values


def check_choice(what: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def check_text(value: object, what: str) -> str:
    """Return a text, after checking that it is a str without NUL.

    Raises:
        TypeError: the value is not a str.
        ValueError: the text contains NUL, which PostgreSQL cannot store.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if "\x00" in value:
        raise ValueError(f"{what} must not contain NUL")
    return value


def check_path(value: object, what: str) -> Path:
    """Return the value as a Path, after checking its type.

    Raises:
        TypeError: the value is neither a str nor a path.
    """
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(f"{what} must be a str or a path, not {type(value).__name__}")
    return Path(value)


def check_int(value: object, what: str, most: int | None = None) -> int:
    """Return an int, after checking that it is at least 1 and at most `most`.

    Raises:
        TypeError: the value is not an int.
        ValueError: the value is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {type(value).__name__}")
    if value < 1 or (most is not None and value > most):
        raise ValueError(f"{what} must be {'1 or more' if most is None else f'from 1 to {most}'}, not {value}")
    return value


# ---------------------------------------------------------------- idempotency keys


DAY = 86400
LONGEST_KEY = 255


def check_key(value: object, what: str) -> str:
    """Return an idempotency key or a scope, as plain text.

    Raises:
        TypeError: the value is not a str.
        ValueError: the value is empty or blank, has more than 255 characters, or contains a control character or a lone
            surrogate.
    """
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, not {type(value).__name__}")
    if not value or value.isspace():
        raise ValueError(f"{what} must not be {'blank' if value else 'empty'}")
    if len(value) > LONGEST_KEY:
        raise ValueError(f"{what} must not be longer than {LONGEST_KEY} characters, but has {len(value)}")
    if not value.isprintable():
        for character in value:
            if unicodedata.category(character) in ("Cc", "Cs"):
                raise ValueError(f"{what} must not contain control characters: U+{ord(character):04X}")
    # A subclass such as a str enum may format itself differently in each Python version, so only its plain text is used.
    return str.__str__(value)


def check_keep(keep: Seconds) -> float:
    """Return the number of seconds for which a result is kept, after checking it.

    Raises:
        TypeError, ValueError: the value is not a duration between a second and a hundred years.
    """
    life = seconds(keep, "keep")
    if not 1 <= life <= 3_153_600_000:
        raise ValueError(f"keep must be between a second and a hundred years, not {keep!r}")
    return life


def check_error_classes(given: Sequence[type[Exception]], what: str = "record") -> tuple[type[Exception], ...]:
    """Return the exception classes as a tuple, after checking them.

    Raises:
        TypeError: one of the values is not an exception class.
    """
    found: tuple[object, ...] = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    for one in found:
        if not (isinstance(one, type) and issubclass(one, Exception)):
            raise TypeError(f"{what} takes exception classes, not {one!r}")
    return cast("tuple[type[Exception], ...]", found)


def find_lock_engine(engine: Any, config: Config) -> tuple[Any, Config]:
    """Return the engine that session locks use, and the settings that apply there."""
    other = config.lock_engine
    if other is None:
        return engine, config
    if callable(other):
        other = other()
    if hasattr(other, "sync_engine") != hasattr(engine, "sync_engine"):
        raise TypeError(
            f"the lock_engine of this {type(engine).__name__} must be of the same kind (sync or async), not {type(other).__name__}"
        )
    # The lock engine bypasses the pooler in transaction mode.
    return other, replace(config, pooler=config_of(other).pooler) if config.pooler == "transaction" else config
