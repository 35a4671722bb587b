"""The heartbeat: what it renews, how long a holder trusts its grant, and what it is notified of."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import psycopg
import pytest

from pgfence._holds.queue import Contender, LocalQueue, QueueEntry
from pgfence._leases.grant import Grant
from pgfence._leases.heartbeat.service import HeartbeatService, heartbeat_of
from pgfence._leases.request import Granted, LeaseRequest
from pgfence._leases.terms import LeaseTerms
from pgfence._process.clock import clock
from pgfence._sql.storage import TableNames
from pgfence.config import Config
from pgfence.errors import LockLostError, LockNotHeldError, UnreachableError
from support.leases import lease, rival
from support.limits import set_limit
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.worlds import World

pytestmark = pytest.mark.usefixtures("tables")

PLACE = TableNames()


class Bench:
    """One heartbeat, and leases acquired for it by plain SQL."""

    def __init__(self, heartbeat: HeartbeatService, admin: psycopg.Connection[Any]) -> None:
        self.heartbeat = heartbeat
        self.admin = admin
        self.grants: list[Grant] = []

    def take(self, name: str, ttl: float, *, max_hold: float | None = None, heartbeat: Any = "auto") -> Grant:
        """Take a lease and have it renewed."""
        lease_id, started = uuid4(), clock()
        row = self.admin.execute(
            "SELECT * FROM pgfence_acquire_lease_v2(%s, %s, %s, 0, 0, %s, NULL, NULL, NULL, '', NULL, 'lease')",
            (name, str(lease_id), ttl, max_hold),
        ).fetchone()
        assert row is not None and row[0]
        claim = LeaseRequest(stored=name, place=PLACE, terms=LeaseTerms(ttl, max_hold=max_hold), heartbeat=heartbeat)
        ticket = QueueEntry((name,), Contender("thread"), LocalQueue())
        told = Granted(row[1], row[2], row[3], row[4], None)
        grant = Grant(claim, told, ticket, lease_id=lease_id, started=started, config=self.heartbeat.config)
        self.grants.append(grant)
        self.heartbeat.keep(grant)
        return grant

    def row(self, name: str) -> Any:
        """Return (token, lease_id, renewals seen in renewed_at, whether it is held) of a lease."""
        return self.admin.execute(
            "SELECT token, lease_id, renewed_at, released_at IS NULL AND expires_at > clock_timestamp()"
            " FROM pgfence_lease WHERE name = %s",
            (name,),
        ).fetchone()

    def renewals(self, name: str) -> Callable[[], int]:
        """Return a function that counts the renewals it has seen."""
        seen = set()

        def count() -> int:
            seen.add(self.row(name)[2])
            return len(seen) - 1

        return count

    def held(self, name: str) -> bool:
        return bool(self.row(name)[3])

    def close(self) -> None:
        for grant in self.grants:
            self.heartbeat.drop(grant)


@pytest.fixture
def bench(world: World, admin: psycopg.Connection[Any]) -> Iterator[Callable[..., Bench]]:
    """A function that makes a bench on an engine of this world's driver."""
    benches: list[Bench] = []

    def make(dsn: str | None = None, **settings: Any) -> Bench:
        engine = world.engine(dsn=dsn)
        benches.append(Bench(heartbeat_of(getattr(engine, "sync_engine", engine), Config(**settings)), admin))
        return benches[-1]

    yield make
    for one in benches:
        one.close()


async def test_a_lease_is_renewed_for_longer_than_its_ttl(bench: Any, name: str, eventually: Any) -> None:
    """C083: a job that takes three times its TTL is one run."""
    here = bench()
    grant = here.take(name, 1.0)
    count = here.renewals(name)
    await eventually(lambda: count() >= 9, deadline=10)
    assert grant.state == "held"
    assert here.held(name)
    assert here.row(name)[0] == grant.token


