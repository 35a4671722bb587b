"""The fault proxy of `pgfence.testing`, for contract tests, and one that counts round trips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgfence.testing._proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CountingProxy", "Proxy", "RewritingProxy"]


class CountingProxy(Proxy):
    """Counts how often the server said that it is ready for the next request: one round trip each."""

    trips = 0

    async def forward(self, sink: Any, data: bytes) -> None:
        self.trips += data.count(b"Z\x00\x00\x00\x05")
        await super().forward(sink, data)


class RewritingProxy(Proxy):
    """Replaces bytes that both sides send by as many others, for example to pass a server off as an older one."""

    def __init__(self, dsn: str, changes: Mapping[bytes, bytes]) -> None:
        self._changes = changes
        super().__init__(dsn)

    async def forward(self, sink: Any, data: bytes) -> None:
        for old, new in self._changes.items():
            data = data.replace(old, new)
        await super().forward(sink, data)
