"""The state machine of a lease, its token and its gate, as plain values: what each server function has to answer.

One name; times are seconds in quarters, so that sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol


class Functions(Protocol):
    """What can be asked of a server, each call one transaction. The clock is the server's."""

    clock: float

    def acquire(
        self, lease: str, ttl: float, min_hold: float, lock_delay: float, max_hold: float | None
    ) -> tuple[bool, int, float]:
        """Return whether it was granted, the token, and the seconds until it ends, or until it is free."""
        ...

    def renew(self, lease: str, token: int, ttl: float) -> tuple[str, float]:
        """Return "ok" and the seconds left, or why it is lost and 0."""
        ...

    def release(self, lease: str, token: int) -> str:
        """Return "released" or what had become of it."""
        ...

    def forget(self, lease: str) -> bool:
        """Return whether the grant was there."""
        ...

    def adopt(self, lease: str, token: int, new: str) -> tuple[str, float]:
        """Return "ok" and the seconds left, or why not and 0."""
        ...

    def evict(self) -> tuple[int, int] | None:
        """Return the token that was and the one that counts now."""
        ...

    def lock(self) -> int | None:
        """Return the token of an advisory lock taken for a moment; None while a lease is held."""
        ...

    def enter(self, token: int) -> int | None:
        """Return None if a writer with this token may commit, else the newest token."""
        ...


@dataclass(slots=True)
class Row:
    """The row of a lease, as it is made: never held."""

    token: int
    lease: str | None = None
    ttl: float = 0
    lock_delay: float = 0
    expires_at: float = -inf
    free_at: float = -inf
    min_until: float = -inf
    hold_until: float = inf
    released: bool = True
    evicted: int = 0


@dataclass(slots=True)
class Model:
    """The functions of the server as they are meant."""

    clock: float = 0
    row: Row | None = None
    gate: int = 0

    def acquire(
        self, lease: str, ttl: float, min_hold: float, lock_delay: float, max_hold: float | None
    ) -> tuple[bool, int, float]:
        row = self.row
        if row is None:
            self.row = row = Row(self.gate + 1)
        elif self._is(lease, row.token):
            pass
        elif row.free_at > self.clock:
            return False, row.token, row.free_at - self.clock
        else:
            row.token = 1 + max(row.token, self.gate)
        row.lease, row.ttl, row.lock_delay, row.released = lease, ttl, lock_delay, False
        row.min_until = self.clock + min_hold
        row.hold_until = inf if max_hold is None else self.clock + max_hold
        return True, row.token, self._extend(row)

    def renew(self, lease: str, token: int, ttl: float) -> tuple[str, float]:
        row = self.row
        if row is None or not self._is(lease, token):
            return self._fate(lease, token), 0
        row.ttl = ttl
        return "ok", self._extend(row)

    def release(self, lease: str, token: int) -> str:
        row = self.row
        fate = "released" if self._is(lease, token) else self._fate(lease, token)
        if row is not None and fate not in ("evicted", "superseded"):
            if row.expires_at > self.clock:
                row.free_at = row.min_until if row.min_until > self.clock else -inf
            row.released = True
        return fate

    def forget(self, lease: str) -> bool:
        row = self.row
        if row is None or row.lease != lease or row.released:
            return False
        row.released, row.free_at = True, -inf
        return True

    def adopt(self, lease: str, token: int, new: str) -> tuple[str, float]:
        row = self.row
        if row is None or not (self._is(lease, token) or self._is(new, token)):
            return self._fate(lease, token), 0
        row.lease = new
        return "ok", self._extend(row)

    def evict(self) -> tuple[int, int] | None:
        row = self.row
        if row is None:
            return None
        was, row.token = row.token, 1 + max(row.token, self.gate)
        self.gate = row.token
        row.evicted, row.lease, row.released, row.free_at = was, None, True, -inf
        return was, row.token

    def lock(self) -> int | None:
        row = self.row
        if row is None:
            self.row = row = Row(self.gate + 1)
        elif not row.released and row.expires_at > self.clock:
            return None
        else:
            row.token, row.lease, row.released = 1 + max(row.token, self.gate), None, True
        return row.token

    def enter(self, token: int) -> int | None:
        row = self.row
        if row is not None and row.token != token:
            return row.token
        if self.gate > token:
            return self.gate
        self.gate = token
        return None

    def _is(self, lease: str, token: int) -> bool:
        row = self.row
        return (
            row is not None
            and (row.lease, row.token) == (lease, token)
            and not row.released
            and row.expires_at > self.clock
        )

    def _extend(self, row: Row) -> float:
        row.expires_at = min(self.clock + row.ttl, row.hold_until)
        row.free_at = max(row.expires_at + row.lock_delay, row.min_until)
        return row.expires_at - self.clock

    def _fate(self, lease: str, token: int) -> str:
        row = self.row
        if row is None:
            return "superseded"
        if row.evicted >= token:
            return "evicted"
        if row.token != token or row.lease != lease or row.released:
            return "superseded"
        return "overdue" if row.hold_until <= self.clock else "expired"