@pytest.mark.twins
async def test_without_a_heartbeat_the_lease_ends_at_its_own_deadline(bench: Any, name: str, eventually: Any) -> None:
    """C083: a "manual" lease is not renewed; its holder sees the loss before the server gives the name away."""
    here = bench()
    grant = here.take(name, 1.0, heartbeat="manual")
    lost = threading.Event()
    told: list[bool] = []
    grant.subscribe(lambda: told.append(here.held(name)))
    grant.subscribe(lost.set)
    await eventually(lost.is_set)
    assert told == [True]
    assert grant.loss_reason == "expired"
    await eventually(lambda: not here.held(name))
    with pytest.raises(LockLostError) as caught:
        grant.check()
    assert caught.value.reason == "expired"
    assert caught.value.token == grant.token


@pytest.mark.twins
async def test_max_hold_ends_a_lease_that_is_renewed_well(bench: Any, name: str, eventually: Any) -> None:
    """C083: renewal stops at max_hold, and the handle says that it was overdue."""
    here = bench()
    began = clock()
    grant = here.take(name, 0.6, max_hold=1.5)
    await eventually(lambda: grant.reason)
    assert grant.loss_reason == "overdue"
    assert clock() - began >= 1.2
    assert here.renewals(name)() >= 0
    await eventually(lambda: not here.held(name))


@pytest.mark.twins
async def test_a_lease_taken_by_another_holder_is_lost_at_the_next_renewal(
    bench: Any, name: str, eventually: Any
) -> None:
    """C082: the server says "lost" and names the reason; a renewal resurrects nothing."""
    here = bench()
    grant = here.take(name, 0.6)
    here.admin.execute(
        "UPDATE pgfence_lease SET token = token + 1, lease_id = gen_random_uuid() WHERE name = %s", (name,)
    )
    theirs = here.row(name)[:3]
    await eventually(lambda: grant.reason)
    assert grant.loss_reason == "superseded"
    assert here.row(name)[:3] == theirs


@pytest.mark.twins
async def test_an_evicted_holder_is_notified(bench: Any, name: str, eventually: Any) -> None:
    """An operator's eviction is the reason that the holder receives."""
    here = bench()
    grant = here.take(name, 0.6)
    here.admin.execute("SELECT * FROM pgfence_evict_lease_v2(%s, 'me', 'a test', NULL)", (name,))
    await eventually(lambda: grant.reason)
    assert grant.loss_reason == "evicted"


async def test_failed_renewals_are_not_a_loss_while_there_is_time(
    bench: Any, proxy: Any, name: str, eventually: Any
) -> None:
    """C082: the server is away for some renewals: in doubt, not lost; the next response settles it."""
    here = bench(proxy.dsn)
    grant = here.take(name, 4.0)
    count = here.renewals(name)
    await eventually(lambda: count() >= 1)
    proxy.refuse()
    proxy.cut()
    await eventually(lambda: grant.failures)
    assert grant.state == "unknown"
    grant.check()
    proxy.heal()
    await eventually(lambda: grant.state == "held")
    assert grant.failures == 0


async def test_a_heartbeat_whose_session_is_killed_opens_another(bench: Any, name: str, eventually: Any) -> None:
    """C082: its server process is ended between two renewals: it opens another connection."""
    here = bench()
    grant = here.take(name, 1.5)
    count = here.renewals(name)
    await eventually(lambda: count() >= 1)
    here.admin.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE query LIKE '%%renew_leases_v1%%' AND pid <> pg_backend_pid() AND datname = current_database()"
    )
    seen = count()
    await eventually(lambda: count() > seen + 1)
    assert grant.state == "held"


async def test_a_holder_that_is_cut_off_ends_before_the_lease_is_free(
    bench: Any, proxy: Any, name: str, eventually: Any
) -> None:
    """C082: no renewal gets through: retried until the deadline, then lost, while the server still keeps the name for it."""
    here = bench(proxy.dsn)
    grant = here.take(name, 1.5)
    count = here.renewals(name)
    await eventually(lambda: count() >= 1)
    proxy.refuse()
    proxy.cut()
    told: list[bool] = []
    grant.subscribe(lambda: told.append(here.held(name)))
    await eventually(lambda: grant.reason)
    assert grant.loss_reason == "cut off"
    await eventually(lambda: told)
    assert told == [True]


