"""What a key of an effect is asked for with, and what was stored under it."""

from __future__ import annotations

from typing import NamedTuple


class EffectKey(NamedTuple):
    """What a key is asked for with.

    Attributes:
        scope: whose key it is and for what.
        key: what the client repeats.
        fingerprint: of the request; None compares nothing.
        ttl: seconds that a claim outlives a dead attempt.
        keep: seconds from the end of the work on for which its result is kept, and from the end of a claim what is known of it.
        takeover: whether an attempt that was lost is followed by another one.
    """

    scope: str
    key: str
    fingerprint: bytes | None
    ttl: float
    keep: float
    takeover: bool = True

    def __str__(self) -> str:
        return f"the idempotency key {self.key!r} of scope {self.scope!r}"


class Reply(NamedTuple):
    """A recorded answer of HTTP, byte for byte."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class StoredResult(NamedTuple):
    """What came of a key before.

    Attributes:
        status: "done" or "failed".
        text: a result or an error, as its codec wrote it; None where a reply is stored.
        reply: a recorded answer of HTTP.
    """

    status: str
    text: str | None
    reply: Reply | None
