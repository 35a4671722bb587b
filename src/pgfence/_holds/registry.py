"""Where what one process shares for an engine is kept."""

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
    """What is shared: it belongs to one process."""

    pid: int


class LoopShared(Shared, Protocol):
    """What may belong to the tasks of one event loop."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...


S = TypeVar("S", bound=Shared)
L = TypeVar("L", bound=LoopShared)


class ManagerRegistry:
    """Where managers live: on the dialect object of their engine, so that they go with it and its copies share them."""

    ATTRIBUTE = "_pgfence_managers"

    @classmethod
    def of(cls, engine: Engine) -> dict[Hashable, Any]:
        """Return what is kept for an engine."""
        PROCESS.notice_fork()  # before the mutex, which a forked child renews
        home: dict[Hashable, Any] = vars(engine.dialect).setdefault(cls.ATTRIBUTE, {})
        return home

    @classmethod
    def for_process(cls, engine: Engine, key: Hashable, kind: type[S], make: Callable[[], S]) -> S:
        """Return what this process shares for an engine; a forked child gets one of its own."""
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
        """Return what the threads of this process share for an engine, or the tasks of this loop for an async engine."""
        if not engine.dialect.is_async:
            return cls.for_process(engine, kind, kind, lambda: make(THREADS))
        loop = asyncio.get_running_loop()
        home, key = cls.of(engine), (kind, id(loop))
        found = home.get(key)
        if isinstance(found, kind) and found.loop is loop and found.pid == PROCESS.pid:
            return found
        with MUTEX:
            for place, other in list(home.items()):
                if isinstance(place, tuple) and other.loop.is_closed():
                    del home[place]
        found = home[key] = make(TaskCarrier(loop))
        return found
