"""Partitions: one owner each, balance, moves, draining, faults, routing, resizing, the hash in SQL; invalid arguments."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import func, select

from pgfence import AsyncPartitions, Partitions, monitoring, partition_for, schema
from pgfence.config import configure
from pgfence.errors import LockTimeoutError, StaleFencingTokenError
from support.fences import overtake
from support.leases import lapse, lease, rival, row
from support.limits import set_limit
from support.rows import every_row
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.worlds import World

pytestmark = [pytest.mark.twins, pytest.mark.usefixtures("tables")]

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "partition_vectors.json").read_text())


def partitions(world: World, engine: Any, name: str, count: int = 4, *, ttl: Any = 30, **kwargs: Any) -> Any:
    """Return the world's partitions."""
    return world.pick(Partitions, AsyncPartitions)(engine, name, count, ttl=ttl, **kwargs)


class Served:
    """What the function of a worker does: it notes its calls, and ends when the lease is lost, unless it hangs.

    Attributes:
        calls: the partitions in the order in which it was called.
        running: the partitions that it is serving.
        hang: whether it goes on after a loss until this is False.
        fail: an exception to raise at once, for partition 0.
    """

    def __init__(self, world: World) -> None:
        self.calls: list[int] = []
        self.running: set[int] = set()
        self.leases: dict[int, Any] = {}
        self.hang = False
        self.fail: BaseException | None = None
        self.serve = self._serve_async if world.is_async else self._serve

    def _begin(self, partition: int, lease: Any) -> None:
        self.calls.append(partition)
        self.leases[partition] = lease
        if self.fail is not None and partition == 0:
            raise self.fail
        self.running.add(partition)

    def _serve(self, partition: int, lease: Any) -> None:
        self._begin(partition, lease)
        lease.wait_lost()
        eventually(lambda: not self.hang)
        self.running.discard(partition)

    async def _serve_async(self, partition: int, lease: Any) -> None:
        self._begin(partition, lease)
        try:
            await asyncio.sleep(3600)
        finally:
            await eventually(lambda: not self.hang)
            self.running.discard(partition)


def count_calls(served: list[Served]) -> int:
    """Return how often a partition was taken."""
    return sum(len(each.calls) for each in served)


def members(admin: psycopg.Connection[Any], name: str) -> int:
    """Return how many rows the members of these partitions have."""
    found = admin.execute("SELECT count(*) FROM pgfence_partition_member WHERE name = %s", [name]).fetchone()
    assert found is not None
    return int(found[0])