async def test_a_renewal_that_hangs_is_cut_at_the_deadline(bench: Any, proxy: Any, name: str, eventually: Any) -> None:
    """C082: a server that keeps the connection and does not respond delays no loss beyond the deadline."""
    here = bench(proxy.dsn)
    grant = here.take(name, 1.5)
    count = here.renewals(name)
    await eventually(lambda: count() >= 1)
    proxy.black_hole()
    told: list[bool] = []
    grant.subscribe(lambda: told.append(here.held(name)))
    await eventually(lambda: grant.reason)
    assert grant.loss_reason == "cut off"
    await eventually(lambda: told)
    assert told == [True]
    proxy.heal()


async def test_a_hung_connection_is_replaced_while_there_is_time(
    bench: Any, proxy: Any, name: str, eventually: Any
) -> None:
    """C082: half the time to the deadline is for a second try, on a new connection."""
    here = bench(proxy.dsn)
    grant = here.take(name, 4.0)
    count = here.renewals(name)
    await eventually(lambda: count() >= 1)
    proxy.black_hole()
    await eventually(lambda: grant.failures)
    assert grant.state == "unknown"
    proxy.heal()
    await eventually(lambda: grant.state == "held")


async def test_an_opening_that_hangs_is_abandoned_in_time(bench: Any, proxy: Any, name: str, eventually: Any) -> None:
    """C082: no connection comes about: that thread is given up, and another one tries before the deadline."""
    here = bench(proxy.dsn)
    proxy.black_hole()
    grant = here.take(name, 4.0)
    await eventually(lambda: grant.failures)
    assert grant.state == "unknown"
    proxy.heal()
    await eventually(lambda: grant.state == "held")


@pytest.mark.twins
async def test_the_clock_alone_ends_trust(bench: Any, name: str) -> None:
    """C062: a process that was stopped reads "lost" at once, before any thread of pgfence has run."""
    here = bench()
    grant = here.take(name, 60)
    grant.deadline = clock()
    assert grant.state == "lost"
    assert grant.get_remaining() == 0.0
    assert grant.loss_reason == "expired"
    with pytest.raises(LockLostError):
        grant.check()


@pytest.mark.twins
async def test_a_response_after_the_deadline_restores_nothing(bench: Any, name: str) -> None:
    """C062: a renewal that the server granted, but that arrived after the deadline, is a loss."""
    here = bench()
    grant = here.take(name, 60)
    grant.deadline = clock()
    assert not grant.note_renewed(clock(), 60.0, grant.expires_at, 60.0)
    assert grant.state == "lost"


async def test_a_slow_response_does_not_extend_the_deadline(bench: Any, proxy: Any, name: str, eventually: Any) -> None:
    """C073: the deadline counts from when the renewal was sent, so it is before the row's expiry however late the response."""
    here = bench(proxy.dsn)
    grant = here.take(name, 3.0)
    count = here.renewals(name)
    await eventually(lambda: count() >= 2)  # its statement is prepared by then, which takes a round trip of its own
    await eventually(lambda: not grant.renewal_pending)
    proxy.delay(0.3)
    for _ in range(2):
        before = grant.expires_at
        await eventually(lambda before=before: grant.expires_at > before)
        look = "SELECT expires_at, extract(epoch FROM expires_at - clock_timestamp())::float8 FROM pgfence_lease WHERE name = %s"
        expires, left = here.admin.execute(look, (name,)).fetchone()
        here_left = grant.deadline - clock()
        assert grant.expires_at != expires or here_left <= left - 0.3 + 0.01  # a margin of 0.3


