"""Choose one of several databases by name, the same one in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

EngineT = TypeVar("EngineT", bound=Engine | AsyncEngine)


def choose_label(name: str, labels: Iterable[str]) -> str:
    """Return the label of the database for a name.

    The result depends only on the name and on the set of labels. An additional label
    takes over some names, and every other name keeps its label.
    """
    return max(
        labels, key=lambda label: hashlib.sha256(f"{label}\x1f{name}".encode()).digest()
    )


class Shards(Generic[EngineT]):
    """The engines of several databases, by label.

    Keep the label of a database when its address changes.
    """

    def __init__(self, engines: Mapping[str, EngineT]) -> None:
        self.engines: dict[str, EngineT] = dict(engines)

    def find(self, name: str) -> EngineT:
        """Return the engine for a name."""
        return self.engines[choose_label(name, self.engines)]
