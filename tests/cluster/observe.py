"""Observe what the clients of a cluster do during a failover: who holds what, and which calls succeed, all on one clock."""

from __future__ import annotations

import asyncio
import runpy
import threading
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text

import pgfence
from cluster import settings
from cluster.strikes import StrikeError, strike
from pgfence import fenced, schema
from support import transactions
from support.worlds import World

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from typing import Self

    from cluster.cluster import Cluster
    from cluster.node import Node
    from cluster.strikes import Strike, StrikeRecord

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "asyncpg_hosts.py"
connect_to_primary = runpy.run_path(str(PROGRAM))["connect_to_primary"]

WAYS = ("psycopg", "haproxy", "asyncpg")
"""A list of hosts with psycopg, psycopg through HAProxy, and a list of hosts with asyncpg as in the documentation."""
_EVERY = 0.005


class Client(World):
    """A driver with an engine that is connected to a cluster in one of `WAYS`. A process can have several.

    Attributes:
        way: how it connects.
        database: the engine.
    """

    def __init__(self, cluster: Cluster, way: str, first: Node | None = None, *, options: str = "&connect_timeout=2"):
        """Create an engine.

        Args:
            cluster: the cluster.
            way: one of `WAYS`.
            first: the node that is first in the list of hosts.
            options: more parameters for the list of hosts of psycopg.
        """
        super().__init__("asyncpg" if way == "asyncpg" else "psycopg", "")
        self.way = way
        hosts = list_hosts(cluster, first)
        more: dict[str, Any] = {}
        if way == "haproxy":
            dsn = f"postgresql://postgres@{cluster.addresses.haproxy}:{settings.HAPROXY}/postgres"
        elif way == "asyncpg":
            dsn = "postgresql:///postgres"
            more = {"async_creator": connect_to_primary(hosts, user="postgres", port=settings.POSTGRESQL)}
        else:
            dsn = build_list(hosts, options)
        self.database = self.engine(dsn=dsn, pool_pre_ping=True, **more)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get(self, kind: str) -> Any:
        """Return a class of pgfence for this driver: `get("Lease")` is Lease or AsyncLease."""
        return getattr(pgfence, f"{'Async' * self.is_async}{kind}")

    def build(self, kind: str, *args: Any, **kwargs: Any) -> Any:
        """Return an object of such a class on the engine."""
        return self.get(kind)(self.database, *args, **kwargs)

    async def write(self, name: str, token: int, who: str) -> None:
        """Write a row with a token, through the gate, and commit."""
        async with transactions.session(self, self.database) as session:
            async with self.enter(fenced(session, name, token)):
                await self.call(session.execute, _WRITE, {"name": name, "token": token, "who": who})
            await self.call(session.commit)


_WRITE = text("INSERT INTO written (name, token, who) VALUES (:name, :token, :who)")


def list_hosts(cluster: Cluster, first: Node | None = None) -> list[str]:
    """Return the addresses of the nodes, with one of them as the first."""
    return sorted(cluster.addresses.nodes.values(), key=lambda host: first is not None and host != first.host)


def build_list(hosts: list[str], options: str = "&connect_timeout=2") -> str:
    """Return a DSN for libpq with several hosts."""
    ports = ",".join([str(settings.POSTGRESQL)] * len(hosts))
    return (
        f"postgresql://postgres@/postgres?host={','.join(hosts)}&port={ports}&target_session_attrs=read-write{options}"
    )


def create_tables(cluster: Cluster) -> None:
    """Create the tables of pgfence, and one for what the clients write."""
    engine = create_engine(cluster.admin_url())
    schema.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE written (id bigserial PRIMARY KEY, name text, token bigint, who text)"))
    engine.dispose()


def read(cluster: Cluster, query: str, **parameters: Any) -> list[Any]:
    """Return the rows of a query on the primary."""
    engine = create_engine(cluster.admin_url())
    with engine.connect() as connection:
        rows = list(connection.execute(text(query), parameters).all())
    engine.dispose()
    return rows


def find_stale_writes(cluster: Cluster, name: str) -> list[Any]:
    """Return the rows that were written with a token after a row with a newer token.

    The writers enter the gate before they write, so ids of different tokens are in the order of the commits.
    """
    query = """
        SELECT w.id, w.token, w.who FROM written AS w
        WHERE name = :name AND token < (SELECT max(token) FROM written AS o WHERE o.name = w.name AND o.id < w.id)
    """
    return read(cluster, query, name=name)


# ---------------------------------------------------------------- who holds what


@dataclass
class Belief:
    """A time in which a holder relied on what it held.

    Attributes:
        name: what was held.
        who: the holder.
        start: when it was granted.
        end: when the holder still relied on it.
        told: when the holder was notified of the loss.
    """

    name: str
    who: str
    start: float
    end: float
    told: float | None = None