@pytest.mark.twins
async def test_progress_renews_only_what_moves_on(bench: Any, name: str, eventually: Any) -> None:
    """A hung worker cannot keep a lease: with "progress" each renewal needs a progress() since the last."""
    here = bench()
    grant = here.take(name, 0.9, heartbeat="progress")
    count = here.renewals(name)
    for wanted in range(1, 4):
        grant.progress()
        await eventually(lambda wanted=wanted: count() >= wanted)
    await eventually(lambda: grant.reason)
    assert grant.loss_reason == "expired"
    assert count() == 3


@pytest.mark.twins
async def test_progress_that_comes_late_renews_at_once(bench: Any, name: str, eventually: Any) -> None:
    """A renewal that was skipped for lack of progress is caught up on by the next progress()."""
    here = bench()
    grant = here.take(name, 3.0, heartbeat="progress")
    count = here.renewals(name)
    await eventually(lambda: grant.idle)
    assert count() == 0
    grant.progress()
    await eventually(lambda: count() == 1)


@pytest.mark.twins
async def test_a_manual_renewal_sets_another_ttl(bench: Any, name: str, eventually: Any) -> None:
    """`renew(ttl=)` returns, and the new TTL applies from then on, for "manual" too."""
    here = bench()
    grant = here.take(name, 0.9, heartbeat="manual")
    answers: list[Any] = []
    here.heartbeat.renew(grant, 60.0, answers.append)
    await eventually(lambda: answers)
    assert answers == [None]
    assert grant.ttl == 60.0
    assert 50 < grant.get_remaining() <= 55


@pytest.mark.twins
async def test_renewing_what_is_lost_or_released_says_so(bench: Any, name: str, eventually: Any) -> None:
    """The one who asked gets the reason, in either case."""
    here = bench()
    grant = here.take(name, 60)
    other = here.take(f"{name}:other", 60)
    here.admin.execute("SELECT * FROM pgfence_evict_lease_v2(%s, 'me', 'a test', NULL)", (name,))
    answers: list[Any] = []
    here.heartbeat.renew(grant, None, answers.append)
    await eventually(lambda: answers)
    assert isinstance(answers[0], LockLostError) and answers[0].reason == "evicted"
    here.heartbeat.drop(other)
    other.begin_release()
    here.heartbeat.renew(other, None, answers.append)
    assert isinstance(answers[1], LockNotHeldError)


@pytest.mark.twins
async def test_renew_without_a_server_raises_unknown_outcome(
    bench: Any, proxy: Any, name: str, eventually: Any
) -> None:
    """No response is an UnreachableError, and the lease is held until its deadline."""
    here = bench(proxy.dsn)
    grant = here.take(name, 30)
    proxy.refuse()
    proxy.cut()
    answers: list[Any] = []
    here.heartbeat.renew(grant, None, answers.append)
    await eventually(lambda: answers, deadline=10)
    assert isinstance(answers[0], UnreachableError)
    assert grant.state == "unknown"
    grant.check()


@pytest.mark.twins
async def test_hundreds_of_leases_are_renewed_by_one_connection(bench: Any, name: str, eventually: Any) -> None:
    """Batches: 1,200 leases, one connection of one process, none lost."""
    here = bench()
    grants = [here.take(f"{name}:{n}", 4.0) for n in range(1200)]
    first = {grant: grant.deadline for grant in grants}
    await eventually(lambda: all(grant.deadline > first[grant] for grant in grants))
    assert [grant for grant in grants if grant.state != "held"] == []
    busy = here.admin.execute(
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%%renew_leases_v1%%'"
        " AND pid <> pg_backend_pid() AND datname = current_database()"
    ).fetchone()
    assert busy is not None and busy[0] <= 1 + len(_links_of_others())


def _links_of_others() -> list[threading.Thread]:
    """Connections that earlier tests of this process have not closed yet."""
    return [thread for thread in threading.enumerate() if thread.name == "pgfence-link"][1:]


