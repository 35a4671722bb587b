"""Clients that want one lease, and everything that can happen to them; each step looks whether the promises hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from model.machine import Functions


@dataclass(slots=True)
class Grant:
    """What a client believes to hold.

    Attributes:
        deadline: the true time up to which it believes so.
        disturbed: its lease may be another's before that: an operator ended it, the server's clock was set forward, or the
            server lost commits.
    """

    lease: str
    token: int
    deadline: float
    disturbed: bool = False


@dataclass(slots=True)
class Client:
    """A process that wants the lease.

    Attributes:
        grant: what it holds.
        old: a grant it had: a part of it still sends with that.
        lost: a lease id whose answer never came.
    """

    grant: Grant | None = None
    old: Grant | None = None
    lost: str | None = None


@dataclass(slots=True)
class Schedule:
    """Clients, a server and the true time; `step` does one thing and looks whether every promise still holds."""

    server: Functions
    clients: list[Client] = field(default_factory=lambda: [Client() for _ in range(4)])
    time: float = 0
    issued: dict[int, str] = field(default_factory=dict)
    """Every token that was issued on any server, with the lease that it was issued with."""
    highest: int = 0
    """The newest token that this server knows."""
    written: int = 0
    """Token of the newest write that this server has accepted and kept."""
    locked: bool = False
    """A session holds the name."""
    kept: tuple[int, int] = (0, 0)
    """Highest token and newest write at the last `save`."""
    timelines: int = 1
    """The highest timeline that there ever was."""
    free_by: float = inf
    """The true time at which the name has to be free if nobody touches it."""
    references: list[Grant] = field(default_factory=list)
    made: int = 0

    def step(self, what: int, who: int, amount: int) -> None:
        """Do one thing: two numbers choose what and who, a third how much, each of them any byte."""
        client = self.clients[who % len(self.clients)]
        STEPS[what % len(STEPS)](self, client, amount)
        self._look()

    def holds(self, grant: Grant | None) -> bool:
        return grant is not None and self.time < grant.deadline

    def nothing(self, client: Client, amount: int) -> None:
        """Let a step be none, so that a failing schedule can be made shorter."""

    def passes(self, client: Client, amount: int) -> None:
        """Let time go by."""
        self._pass(amount % 24 / 4)

    def acquire(self, client: Client, amount: int) -> None:
        if not self.holds(client.grant):
            self._granted(client, self._new(), amount, late=0)

    def acquire_late(self, client: Client, amount: int) -> None:
        """Get the answer only after a while, perhaps too late."""
        if not self.holds(client.grant):
            self._granted(client, self._new(), amount, late=amount % 13 / 4)

    def acquire_lost(self, client: Client, amount: int) -> None:
        """Never get the answer."""
        client.lost = self._new()
        self._ask(client.lost, amount)

    def acquire_again(self, client: Client, amount: int) -> None:
        """Ask once more after an answer was lost."""
        if client.lost is not None and not self.holds(client.grant):
            lease, client.lost = client.lost, None
            self._granted(client, lease, amount, late=0)

    def forget(self, client: Client, amount: int) -> None:
        """Give a grant back whose answer was lost."""
        if client.lost is not None:
            self.server.forget(client.lost)
            assert not self.server.forget(client.lost), "forgotten twice"
            client.lost = None

    def renew(self, client: Client, amount: int) -> None:
        self._renewed(client, amount, answered=True)

    def renew_lost(self, client: Client, amount: int) -> None:
        """Renew and never know."""
        self._renewed(client, amount, answered=False)

    def release(self, client: Client, amount: int) -> None:
        if (grant := client.grant) is not None:
            answer = self.server.release(grant.lease, grant.token)
            assert answer == "released" or grant.disturbed or not self.holds(grant)
            client.grant, client.old = None, grant

    def stale(self, client: Client, amount: int) -> None:
        """Send with a grant that is over: nothing of it may work while somebody else holds."""
        holders = self._holders()
        if (old := client.old) is not None and holders and holders[0].lease != old.lease:
            assert self.server.renew(old.lease, old.token, 10)[0] != "ok"
            assert self.server.release(old.lease, old.token) != "released"

    def crash(self, client: Client, amount: int) -> None:
        client.grant = client.old = client.lost = None

    def evict(self, client: Client, amount: int) -> None:
        if (ended := self.server.evict()) is not None:
            self._issued(ended[1])
            self._disturb()
            self.unlock(client, amount)

    def hand_over(self, client: Client, amount: int) -> None:
        if self.holds(client.grant) and client.grant is not None:
            self.references.append(client.grant)
            client.grant, client.old = None, client.grant

    def adopt(self, client: Client, amount: int) -> None:
        self._adopted(client, amount, answered=True)

    def adopt_lost(self, client: Client, amount: int) -> None:
        """Adopt and never know."""
        self._adopted(client, amount, answered=False)

    def clock_step(self, client: Client, amount: int) -> None:
        """Set the server's clock forward or back."""
        step = (amount % 65 - 32) / 4
        self.server.clock += step
        if step > 0:
            self._disturb()
        else:
            self.free_by = inf

    def lock(self, client: Client, amount: int) -> None:
        """Take a session lock with a token: never while somebody holds the lease."""
        token = self.server.lock()
        if token is not None:
            assert not self.locked, "two sessions hold the lock"
            self._issued(token)
            assert not self._holders(), "a lease was robbed of its token"
            self.locked = True

    def lock_briefly(self, client: Client, amount: int) -> None:
        """Take the session lock for a moment."""
        if not self.locked:
            self.lock(client, amount)
            self.unlock(client, amount)

    def unlock(self, client: Client, amount: int) -> None:
        """Release the session lock, or end its session."""
        self.server.unlock()
        self.locked = False

    def save(self, client: Client, amount: int) -> None:
        """Let the standby, or the backup, have everything."""
        self.server.save()
        self.kept = self.highest, self.written

    def fail_over(self, client: Client, amount: int) -> None:
        """Promote the standby, or restore the backup: what was committed since is lost."""
        self.timelines += 1 + amount % 3
        self.server.go_back(self.timelines)
        self.highest, self.written = self.kept
        self.locked, self.free_by = False, inf
        self._disturb()

    def write(self, client: Client, amount: int) -> None:
        """Write with what it has, whether it still holds it or not."""
        grant = client.grant or client.old
        if grant is None:
            return
        newest = self.server.enter(grant.token)
        if newest is None:
            assert grant.token >= self.written, "a stale write was accepted"
            self.written = grant.token
        else:
            assert newest > grant.token or grant.token > self.highest, "refused, and nobody is newer"
            assert grant.disturbed or not self.holds(client.grant), "a holder's write was refused"

    def _new(self) -> str:
        self.made += 1
        return f"00000000-0000-4000-8000-{self.made:012}"

    def _ask(self, lease: str, amount: int) -> tuple[bool, int, float]:
        ttl = 1 + amount % 4
        asked = (ttl, ttl / 2 * (amount & 4 == 4), amount % 3, 2 + amount % 5 if amount & 8 else None)
        granted, token, left = self.server.acquire(lease, *asked)
        if granted:
            assert not self.locked, "a lease was granted beside a session lock"
            self._issued(token, lease)
        else:
            assert 0 < left <= LONGEST, f"blocked for {left} s"
            assert self.locked or self.time < self.free_by, "not free in time"
            self.free_by = inf if self.locked else min(self.free_by, self.time + left)
        return granted, token, left

    def _granted(self, client: Client, lease: str, amount: int, *, late: float) -> None:
        started = self.time
        granted, token, left = self._ask(lease, amount)
        grant = Grant(lease, token, started + left)
        self._pass(late)
        if granted and self.holds(grant):
            client.old, client.grant = client.grant or client.old, grant
        elif granted:
            self.server.forget(lease)

    def _renewed(self, client: Client, amount: int, *, answered: bool) -> None:
        grant = client.grant
        if grant is None:
            return
        believed = self.holds(grant)
        answer, left = self.server.renew(grant.lease, grant.token, 1 + amount % 4)
        self.free_by = inf
        assert answer == "ok" or grant.disturbed or not believed, f"a holder was told {answer}"
        if answered and answer == "ok" and believed:
            # A shorter lease was asked for: believed no longer than it is there.
            grant.deadline = self.time + left
        elif not answered and answer == "ok":
            grant.deadline = min(grant.deadline, self.time + left)
        elif answered:
            client.grant, client.old = None, grant

    def _adopted(self, client: Client, amount: int, *, answered: bool) -> None:
        if not self.references or self.holds(client.grant):
            return
        reference = self.references[amount % len(self.references)]
        new = self._new()
        answer, left = self.server.adopt(reference.lease, reference.token, new)
        self.free_by = inf
        if answer == "ok":
            again, _ = self.server.adopt(reference.lease, reference.token, self._new())
            assert again == "superseded", "adopted twice"
        if answer == "ok" and answered:
            client.grant = Grant(new, reference.token, self.time + left)

    def _issued(self, token: int, lease: str = "") -> None:
        """Remember whom a token was given to: asked again after a lost answer it is the same grant, else a new one."""
        again = lease and self.issued.get(token) == lease
        newest = max(self.issued, default=0)
        assert token > newest or again, f"token {token} was issued after {newest}"
        self.issued[token] = lease
        self.highest, self.free_by = max(self.highest, token), inf

    def _holders(self) -> list[Grant]:
        return [c.grant for c in self.clients if c.grant and self.holds(c.grant) and not c.grant.disturbed]

    def _pass(self, seconds: float) -> None:
        self.time += seconds
        self.server.clock += seconds

    def _disturb(self) -> None:
        for client in self.clients:
            if client.grant is not None:
                client.grant.disturbed = True

    def _look(self) -> None:
        holders = self._holders()
        assert len(holders) <= 1, f"two holders: {holders}"
        if holders:
            assert holders[0].token == self.highest, "the holder's token is not the newest"


LONGEST = 4 + 2
"""The longest TTL and lock delay that are asked for."""

STEPS = (
    Schedule.nothing,
    Schedule.passes,
    Schedule.acquire,
    Schedule.renew,
    Schedule.release,
    Schedule.write,
    Schedule.acquire_late,
    Schedule.acquire_lost,
    Schedule.acquire_again,
    Schedule.forget,
    Schedule.renew_lost,
    Schedule.stale,
    Schedule.crash,
    Schedule.evict,
    Schedule.hand_over,
    Schedule.adopt,
    Schedule.adopt_lost,
    Schedule.clock_step,
    Schedule.lock_briefly,
    Schedule.acquire,
    Schedule.passes,
    Schedule.write,
    Schedule.lock,
    Schedule.unlock,
    Schedule.unlock,
    Schedule.save,
    Schedule.fail_over,
)