class Beliefs:
    """What holders rely on, sampled every 5 ms."""

    def __init__(self) -> None:
        self.all: list[Belief] = []
        self._watched: dict[int, tuple[Belief, Callable[[], bool]]] = {}
        self._repeated: list[tuple[str, str, Callable[[], bool]]] = []
        self._current: dict[tuple[str, str], Belief] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY):
            with self._lock:
                for belief, holds in self._watched.values():
                    # The state is read after the clock: what is held then was held at this moment, too.
                    now = time.monotonic()
                    if holds():
                        belief.end = now
                self._sample_repeated()

    def watch(self, name: str, who: str, handle: Any) -> Belief:
        """Sample a handle from now on."""
        now = time.monotonic()
        belief = Belief(name, who, now, now)
        with self._lock:
            self.all.append(belief)
            self._watched[id(belief)] = belief, lambda: handle.state in {"held", "unknown"}
        handle.on_lost(lambda: setattr(belief, "told", time.monotonic()))
        return belief

    def watch_many(self, name: str, who: str, holds: Callable[[], bool]) -> None:
        """Sample a function from now on, and note each time in which it returns True as a separate belief."""
        with self._lock:
            self._repeated.append((name, who, holds))

    def _sample_repeated(self) -> None:
        for name, who, holds in self._repeated:
            now = time.monotonic()
            current = self._current.get((name, who))
            if not holds():
                self._current.pop((name, who), None)
            elif current is None:
                self._current[name, who] = belief = Belief(name, who, now, now)
                self.all.append(belief)
            else:
                current.end = now

    def drop(self, belief: Belief) -> None:
        """Stop sampling, before a release or after a loss."""
        with self._lock:
            self._watched.pop(id(belief), None)

    def close(self) -> None:
        """Stop sampling everything."""
        self._stopped.set()
        self._thread.join()

    def of(self, name: str) -> list[Belief]:
        """Return the beliefs in a name."""
        return [belief for belief in self.all if belief.name == name]

    def find_overlaps(self, name: str) -> list[float]:
        """Return the seconds for which each two holders relied on the same name."""
        found = []
        for one, other in _pairs(self.of(name)):
            overlap = min(one.end, other.end) - max(one.start, other.start)
            if overlap > 0:
                found.append(overlap)
        return found

    def count_most(self, name: str) -> int:
        """Return how many holders relied on a name at once, at most."""
        return max(
            (sum(o.start <= each.start < o.end or o is each for o in self.of(name)) for each in self.of(name)),
            default=0,
        )


def _pairs(beliefs: list[Belief]) -> Iterator[tuple[Belief, Belief]]:
    for number, one in enumerate(beliefs):
        for other in beliefs[number + 1 :]:
            yield one, other


# ---------------------------------------------------------------- which calls succeed


@dataclass(frozen=True)
class Call:
    """A call that has ended.

    Attributes:
        start: when it began.
        end: when it ended.
        error: what it raised.
    """

    start: float
    end: float
    error: Exception | None = None


class Calls:
    """Calls that are repeated, by label."""

    def __init__(self) -> None:
        self.made: dict[str, list[Call]] = defaultdict(list)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    def repeat(self, label: str, call: Callable[[], Coroutine[Any, Any, object]], pause: float = 0.2) -> None:
        """Repeat a call in a separate task until `stop`."""
        self._tasks.append(asyncio.create_task(self._repeat(label, call, pause)))

    async def _repeat(self, label: str, call: Callable[[], Coroutine[Any, Any, object]], pause: float) -> None:
        while not self._stopping:
            start, error = time.monotonic(), None
            try:
                await call()
            except Exception as raised:
                error = raised
            self.made[label].append(Call(start, time.monotonic(), error))
            await asyncio.sleep(pause)

    async def stop(self) -> None:
        """End after the current calls."""
        self._stopping = True
        await asyncio.gather(*self._tasks)

    def find_first_success(self, label: str, moment: float) -> float:
        """Return the seconds from a moment to the end of the first successful call after it; infinity if there is none."""
        return min(
            (c.end - moment for c in self.made[label] if c.error is None and c.end > moment), default=float("inf")
        )

    def find_longest(self, label: str) -> float:
        """Return the seconds of the longest call."""
        return max(c.end - c.start for c in self.made[label])

    def list_errors(self, label: str) -> dict[str, int]:
        """Return how often each class of error was raised."""
        found: dict[str, int] = defaultdict(int)
        for call in self.made[label]:
            if call.error is not None:
                found[type(call.error).__name__] += 1
        return dict(found)


async def strike_beside(cluster: Cluster, kind: Strike, **kwargs: Any) -> StrikeRecord:
    """Strike while the tasks of this loop go on."""
    return await asyncio.to_thread(strike, cluster, kind, **kwargs)


async def wait_for_leader(cluster: Cluster, old: Node, limit: float = 90) -> Node:
    """Wait until another node is the primary."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if (new := await asyncio.to_thread(cluster.find_leader, [old.name])) is not None:
            return new
        await asyncio.sleep(0.05)
    raise StrikeError(f"no node took over from {old.name} within {limit:g} s")