@pytest.mark.twins
async def test_a_locked_row_delays_no_other_lease(bench: Any, name: str, dsn: str, eventually: Any) -> None:
    """While one row is locked by another transaction the others are renewed, and that one as soon as it is free."""
    here = bench()
    locked, free = here.take(f"{name}:locked", 1.5), here.take(f"{name}:free", 1.5)
    count = here.renewals(free.stored)
    with psycopg.connect(dsn) as other:
        other.execute("SELECT 1 FROM pgfence_lease WHERE name = %s FOR UPDATE", (locked.stored,))
        await eventually(lambda: count() >= 1)
        before = locked.deadline
    await eventually(lambda: locked.deadline > before)
    assert locked.state == "held"


async def test_a_release_without_a_response_is_repeated(bench: Any, proxy: Any, name: str, eventually: Any) -> None:
    """The server is away when the release is sent: it gets it later, well before the TTL is over."""
    here = bench(proxy.dsn)
    grant = here.take(name, 60)
    proxy.refuse()
    proxy.cut()
    here.heartbeat.drop(grant)
    grant.begin_release()
    here.heartbeat.release_later(grant)
    await eventually(lambda: here.heartbeat._queue.failures)
    proxy.heal()
    await eventually(lambda: not here.held(name))


@pytest.mark.twins
async def test_a_grant_without_a_response_is_ended_by_its_id(bench: Any, name: str, eventually: Any) -> None:
    """C084: the response to the acquire was lost: the row is free again long before the TTL."""
    here = bench()
    lease_id = uuid4()
    here.admin.execute(
        "SELECT pgfence_acquire_lease_v2(%s, %s, 30, 0, 0, NULL, NULL, NULL, NULL, '', NULL, 'lease')",
        (name, str(lease_id)),
    )
    here.heartbeat.forget_later(PLACE, name, UUID(int=0), 30)
    here.heartbeat.forget_later(PLACE, name, lease_id, 30)
    await eventually(lambda: not here.held(name))


@pytest.mark.twins
async def test_a_grant_that_comes_after_it_was_forgotten_is_ended_too(
    bench: Any, name: str, dsn: str, eventually: Any
) -> None:
    """C084: the acquire was given up while it waited for its row in the server, and is granted only after the first try."""
    here = bench()
    here.heartbeat.drop(here.take(name, 60))
    here.admin.execute("UPDATE pgfence_lease SET released_at = now(), free_at = now() WHERE name = %s", (name,))
    lease_id = uuid4()
    granted: list[Any] = []

    def acquire() -> None:
        with psycopg.connect(dsn, autocommit=True) as late:
            query = "SELECT granted FROM pgfence_acquire_lease_v2(%s, %s, 30, 0, 0, NULL, NULL, NULL, NULL, '', NULL, 'lease')"
            granted.append(late.execute(query, (name, str(lease_id))).fetchone())

    with psycopg.connect(dsn) as other:
        other.execute("SELECT 1 FROM pgfence_lease WHERE name = %s FOR UPDATE", (name,))
        waiting = threading.Thread(target=acquire)
        waiting.start()
        await eventually(
            lambda: (
                here.admin.execute(
                    "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
                ).rowcount
            )
        )
        here.heartbeat.forget_later(PLACE, name, lease_id, 30)
        await eventually(lambda: any(ending.failures for ending in here.heartbeat._queue.releases))
    waiting.join()
    assert granted == [(True,)]
    await eventually(lambda: not here.held(name))


@pytest.mark.twins
async def test_a_grant_that_comes_long_after_it_was_forgotten_is_ended_too(
    bench: Any, name: str, eventually: Any
) -> None:
    """C084: the abandoned acquire reaches the server only after the request to end it."""
    here = bench()
    lease_id = uuid4()
    here.take(name, 60, heartbeat="manual")
    here.heartbeat.forget_later(PLACE, name, lease_id, 30)
    await eventually(lambda: any(ending.answer is False for ending in here.heartbeat._queue.releases))
    here.admin.execute("UPDATE pgfence_lease SET released_at = now(), free_at = 'epoch' WHERE name = %s", (name,))
    row = here.admin.execute(
        "SELECT granted FROM pgfence_acquire_lease_v2(%s, %s, 30, 0, 0, NULL, NULL, NULL, NULL, '', NULL, 'lease')",
        (name, str(lease_id)),
    ).fetchone()
    assert row == (True,)
    await eventually(lambda: not here.held(name))


