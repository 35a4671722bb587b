"""What runs side by side while a cluster fails over. Each scenario returns what it has observed, and a test judges it."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from cluster.observe import WAYS, Beliefs, Calls, Client, build_list, list_hosts, read, strike_beside
from pgfence import LockKey
from pgfence.migrations import migration_lock
from support.commandline import Cli, first_line
from support.waiting import eventually

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from sqlalchemy import Connection

    from cluster.cluster import Cluster
    from cluster.strikes import Strike, StrikeRecord

STEPS = 20
_STEPS_BEFORE = 3
"""Steps of a migration that are committed before the fault."""
PERMITS = 2
PARTITIONS = 6
COMMAND = ("sh", "-c", "trap 'echo stopped; exit 3' TERM; echo ready; read line; exit 4")
"""A command that ends with 4 after a line on its standard input, and with 3 after SIGTERM."""
_FAR = 60.0


class Failover:
    """A failover beside which scenarios run.

    Attributes:
        cluster: the cluster.
        kind: the fault.
        name: a prefix for names, different for each failover.
        folder: for the files of commands.
        begun: set immediately before the fault.
        record: what happened, once the cluster is ready again.
        results: what each scenario returned or raised.
    """

    def __init__(self, cluster: Cluster, kind: Strike, folder: Path) -> None:
        self.cluster = cluster
        self.kind = kind
        self.name = kind.name.lower()
        self.folder = folder
        self.begun = threading.Event()
        self.record: StrikeRecord
        self.results: dict[str, Any] = {}
        self._waiting = 0
        self._over = asyncio.Event()

    @property
    def outage(self) -> float:
        """The seconds from the fault to the new leader."""
        assert self.record.leader_at is not None
        return self.record.leader_at - self.record.struck_at

    async def wait(self) -> StrikeRecord:
        """Report that a scenario is ready for the fault, and return when the cluster is ready again."""
        self._waiting += 1
        await self._over.wait()
        return self.record

    async def run(self, scenarios: dict[str, Callable[[Failover], Coroutine[Any, Any, object]]]) -> Failover:
        """Run all scenarios, and strike when all of them are ready or have failed."""
        tasks = {name: asyncio.create_task(scenario(self)) for name, scenario in scenarios.items()}
        await eventually(lambda: self._waiting + sum(task.done() for task in tasks.values()) == len(tasks), _FAR)
        self.begun.set()
        try:
            self.record = await strike_beside(self.cluster, self.kind)
        finally:
            self._over.set()
            found = await asyncio.gather(*tasks.values(), return_exceptions=True)
            self.results = dict(zip(tasks, found, strict=True))
        return self

    def get(self, name: str) -> Any:
        """Return what a scenario returned, or raise what it raised."""
        if isinstance(result := self.results[name], BaseException):
            raise result
        return result


# ---------------------------------------------------------------- migrations


@dataclass
class Migrations:
    """What processes that migrate at once have done.

    Attributes:
        steps: the steps in the order of their commits.
        workers: how many processes have contributed.
        errors: what ended a migration or a wait for one.
    """

    steps: list[int]
    workers: int
    errors: list[Exception] = field(default_factory=list)


async def migrate(failover: Failover) -> Migrations:
    """Three processes start the same migration, and start it again after an error, as an orchestrator does."""
    errors: list[Exception] = []
    table = f"migrated_{failover.name}"
    await asyncio.to_thread(_execute, failover.cluster, f"CREATE TABLE {table} (id serial, step int, worker int)")
    workers = [
        asyncio.create_task(asyncio.to_thread(_migrate, failover, way, table, number, errors))
        for number, way in enumerate(("psycopg", "haproxy", "psycopg"))
    ]
    query = f"SELECT count(*) FROM {table}"
    await eventually(lambda: read(failover.cluster, query)[0][0] == _STEPS_BEFORE, _FAR)
    await failover.wait()
    await asyncio.gather(*workers)
    rows = read(failover.cluster, f"SELECT step, worker FROM {table} ORDER BY id")
    return Migrations([step for step, _ in rows], len({worker for _, worker in rows}), errors)


def _migrate(failover: Failover, way: str, table: str, number: int, errors: list[Exception]) -> None:
    cluster = failover.cluster
    engine = create_engine(cluster.url("haproxy") if way == "haproxy" else cluster.admin_url())
    end = time.monotonic() + 5 * _FAR
    while time.monotonic() < end:
        try:
            connection = engine.connect()
        except SQLAlchemyError:  # the application's own connection, before the lock
            time.sleep(0.2)
            continue
        with connection:
            try:
                with migration_lock(connection, key=LockKey.of(table), timeout=5 * _FAR):
                    _upgrade(connection, table, number, failover.begun)
            except Exception as error:
                errors.append(error)
                connection.invalidate()
                continue
        engine.dispose()
        return
    raise AssertionError("the migration was not completed")


def _upgrade(connection: Connection, table: str, number: int, begun: threading.Event) -> None:
    with connection.begin():
        done = connection.execute(text(f"SELECT coalesce(max(step), 0) FROM {table}")).scalar_one()
    insert = text(f"INSERT INTO {table} (step, worker) VALUES (:step, :worker)")
    for step in range(done + 1, STEPS + 1):
        time.sleep(0.3)  # the work of a step
        if step > _STEPS_BEFORE:
            begun.wait(_FAR)
        with connection.begin():
            connection.execute(insert, {"step": step, "worker": number})


def _execute(cluster: Cluster, statement: str) -> None:
    engine = create_engine(cluster.admin_url())
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


# ---------------------------------------------------------------- commands


@dataclass(frozen=True)
class Command:
    """How `pgfence run` and its command have ended.

    Attributes:
        code: the exit code of `pgfence run`.
        stopped: whether the command received SIGTERM.
        said: what `pgfence run` wrote to the standard error.
    """

    code: int
    stopped: bool
    said: str


async def run_commands(failover: Failover) -> dict[str, Command]:
    """Run commands under a long lease, a short lease and a session lock, and end those that are still running afterwards."""
    url = build_list(list_hosts(failover.cluster)).replace("postgresql:", "postgresql+psycopg:")
    cli = Cli(url, failover.folder)
    kinds = {"long lease": ("--lease", "--ttl", "90"), "short lease": ("--lease", "--ttl", "8"), "session lock": ()}
    found = {}
    with (
        cli.started(*kinds["long lease"], f"{failover.name} 1", "--", *COMMAND) as first,
        cli.started(*kinds["short lease"], f"{failover.name} 2", "--", *COMMAND) as second,
        cli.started(*kinds["session lock"], f"{failover.name} 3", "--", *COMMAND) as third,
    ):
        for process in (first, second, third):
            assert await asyncio.to_thread(first_line, process) == "ready"
        await failover.wait()
        for kind, process in zip(kinds, (first, second, third), strict=True):
            found[kind] = await asyncio.to_thread(_finish, process)
    return found


def _finish(process: subprocess.Popen[str]) -> Command:
    output, said = process.communicate("\n", timeout=_FAR)
    return Command(process.returncode, "stopped" in output, said)


# ---------------------------------------------------------------- hand over


async def hand_over(failover: Failover) -> dict[str, tuple[int, int]]:
    """Hand a lease over before the failover, and adopt it afterwards with another driver. Returns both tokens for each."""
    found = {}
    async with Client(failover.cluster, "psycopg") as sync, Client(failover.cluster, "asyncpg") as asynchronous:
        references = {}
        for giver in (sync, asynchronous):
            held = await giver.call(giver.build("Lease", f"{failover.name} {giver.way}", ttl=180).acquire)
            references[giver.way] = held.token, await giver.call(held.hand_over)
        await failover.wait()
        for giver, taker in ((sync, asynchronous), (asynchronous, sync)):
            token, reference = references[giver.way]
            adopted = await taker.call(taker.get("Lease").adopt, taker.database, reference)
            await taker.write(adopted.names[0], adopted.token, taker.way)
            found[giver.way] = token, adopted.token
            await taker.call(adopted.release)
    return found


# ---------------------------------------------------------------- elections, permits, partitions


@dataclass(frozen=True)
class Shares:
    """Who had what.

    Attributes:
        beliefs: what each participant relied on.
        after: whether the participants got something after the failover.
        seconds: from the new leader of the cluster to the first of that.
    """

    beliefs: Beliefs
    after: bool
    seconds: float


async def elect(failover: Failover) -> Shares:
    """Three members stand in an election; after the failover the leader resigns, and another member follows."""
    beliefs, name = Beliefs(), f"{failover.name} election"
    clients = [Client(failover.cluster, way) for way in WAYS]
    members = [await client.call(client.build("Election", name, ttl=15).stand) for client in clients]
    terms: dict[int, int] = {}

    def note(number: int) -> Callable[[], bool]:
        def leads() -> bool:
            term = members[number].term
            if term is None or not members[number].is_leader:
                return False
            terms[term.token] = number
            return True

        return leads

    for number, client in enumerate(clients):
        beliefs.watch_many(name, client.way, note(number))
    await eventually(lambda: any(member.is_leader for member in members))
    record = await failover.wait()
    await eventually(lambda: any(member.is_leader for member in members), _FAR)
    leader = next(member for member in members if member.is_leader)
    seconds = next((b.start - record.leader_at for b in beliefs.of(name) if b.start > (record.leader_at or 0)), 0.0)
    # Another thread notes the terms, so a member may be leader before its term is noted.
    await eventually(lambda: terms[max(terms)] == members.index(leader), _FAR)
    resigned = max(terms)
    await clients[members.index(leader)].call(leader.resign)
    await eventually(lambda: max(terms) > resigned, _FAR)
    after = terms[max(terms)] != members.index(leader)
    for client, member in zip(clients, members, strict=True):
        await client.call(member.resign)
    beliefs.close()
    for client in clients:
        await client.close()
    return Shares(beliefs, after, seconds)


async def share_permits(failover: Failover) -> Shares:
    """Five workers use a semaphore with two permits, each for a moment."""
    beliefs, calls, name = Beliefs(), Calls(), f"{failover.name} semaphore"
    clients = [Client(failover.cluster, way) for way in (*WAYS, *WAYS[:2])]

    def build_turn(client: Client, number: int) -> Callable[[], Coroutine[Any, Any, None]]:
        semaphore = client.build("Semaphore", name, permits=PERMITS, ttl=20)

        async def take_turn() -> None:
            held = await client.call(semaphore.acquire, timeout=10)
            belief = beliefs.watch(name, f"{client.way} {number}", held)
            try:
                await asyncio.sleep(0.3)
            finally:
                beliefs.drop(belief)
                await client.call(held.release)

        return take_turn

    for number, client in enumerate(clients):
        calls.repeat(f"{client.way} {number}", build_turn(client, number), pause=0.05)
    await eventually(lambda: len(beliefs.all) >= 2 * len(clients), _FAR)
    record = await failover.wait()
    assert record.leader_at is not None
    first = {}
    for label in calls.made:
        await eventually(lambda label=label: calls.find_first_success(label, record.calm_at) < _FAR, _FAR)
        first[label] = calls.find_first_success(label, record.leader_at)
    await calls.stop()
    beliefs.close()
    for client in clients:
        await client.close()
    return Shares(beliefs, len(first) == len(clients), min(first.values()))


async def share_partitions(failover: Failover) -> Shares:
    """Three workers own six partitions."""
    beliefs, name = Beliefs(), f"{failover.name} partitions"
    clients = [Client(failover.cluster, way) for way in WAYS]
    served: dict[int, float] = {}

    def build_serve(client: Client) -> Callable[..., Any]:
        def serve(partition: int, lease: Any) -> None:
            served[partition] = time.monotonic()
            belief = beliefs.watch(f"{name} {partition}", client.way, lease)
            lease.wait_lost()
            beliefs.drop(belief)

        async def serve_async(partition: int, lease: Any) -> None:
            served[partition] = time.monotonic()
            belief = beliefs.watch(f"{name} {partition}", client.way, lease)
            try:
                await asyncio.Event().wait()
            finally:
                beliefs.drop(belief)

        return serve_async if client.is_async else serve

    workers = [
        await client.call(client.build("Partitions", name, PARTITIONS, ttl=20).join, build_serve(client))
        for client in clients
    ]

    def count_owned() -> list[int]:
        return [len(worker.owned) for worker in workers]

    await eventually(lambda: count_owned() == [2, 2, 2], _FAR)
    record = await failover.wait()
    await eventually(lambda: sum(count_owned()) == PARTITIONS, _FAR)
    again = [at - record.leader_at for at in served.values() if record.leader_at and at > record.leader_at]
    for client, worker in zip(clients, workers, strict=True):
        await client.call(worker.leave)
    beliefs.close()
    for client in clients:
        await client.close()
    return Shares(beliefs, len(served) == PARTITIONS, max(again, default=0.0))


SCENARIOS = {
    "migrations": migrate,
    "commands": run_commands,
    "hand over": hand_over,
    "election": elect,
    "permits": share_permits,
    "partitions": share_partitions,
}
