"""Keep the managers that the threads or tasks of one process share for an engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pgfence._holds.carriers import THREADS, TaskCarrier
from pgfence._process.lifecycle import MUTEX, PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from sqlalchemy import Engine

    from pgfence._holds.carriers import Carrier


class Shared(Protocol):
    """An object that belongs to one process."""

    pid: int


class LoopShared(Shared, Protocol):
    """An object that the threads of a process share or, if `loop` is set, the tasks of that event loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...


S = TypeVar("S", bound=Shared)
L = TypeVar("L", bound=LoopShared)


class ManagerRegistry:
    """Stores the managers of an engine on its dialect object."""

    # Managers that are stored on the dialect are garbage-collected with the engine, and copies of the engine share them.

    ATTRIBUTE = "_pgfence_managers"

    @classmethod
    def of(cls, engine: Engine) -> dict[Hashable, Any]:
        PROCESS.notice_fork()  # before the mutex is used, because a forked child replaces the mutex
        home: dict[Hashable, Any] = vars(engine.dialect).setdefault(cls.ATTRIBUTE, {})
        return home

    @classmethod
    def for_process(cls, engine: Engine, key: Hashable, kind: type[S], make: Callable[[], S]) -> S:
        """Return the object that this process shares for an engine. A forked child creates its own."""
        home = cls.of(engine)
        found = home.get(key)
        if isinstance(found, kind) and found.pid == PROCESS.pid:
            return found
        with MUTEX:
            found = home.get(key)
            if not isinstance(found, kind) or found.pid != PROCESS.pid:
                found = home[key] = make()
        return found

    @classmethod
    def for_carrier(cls, engine: Engine, kind: type[L], make: Callable[[Carrier], L]) -> L:
        """Return the object shared by an engine's threads or, for an async engine, by the tasks of the running event loop."""
        if not engine.dialect.is_async:
            return cls.for_process(engine, kind, kind, lambda: make(THREADS))
        loop = asyncio.get_running_loop()
        home, key = cls.of(engine), (kind, id(loop))
        found = home.get(key)
        if isinstance(found, kind) and found.loop is loop and found.pid == PROCESS.pid:
            return found
        # A closed loop's id may be reused, and its manager would never be collected.
        with MUTEX:
            for place, other in list(home.items()):
                if isinstance(place, tuple) and other.loop.is_closed():
                    del home[place]
        found = home[key] = make(TaskCarrier(loop))
        return found