async def test_a_release_elsewhere_wakes_the_waiters_for_that_name(bench: Any, name: str, eventually: Any) -> None:
    """A notification wakes the waiters for the lease that it names, and no others."""
    here = bench()
    woken: list[str] = []
    cease = here.heartbeat.listen(PLACE, name, lambda: woken.append("this"))
    here.heartbeat.listen(PLACE, f"{name}:2", lambda: woken.append("other"))
    gone = here.heartbeat.listen(PLACE, name, lambda: woken.append("gone"))
    gone()
    await eventually(lambda: sorted(woken) == ["other", "this"])  # from now on it listens
    here.admin.execute("SELECT pg_notify('pgfence_released', %s)", (name,))
    await eventually(lambda: woken.count("this") == 2)
    cease()
    assert woken.count("other") == 1
    assert "gone" not in woken


async def test_listening_goes_on_after_the_connection_was_lost(bench: Any, name: str, eventually: Any) -> None:
    """After its connection is killed the heartbeat listens again, and wakes the waiters, who may have missed a release."""
    here = bench()
    woken: list[int] = []
    cease = here.heartbeat.listen(PLACE, name, lambda: woken.append(1))
    await eventually(lambda: woken)
    here.admin.execute(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE query LIKE 'LISTEN%%' AND pid <> pg_backend_pid() AND datname = current_database()"
    )
    await eventually(lambda: len(woken) == 2)
    here.admin.execute("SELECT pg_notify('pgfence_released', %s)", (name,))
    await eventually(lambda: len(woken) == 3)
    cease()


async def test_the_connection_lasts_from_the_first_renewal_to_dispose(
    world: World, bench: Any, name: str, eventually: Any, admin: Any
) -> None:
    """A short lease costs no heartbeat connection; `engine.dispose()` ends it once no lease needs it."""
    here = bench()
    grant = here.take(name, 60)
    here.heartbeat.drop(grant)
    assert here.heartbeat._connection is None
    grant = here.take(f"{name}:2", 0.6)
    await eventually(lambda: here.heartbeat._connection is not None)
    here.heartbeat.drop(grant)
    here.heartbeat._on_engine_disposed(here.heartbeat.engine)
    await eventually(lambda: here.heartbeat._connection is None)
    await eventually(lambda: here.heartbeat._timer is None)


@pytest.mark.twins
async def test_a_release_before_the_wait_listens_is_seen(
    world: World, name: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that is released between the first attempt and the begin of listening is acquired without a notification."""
    set_limit(monkeypatch, "LONGEST_SLEEP", 3600)
    engine = world.engine()
    assert rival(admin, name, 120)
    heartbeat = heartbeat_of(getattr(engine, "sync_engine", engine), Config())
    stop = heartbeat.listen(
        PLACE, f"{name}!", lambda: None
    )  # so that the wait below finds a connection that listens already
    await eventually(lambda: heartbeat.is_listening(PLACE))
    listen = HeartbeatService.listen

    def release_and_listen(self: HeartbeatService, place: TableNames, stored: str, wake: Any) -> Any:
        if stored == name:
            admin.execute("UPDATE pgfence_lease SET released_at = now(), free_at = 'epoch' WHERE name = %s", [name])
        return listen(self, place, stored, wake)

    monkeypatch.setattr(HeartbeatService, "listen", release_and_listen)
    held = await asyncio.wait_for(world.other().call(lease(world, engine, name, ttl=120).acquire, timeout=1000), FAR)
    await world.call(held.release)
    stop()
