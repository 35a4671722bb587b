"""The fault proxy of `pgfence.testing`, for contract tests, and one that counts round trips."""

from __future__ import annotations

from typing import Any

from pgfence.testing._proxy import Proxy

__all__ = ["CountingProxy", "Proxy"]


class CountingProxy(Proxy):
    """Counts how often the server said that it is ready for the next request: one round trip each."""

    trips = 0

    async def forward(self, sink: Any, data: bytes) -> None:
        self.trips += data.count(b"Z\x00\x00\x00\x05")
        await super().forward(sink, data)
