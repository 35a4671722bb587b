"""Another process, played by a thread."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from pgfence import AdvisoryLock, Held, Lease, Once


@contextmanager
def held_elsewhere(lock: AdvisoryLock | Lease | Once) -> Generator[Held]:
    """Hold a lock, lease or slot as another process would."""
    with ThreadPoolExecutor(max_workers=1) as other:
        held = other.submit(lock.acquire).result()
        try:
            yield held
        finally:
            if not held.lost:
                other.submit(held.release).result()
