"""Find the prefixes of names, for an attribute of metrics. Their number is bounded, however many names an application uses."""

from __future__ import annotations

import re

LIMIT = 100
"""The maximum number of different prefixes. All further prefixes share one value."""
OTHER = "_other"

_END = re.compile("[:/#,]")


class Prefixes:
    """The prefixes seen so far. If several threads add prefixes at the same time, there may be slightly more than `LIMIT`."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def limit(self, value: str) -> str:
        """Return the value if it is among the first `LIMIT` values, and otherwise "_other"."""
        if value in self._seen:
            return value
        if len(self._seen) >= LIMIT:
            return OTHER
        self._seen.add(value)
        return value

    def find(self, name: str | None) -> str:
        """Return the prefix of a name: the part of the first name before its first colon, slash or number sign."""
        return self.limit(_END.split(name or "", maxsplit=1)[0])
