"""The state machine of a lease, its token and its gate, as plain values: what each server function has to answer.

One name; times are seconds in quarters, so that sums are exact.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from math import inf
from typing import Protocol


class Functions(Protocol):
    """What can be asked of a server, each call one transaction. Clock and timeline are the server's."""

    clock: float
    timeline: int

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
        """Return the token of a session lock, which is held from then on; None if it is held, or a lease is."""
        ...

    def unlock(self) -> None:
        """End the session that holds the session lock, if there is one."""
        ...

    def save(self) -> None:
        """Keep the rows as they are now: replicated, backed up, or dumped."""
        ...

    def go_back(self, timeline: int) -> None:
        """Continue on this timeline with the rows as they were kept."""
        ...

    def enter(self, token: int) -> int | None:
        """Return None if a writer with this token may commit, else the newest token."""
        ...


@dataclass(slots=True)
class Row:
    """The row of a lease, as it is made: never held."""

    token: int
    timeline: int
    lease: str | None = None
    ttl: float = 0
    lock_delay: float = 0
    acquired_at: float = -inf
    renewed_at: float = -inf
    released_at: float | None = -inf
    expires_at: float = -inf
    free_at: float = -inf
    min_until: float = -inf
    hold_until: float = inf
    session: bool = False
    """The last token went to a session lock."""
    evicted: int = 0


@dataclass(slots=True)
class Model:
    """The functions of the server as they are meant."""

    clock: float = 0
    timeline: int = 1
    row: Row | None = None
    gate: int = 0
    locked: bool = False
    kept: tuple[Row | None, int] = field(default=(None, 0))

    def acquire(
        self, lease: str, ttl: float, min_hold: float, lock_delay: float, max_hold: float | None
    ) -> tuple[bool, int, float]:
        row = self.row
        if row is None:
            self.row = row = Row(self._next(0, 1), self.timeline)
        elif not self._is(lease, row.token):
            self._rebase_if_blocked(row)
            if row.free_at > self.clock:
                return False, row.token, row.free_at - self.clock
            if self._session_holds(row):
                return False, row.token, 1.0
            row.token, row.timeline = self._next(row.token, row.timeline), self.timeline
        row.lease, row.ttl, row.lock_delay, row.released_at, row.session = lease, ttl, lock_delay, None, False
        row.acquired_at = self.clock
        row.min_until = self.clock + min_hold
        row.hold_until = inf if max_hold is None else self.clock + max_hold
        return True, row.token, self._extend(row)

    def renew(self, lease: str, token: int, ttl: float) -> tuple[str, float]:
        row = self.row
        if row is None or not self._is(lease, token):
            return self._fate(lease, token), 0
        if max(row.acquired_at, row.renewed_at) > self.clock:
            self._rebase(row)
        row.ttl = ttl
        return "ok", self._extend(row)

    def release(self, lease: str, token: int) -> str:
        row = self.row
        fate = "released" if self._is(lease, token) else self._fate(lease, token)
        if row is not None and fate not in ("evicted", "superseded"):
            if row.expires_at > self.clock:
                row.free_at = row.min_until if row.min_until > self.clock else -inf
            row.released_at = self.clock
        return fate

    def forget(self, lease: str) -> bool:
        row = self.row
        if row is None or row.lease != lease or row.released_at is not None:
            return False
        row.released_at, row.free_at = self.clock, -inf
        return True

    def adopt(self, lease: str, token: int, new: str) -> tuple[str, float]:
        row = self.row
        if row is None or not (self._is(lease, token) or self._is(new, token)):
            return self._fate(lease, token), 0
        if max(row.acquired_at, row.renewed_at) > self.clock:
            self._rebase(row)
        row.lease = new
        return "ok", self._extend(row)

    def evict(self) -> tuple[int, int] | None:
        row = self.row
        if row is None:
            return None
        was, row.token = row.token, self._next(row.token, row.timeline)
        row.timeline = self.timeline
        self.gate = row.token
        row.evicted, row.lease, row.released_at, row.free_at = was, None, self.clock, -inf
        return was, row.token

    def lock(self) -> int | None:
        row = self.row
        if self.locked:
            return None
        if row is None:
            self.row = row = Row(self._next(0, 1), self.timeline)
        else:
            self._rebase_if_blocked(row)
            if row.free_at > self.clock:
                return None
            row.token, row.timeline = self._next(row.token, row.timeline), self.timeline
        row.lease, row.lock_delay, row.session, self.locked = None, 0, True, True
        row.acquired_at = row.renewed_at = row.expires_at = row.released_at = self.clock
        row.free_at, row.min_until, row.hold_until = -inf, -inf, inf
        return row.token

    def unlock(self) -> None:
        self.locked = False

    def save(self) -> None:
        self.kept = copy(self.row), self.gate

    def go_back(self, timeline: int) -> None:
        row, self.gate = self.kept
        self.row, self.timeline, self.locked = copy(row), timeline, False

    def enter(self, token: int) -> int | None:
        row = self.row
        if row is not None and row.token != token:
            return row.token
        if self.gate > token:
            return self.gate
        self.gate = token
        return None

    def _next(self, token: int, timeline: int) -> int:
        return 1 + max(self.gate, token + self._jump(timeline))

    def _jump(self, timeline: int) -> int:
        """Return what a row of a timeline adds: above all that can have been issued there since it was written."""
        return (self.timeline - timeline if timeline <= self.timeline else self.timeline) << 32

    def _session_holds(self, row: Row) -> bool:
        return row.session and self.locked

    def _rebase_if_blocked(self, row: Row) -> None:
        newest = max(row.acquired_at, row.renewed_at, -inf if row.released_at is None else row.released_at)
        if row.free_at > self.clock and newest > self.clock:
            self._rebase(row)

    def _rebase(self, row: Row) -> None:
        """Move the times that lie ahead of the clock: each ends as long after now as after the reading it was computed from."""
        now, released = self.clock, row.released_at
        newest = max(row.acquired_at, row.renewed_at, -inf if released is None else released)
        least = row.min_until
        if row.acquired_at > now:
            least = now + row.min_until - newest
            row.hold_until = now + row.hold_until - newest
        if row.renewed_at > now:
            row.expires_at = now + row.expires_at - row.renewed_at
        if released is None:
            row.free_at = max(row.expires_at + row.lock_delay, least)
        elif row.free_at == row.min_until:
            row.free_at = least
        elif released > now:
            row.free_at = now + row.free_at - released
        row.min_until = least
        row.acquired_at, row.renewed_at = min(row.acquired_at, now), min(row.renewed_at, now)
        row.released_at = None if released is None else min(released, now)

    def _is(self, lease: str, token: int) -> bool:
        row = self.row
        return (
            row is not None
            and (row.lease, row.token) == (lease, token)
            and row.released_at is None
            and row.expires_at > self.clock
        )

    def _extend(self, row: Row) -> float:
        row.renewed_at = self.clock
        row.expires_at = min(self.clock + row.ttl, row.hold_until)
        row.free_at = max(row.expires_at + row.lock_delay, row.min_until)
        return row.expires_at - self.clock

    def _fate(self, lease: str, token: int) -> str:
        row = self.row
        if row is None:
            return "superseded"
        if row.evicted >= token:
            return "evicted"
        if row.token != token or row.lease != lease or row.released_at is not None:
            return "superseded"
        return "overdue" if row.hold_until <= self.clock else "expired"
