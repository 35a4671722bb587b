"""Where what one process shares for an engine is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pgfence._process.lifecycle import MUTEX, PROCESS

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable, Hashable

    from sqlalchemy import Engine


class Manager(Protocol):
    """What is shared: it belongs to one process."""

    pid: int


class LoopManager(Manager, Protocol):
    """What the tasks of one event loop share."""

    loop: AbstractEventLoop


M = TypeVar("M", bound=Manager)
LM = TypeVar("LM", bound=LoopManager)


class ManagerRegistry:
    """Where managers live: on the dialect object of their engine, so that they go with it and its copies share them."""

    ATTRIBUTE = "_pgfence_managers"

    @classmethod
    def of(cls, engine: Engine) -> dict[Any, Any]:
        """Return what is kept for an engine."""
        PROCESS.notice_fork()  # before the mutex, which a forked child renews
        home: dict[Any, Any] = vars(engine.dialect).setdefault(cls.ATTRIBUTE, {})
        return home

    @classmethod
    def for_process(cls, engine: Engine, key: Hashable, kind: type[M], make: Callable[[], M]) -> M:
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
    def for_loop(cls, engine: Engine, loop: AbstractEventLoop, kind: type[LM], make: Callable[[], LM]) -> LM:
        """Return what the tasks of a loop share for an engine; a connection cannot leave its loop."""
        home, key = cls.of(engine), (kind, id(loop))
        found = home.get(key)
        if isinstance(found, kind) and found.loop is loop and found.pid == PROCESS.pid:
            return found
        with MUTEX:
            for place, other in list(home.items()):
                if isinstance(place, tuple) and other.loop.is_closed():
                    del home[place]
        found = home[key] = make()
        return found
