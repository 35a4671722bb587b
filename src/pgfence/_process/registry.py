"""Where what one process shares for an engine is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgfence._process.lifecycle import PROCESS

if TYPE_CHECKING:
    from sqlalchemy import Engine


class Homes:
    """Where domains live: on the dialect object of their engine, so that they go with it and its copies share them."""

    ATTRIBUTE = "_pgfence_domains"

    @classmethod
    def of(cls, engine: Engine) -> dict[Any, Any]:
        """Return what is kept for an engine."""
        PROCESS.notice_fork()  # before the mutex, which a forked child renews
        home: dict[Any, Any] = vars(engine.dialect).setdefault(cls.ATTRIBUTE, {})
        return home