@pytest.mark.every_driver
async def test_a_worker_owns_and_serves_all_partitions_until_it_leaves(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Entering waits for the free partitions; each is a separate lease row; leaving ends the functions and releases all."""
    served = Served(world)
    one = partitions(world, world.engine(), name)
    async with world.enter(one.join(served.serve, owner="pod-1", address="10.0.0.7:80")) as worker:
        assert sorted(worker.owned) == [0, 1, 2, 3]
        await eventually(lambda: served.running == {0, 1, 2, 3})
        found = row(admin, f"{name}/2")
        assert (found.token, found.owner, found.lease_id) == (1, "pod-1", worker.owned[2].lease_id)
        assert worker.owned[2].names == (f"{name}/2",)
        assert rival(admin, f"{name}/2") is None
        owner = await world.call(one.owner_of, 2)
        assert (owner.name, owner.kind, owner.owner, owner.address, owner.token) == (
            *(f"{name}/2", "partition", "pod-1"),
            *("10.0.0.7:80", 1),
        )
    assert served.running == set()
    assert not worker.owned
    assert {row(admin, f"{name}/{i}").released_at is None for i in range(4)} == {False}
    assert members(admin, name) == 0
    assert await world.call(one.owner_of, 2) is None


@pytest.mark.every_driver
async def test_workers_share_the_partitions_and_only_as_many_move_as_must(world: World, name: str) -> None:
    """Each newcomer gets its share from the others, within moments; a worker that leaves gives everything to them."""
    served = [Served(world) for _ in range(3)]
    async with AsyncExitStack() as stack:
        workers = []
        for each in served:
            one = partitions(world, world.engine(), name, 10)
            workers.append(await stack.enter_async_context(world.enter(one.join(each.serve))))
            share = 10 // len(workers)
            await eventually(
                lambda share=share: (
                    all(share <= len(worker.owned) <= share + 1 for worker in workers)
                    and sum(len(worker.owned) for worker in workers) == 10
                )
            )
        await eventually(lambda: count_calls(served) >= 10 + 5 + 3)
        assert count_calls(served) == 10 + 5 + 3
        kept = set(workers[2].owned)
        await world.call(workers[0].leave)
        await eventually(lambda: [len(worker.owned) for worker in workers[1:]] == [5, 5])
        assert kept <= set(workers[2].owned)
        await eventually(lambda: count_calls(served) >= 10 + 5 + 3 + 4)
        assert count_calls(served) == 10 + 5 + 3 + 4


async def test_a_partition_is_drained_before_another_worker_starts_it(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """The former owner's function is asked to stop, and the lease is released when it has returned, not before."""
    old, new = Served(world), Served(world)
    old.hang = True
    async with world.enter(partitions(world, world.engine(), name, 2).join(old.serve)) as first:
        await eventually(lambda: old.running == {0, 1})
        async with world.other().enter(partitions(world, world.engine(), name, 2).join(new.serve)) as second:
            await eventually(lambda: len(first.owned) == 1)
            (moving,) = {0, 1} - set(first.owned)
            assert old.leases[moving].loss_reason == "resigned"
            assert (row(admin, f"{name}/{moving}").released_at, new.calls) == (None, [])
            old.hang = False
            await eventually(lambda: new.running == {moving})
            assert old.running == set(first.owned)
            assert second.owned[moving].token == 2


@pytest.mark.every_driver
async def test_an_evicted_owner_stops_and_is_fenced(world: World, name: str) -> None:
    """evict() takes the name of the row; the function is stopped, its token is stale, and the next owner has a new one."""
    served, engine = Served(world), world.engine()
    async with world.enter(partitions(world, engine, name, 1).join(served.serve, owner="pod-1")) as worker:
        old = worker.owned[0]
        found = await world.call(monitoring.evict, engine, f"{name}/0", reason="hung")
        assert [(one.kind, one.owner, one.name) for one in found] == [("partition", "pod-1", f"{name}/0")]
        await eventually(lambda: served.calls == [0, 0])
        assert (old.loss_reason, worker.owned[0].token) == ("evicted", 3)


async def test_a_stale_owner_cannot_commit_and_fences_only_its_partition(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """Writes with the token of an ownership that is over are rejected; a shared resource cannot be fenced with it."""
    served, engine = Served(world), world.engine()
    async with world.enter(partitions(world, engine, name, 1).join(served.serve)) as worker:
        old = worker.owned[0]
        async with world.enter(old.begin(engine)):
            pass
        with pytest.raises(ValueError, match="a partition fences only its own resource, not 'account:1'"):
            await world.call(lambda: old.begin(engine, "account:1"))
        lapse(admin, f"{name}/0")
        assert rival(admin, f"{name}/0") == 2
        with pytest.raises(StaleFencingTokenError):
            async with world.enter(old.begin(engine)):
                pass


async def test_a_function_that_does_not_stop_costs_the_worker_its_partitions(
    world: World, name: str, admin: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One TTL after the loss the worker leaves, so that others take over; when the function has returned, it joins again."""
    served = Served(world)
    served.hang = True
    async with world.enter(partitions(world, world.engine(), name, 2, ttl=1).join(served.serve)) as worker:
        await eventually(lambda: served.running == {0, 1})
        lapse(admin, f"{name}/0")
        assert rival(admin, f"{name}/0", 3600) == 2
        await eventually(lambda: members(admin, name) == 0)
        assert not worker.owned
        await eventually(lambda: rival(admin, f"{name}/1", 3600) == 2)
        served.hang = False
        await eventually(lambda: members(admin, name) == 1)
    told = [record.getMessage() for record in caplog.records if "has not returned" in record.getMessage()]
    assert len(told) == 1
    assert f"'{name}/0'" in told[0]


@pytest.mark.parametrize("ends", [False, True])
async def test_an_error_of_the_function_is_logged_and_tried_again(
    world: World, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    """C116: the partition is released and taken again after a pause, and the others are served meanwhile, also after days.

    An error that would end the thread, or cancel the task, is handled like any other.
    """
    served = Served(world)
    served.fail = world.pick(SystemExit, asyncio.CancelledError)() if ends else KeyError("of the function")
    async with world.enter(partitions(world, world.engine(), name, 3).join(served.serve)) as worker:
        set_limit(monkeypatch, "SHORTEST_REST", 0.0)
        worker._balancer._errors[0] = 2000
        await eventually(lambda: served.calls.count(0) >= 2)
        assert served.running == {1, 2}
        served.fail = None
        await eventually(lambda: served.running == {0, 1, 2})
    errors = [record for record in caplog.records if record.exc_info and record.name == "pgfence.partitions"]
    assert {record.getMessage() for record in errors} == {f"the function that serves '{name}/0' failed"}


async def test_a_loss_in_an_exception_group_is_not_an_error(
    world: World, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A TaskGroup in the function raises the error about the loss in a group."""

    def fail(lease: Any) -> None:
        raise ExceptionGroup("tasks", [lease._grant.lost_error()])

    def serve(_: int, lease: Any) -> None:
        lease.wait_lost()
        fail(lease)

    async def serve_async(_: int, lease: Any) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            fail(lease)

    async with world.enter(partitions(world, world.engine(), name, 1).join(world.pick(serve, serve_async))) as worker:
        assert list(worker.owned) == [0]
    assert [each for each in caplog.records if each.name == "pgfence.partitions"] == []


async def test_another_count_or_hash_is_rejected(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A contender that would assign keys differently gets a clear error, and leaves nothing behind."""
    engine = world.engine()
    async with world.enter(partitions(world, engine, name, 4).join(Served(world).serve)):
        for wrong, told in (
            (
                partitions(world, engine, name, 8),
                "has 4 partitions by sha256, not 8 by sha256, .* Use count=4 and hash='sha256'",
            ),
            (partitions(world, engine, name, 4, hash="murmur2"), "another hash needs another name"),
        ):
            with pytest.raises(ValueError, match=told):
                async with world.other().enter(wrong.join(Served(world).serve)):
                    pass
            with pytest.raises(ValueError, match=told):
                await world.call(wrong.owner_of, 1)
        worker = await world.call(lambda: partitions(world, engine, name, 8).join(Served(world).serve))
        await eventually(lambda: worker._balancer.error is not None)
        with pytest.raises(ValueError, match="has 4 partitions"):
            await world.call(worker.leave)
        assert members(admin, name) == 1


@pytest.mark.every_driver
async def test_resizing_needs_free_partitions_and_fences_former_owners(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """While one is owned, resize() is rejected and names the owner; afterwards no old token can enter any gate."""
    one = partitions(world, world.engine(), name, 2)
    async with world.enter(one.join(Served(world).serve, owner="pod-1")) as worker:
        with pytest.raises(ValueError, match="has 2 partitions by sha256, not 3 by murmur2"):
            await world.other().call(partitions(world, world.engine(), name, 3, hash="murmur2").resize, 3)
        with pytest.raises(LockTimeoutError, match="partition 0 is owned by pod-1 .* Stop all workers first") as caught:
            await world.other().call(one.resize, 3)
        assert [(each.kind, each.name) for each in caught.value.holders] == [("partition", f"{name}/0")]
        token = worker.owned[1].token
    await world.call(one.resize, 3)
    with pytest.raises(psycopg.Error) as stale:
        overtake(admin, f"{name}/1", token)
    assert stale.value.sqlstate == "PF001"
    with pytest.raises(ValueError, match="has 3 partitions by sha256, not 2"):
        await world.call(partitions(world, world.engine(), name, 2).owner_of, 0)
    async with world.enter(one.join(Served(world).serve)) as worker:
        assert {number: held.token for number, held in worker.owned.items()} == {0: 3, 1: 3, 2: 1}


async def test_no_partition_is_taken_by_an_old_count(
    world: World, name: str, admin: psycopg.Connection[Any], dsn: str
) -> None:
    """A worker that asks while resize() commits gets nothing: it waits, and then reads the new count."""
    await world.call(partitions(world, world.engine(), name, 2).resize, 2)
    taking = (
        "SELECT granted FROM pgfence_acquire_partition_v1(%s, 0, %s, 'sha256', gen_random_uuid()::text, 30, 0, 0, NULL, 'me', 'here',"
        " 1, '', NULL, 'partition')"
    )
    with psycopg.connect(dsn) as other:
        other.execute("SELECT pgfence_resize_partitions_v1(%s, 3, 'sha256')", [name])
        waiting = asyncio.create_task(asyncio.to_thread(lambda: admin.execute(taking, [name, 2]).fetchone()))
        with psycopg.connect(dsn, autocommit=True) as observer:
            blocked = "SELECT FROM pg_stat_activity WHERE cardinality(pg_blocking_pids(pid)) > 0 AND pid = %s"
            await eventually(lambda: observer.execute(blocked, [admin.info.backend_pid]).fetchone() is not None)
        other.commit()
        assert await waiting == (False,)
        assert admin.execute(taking, [name, 3]).fetchone() == (True,)
        resized = other.execute("SELECT resized FROM pgfence_resize_partitions_v1(%s, 2, 'sha256')", [name]).fetchone()
        assert resized == (False,)


async def test_joining_survives_missing_tables(world: World, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Entering does not raise; the worker logs one warning, owns nothing, and begins as soon as the tables exist."""
    engine = world.engine()
    configure(engine, prefix=f"late_{name[-12:]}_")
    async with world.enter(partitions(world, engine, name, 2).join(Served(world).serve)) as worker:
        assert not worker.owned
        await world.call(schema.create_all, engine)
        await eventually(lambda: len(worker.owned) == 2)
    await world.call(schema.drop_all, engine)
    found = [record for record in caplog.records if record.name == "pgfence.partitions"]
    assert [record.levelname for record in found] == ["WARNING"]


async def test_leaving_inside_the_function_does_not_wait_for_it(world: World, name: str) -> None:
    """Inside the function leave() returns immediately, and the worker leaves when the function has returned."""
    left = threading.Event()
    worker: Any = None

    def serve(_: int, held: Any) -> None:
        worker.leave()
        assert held.wait_lost(20)
        left.set()

    async def serve_async(_: int, held: Any) -> None:
        await worker.leave()
        try:
            await asyncio.sleep(20)
        finally:
            assert held.lost
            left.set()

    def join() -> None:
        nonlocal worker
        worker = partitions(world, world.engine(), name, 1).join(world.pick(serve, serve_async))

    await world.call(join)
    await eventually(left.is_set)
    await world.call(worker.leave)
    assert not worker.owned


@pytest.mark.sync_only
@pytest.mark.one_driver
def test_an_interrupted_leave_waits_again(world: World, name: str) -> None:
    """After Ctrl-C in leave(), a second call still returns only when every function has returned."""
    serving, go_on = threading.Event(), threading.Event()

    def serve(_: int, held: Any) -> None:
        serving.set()
        held.wait_lost(30)
        # The first leave() has begun, and may be waiting now.
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        go_on.wait(30)

    worker = partitions(world, world.engine(), name, 1).join(serve)
    assert serving.wait(30)
    with pytest.raises(KeyboardInterrupt):
        worker.leave()
    timer = threading.Timer(0.2, go_on.set)
    timer.start()
    worker.leave()
    assert go_on.is_set()
    timer.join()


@pytest.mark.async_only
async def test_a_loop_that_ends_stops_the_work_before_the_release(
    world: World, name: str, admin: psycopg.Connection[Any]
) -> None:
    """When its task is cancelled, as at the end of asyncio.run(), the worker ends its functions and releases everything."""
    served = Served(world)
    worker = await world.call(lambda: partitions(world, world.engine(), name, 2).join(served.serve))
    await eventually(lambda: served.running == {0, 1})
    for task in asyncio.all_tasks():
        if task.get_name().startswith("pgfence-"):
            task.cancel()
    await eventually(lambda: members(admin, name) == 0)
    await eventually(lambda: all(row(admin, f"{name}/{i}").released_at is not None for i in (0, 1)))
    assert served.running == set()
    assert not worker.owned


@pytest.mark.every_driver
async def test_the_server_computes_the_same_partitions(world: World, admin: psycopg.Connection[Any]) -> None:
    """The SQL function equals partition_for() for every vector and both hashes, also called through SQLAlchemy."""
    vectors = VECTORS["vectors"]
    for hash_name in ("sha256", "murmur2"):
        for count in (1, 6, 64, 1000):
            found = admin.execute(
                "SELECT pgfence_partition_for_v1(k, %s, %s) FROM unnest(%s::text[]) WITH ORDINALITY AS v(k, i) ORDER BY i",
                [count, hash_name, [vector["key"] for vector in vectors]],
            ).fetchall()
            assert [number for (number,) in found] == [
                vector["partitions"][str(count)][hash_name] for vector in vectors
            ]
    query = select(
        func.pgfence_partition_for_v1("account:42", 64), func.pgfence_partition_for_v1("account:42", 64, "murmur2")
    )
    engine = world.engine()

    def ask() -> Any:
        with engine.connect() as connection:
            return connection.execute(query).one()

    async def ask_async() -> Any:
        async with engine.connect() as connection:
            return (await connection.execute(query)).one()

    told = await world.call(world.pick(ask, ask_async))
    assert tuple(told) == (partition_for("account:42", 64), partition_for("account:42", 64, hash="murmur2"))


async def test_one_name_excludes_whatever_takes_it(world: World, name: str, admin: psycopg.Connection[Any]) -> None:
    """A lease on the name of a partition's row blocks that partition; it is the owner that owner_of() returns, without address."""
    engine = world.engine()
    held = await world.call(lease(world, engine, f"{name}/1", metadata={"address": "here"}).acquire)
    one = partitions(world, engine, name, 2)
    async with world.other().enter(one.join(Served(world).serve)) as worker:
        assert list(worker.owned) == [0]
        owner = await world.call(one.owner_of, 1)
        assert (owner.kind, owner.address) == ("lease", None)
        await world.call(held.release)
        await eventually(lambda: list(worker.owned) == [0, 1])


@every_row(
    ("what", "arguments", "error", "message"),
    [
        ("no partitions", {"count": 0}, ValueError, "count must be from 1 to 1000, not 0"),
        ("too many", {"count": 1001}, ValueError, "count must be from 1 to 1000"),
        ("a bool", {"count": True}, TypeError, "count must be an int"),
        ("an unknown hash", {"hash": "md5"}, ValueError, "hash must be one of 'sha256', 'murmur2', not 'md5'"),
        ("a row of another name", {"name": "orders/3"}, ValueError, "cannot be the name of partitions"),
        ("a permit", {"name": "orders#3"}, ValueError, "cannot be the name of partitions"),
        ("a long name", {"name": "a" * 251}, ValueError, "longer than 250 characters with its namespace, but has 251"),
        ("no text", {"name": 7}, TypeError, "must be a str"),
        ("a short ttl", {"ttl": 0.1}, ValueError, "at least 0.3 s"),
    ],
)
def test_wrong_arguments_say_what_to_do(what: str, arguments: Any, error: Any, message: str) -> None:
    """An unusable argument is rejected before a statement is sent."""
    with pytest.raises(error, match=message):
        Partitions(lambda: None, **{"name": "x", "count": 2, **arguments})  # type: ignore[arg-type, return-value]


@every_row(
    ("what", "call", "error", "message"),
    [
        ("a partition too many", lambda one: one.owner_of(2), ValueError, "partition must be from 0 to 1, not 2"),
        ("a negative one", lambda one: one.owner_of(-1), ValueError, "partition must be from 0 to 1"),
        ("a key as partition", lambda one: one.owner_of("a"), TypeError, "partition must be an int"),
        ("a number as key", lambda one: one.partition_for(7), TypeError, "key must be a str"),
        ("no partitions", lambda one: one.resize(0), ValueError, "count must be from 1 to 1000"),
        ("a coroutine function", lambda one: one.join(_serve_nothing), TypeError, "coroutine function"),
        ("an address", lambda one: one.join(print, address=7), TypeError, "address must be a str"),
        ("an owner", lambda one: one.join(print, owner=7), TypeError, "owner must be a str"),
    ],
)
def test_wrong_calls_say_what_to_do(what: str, call: Callable[[Any], Any], error: Any, message: str) -> None:
    """A call that cannot work is rejected before a statement is sent."""
    with pytest.raises(error, match=message):
        call(Partitions(lambda: None, "x", 2))  # type: ignore[arg-type, return-value]


async def _serve_nothing(partition: int, lease: object) -> None: ...
