"""A server a millisecond away: the round trips of each primitive, and how they determine its duration."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from contextlib import AsyncExitStack, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from benchmarks import floor, peers, picture, report, rounds, wire
from benchmarks.place import plain, server
from pgfence import AsyncTransactionLock, Lease, TransactionLock, schema
from pgfence.effects import IdempotentEffect
from pgfence.idempotency import idempotent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.place import Place
    from benchmarks.rounds import AsyncMake, Make, Medians

    Body = Callable[[sa.Engine], Callable[[], object]]

UPDATE, GUARDED = (f"UPDATE {table} SET n = n + 1 WHERE id = 1" for table in ("bare", "guarded"))
INSERT = "INSERT INTO effect (n) VALUES (%s)"
NUMBERS = itertools.count()

RAW, HOLD = "raw psycopg: lock and unlock", "pgfence, AdvisoryLock.hold()"
BARE, BARE_INSERT = "a transaction of one UPDATE", "a Session's transaction of one INSERT"
LOCKED, FENCED = "pgfence, TransactionLock and one UPDATE", "pgfence, a fenced transaction of one UPDATE"
KEYED = "pgfence, an idempotent transaction of one INSERT"
BASES = {HOLD: RAW, LOCKED: BARE, FENCED: BARE, KEYED: BARE_INSERT}
RATIOS = {LOCKED: 1.10, FENCED: 1.12, KEYED: 1.30, HOLD: 1.1}
TRIPS = {HOLD: 2, LOCKED: 3, FENCED: 3, KEYED: 3}
ASYNC = {"psycopg": "psycopg async", "asyncpg": "asyncpg"}
PEERS = tuple(name for name in peers.PEERS if "timeout" not in name and "psycopg2" not in name)


class Distant:
    """A server behind a proxy."""

    def __init__(self, place: Place, url: sa.URL) -> None:
        self._place = place
        self._port = url.port

    def url(self, driver: str = "psycopg") -> sa.URL:
        return self._place.url(driver).set(host="127.0.0.1", port=self._port)

    @property
    def dsn(self) -> str:
        return plain(self.url())

    def connect(self, **kwargs: Any) -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn, autocommit=True, **kwargs)


def run(quick: bool) -> dict[str, Any]:
    """Count the round trips of each primitive, then measure everything through a proxy with a delay."""
    effort = rounds.Effort(2, 4, 7) if quick else rounds.Effort(8, 25, 8)
    with server() as place:
        _prepare(place)
        with wire.counted(place.url()) as (url, counter):
            trips = _count(Distant(place, url), counter)
        with wire.counted(place.url(), wire.MILLISECOND) as (url, _):
            distant: Any = Distant(place, url)
            trip = _round_trip(distant)
            medians = rounds.alternate(distant, FIELD, effort)
            apart = {
                name: rounds.alternate_async(distant, _async_field(driver), effort) for driver, name in ASYNC.items()
            }
            found, skipped = peers.available(PEERS)
            with _distant_redis():
                crowd = rounds.alternate(distant, _everybody(found), effort)
    bars = [
        report.bar(f"round trips: {name.removeprefix('pgfence, ')}", str(limit), trips[name][1], limit, digits=0)
        for name, limit in TRIPS.items()
    ]
    bars += [
        _bar(f"{name.removeprefix('pgfence, ')}, against {BASES[name]}", medians, name, BASES[name], limit)
        for name, limit in RATIOS.items()
    ]
    for name, both in apart.items():
        bars.append(_bar(f"AsyncAdvisoryLock.hold(), {name}, against the raw driver", both, HOLD, f"raw {name}", 1.1))
    bars.append(report.null_test(rounds.ratio(medians, f"{RAW}, again", RAW), "at 1 ms, raw psycopg"))
    ratios = {name: rounds.ratio(crowd, name, RAW) for name in crowd}
    return {
        "scenario": "network",
        "title": "A network with a delay of 1 ms",
        "method": (
            "A proxy in a separate process delays all traffic, so that a `SELECT 1` with psycopg takes"
            f" {1e3 * trip:.2f} ms. A round trip begins when the client sends data after it has received a response."
            " *First* is the first use of a new engine, which opens connections and inspects the server, and *later*"
            " is a use after that. Ratios compare an operation with the same operation without pgfence."
        ),
        "bars": bars,
        "tables": [_table(trips, medians), _async_table(apart), _ranking(crowd, ratios)],
        "skipped": skipped,
        "pictures": [
            picture.bars("benchmark-network", "Acquire and release at 1 ms, compared with plain psycopg", ratios),
        ],
    }


def _bar(what: str, medians: Medians, name: str, base: str, limit: float) -> dict[str, Any]:
    return report.bar(f"at 1 ms: {what}", f"at most {limit:.2f}x", rounds.ratio(medians, name, base), limit, "x")


def _table(trips: dict[str, tuple[int, int]], medians: Medians) -> dict[str, Any]:
    rows = []
    for name, (first, settled) in trips.items():
        base = BASES.get(name)
        ratio = "" if base is None else f"{rounds.ratio(medians, name, base):.2f}x"
        rows.append((name, first, settled, f"{1e3 * statistics.median(medians[name]):.1f} ms", ratio))
    columns = ("What", "Round trips, first", "Round trips, later", "At 1 ms", "Ratio")
    return report.table("Round trips, and the time they take", columns, rows) | {"seconds": medians}


def _async_table(apart: dict[str, Medians]) -> dict[str, Any]:
    rows = [
        (driver, name, f"{rounds.ratio(medians, name, base):.2f}x", rounds.spread(medians, name, base))
        for driver, medians in apart.items()
        for name, base in ((HOLD, f"raw {driver}"), (LOCKED, BARE))
    ]
    columns = ("Driver", "What", "Ratio to the same operation without pgfence", "Middle half of the sets")
    return report.table("Async, at 1 ms", columns, rows)


def _ranking(crowd: Medians, ratios: dict[str, float]) -> dict[str, Any]:
    rows = [
        (name, f"{ratio:.2f}x", rounds.spread(crowd, name, RAW)) for name, ratio in sorted(ratios.items(), key=_second)
    ]
    return report.table("Acquire and release at 1 ms", ("Contestant", "Ratio to raw", "Middle half of the sets"), rows)


def _second(each: tuple[str, float]) -> float:
    return each[1]


def _prepare(place: Place) -> None:
    engine = sa.create_engine(place.url(), poolclass=sa.NullPool)
    schema.create_all(engine)
    with engine.begin() as connection:
        for table in ("bare", "guarded"):
            connection.exec_driver_sql(f"CREATE TABLE {table} (id int PRIMARY KEY, n int NOT NULL)")
            connection.exec_driver_sql(f"INSERT INTO {table} VALUES (1, 0)")
        connection.exec_driver_sql("CREATE TABLE effect (n bigint)")
    schema.add_fence(engine, "guarded", resource="close")


def _count(place: Any, counter: wire.Counter) -> dict[str, tuple[int, int]]:
    """Return the round trips of the first cycle on a new engine, and of a warm one."""
    found = {}
    for name, make in FIELD.items():
        with ExitStack() as stack:
            before = counter.trips
            cycle = make(place, stack)
            cycle()
            first = counter.trips - before
            for _ in range(12):  # psycopg prepares a statement on its sixth execution
                cycle()
            before = counter.trips
            for _ in range(10):
                cycle()
            found[name] = first, round((counter.trips - before) / 10)
    return found


def _round_trip(place: Any) -> float:
    took = []
    with place.connect() as connection:
        for _ in range(50):
            start = time.perf_counter()
            connection.execute("SELECT 1").fetchone()
            took.append(time.perf_counter() - start)
    return statistics.median(took)


@contextmanager
def _distant_redis() -> Iterator[None]:
    """Let Redis clients connect through a proxy, if Redis is available."""
    port = os.environ.get(peers.REDIS)
    if port is None:
        yield
        return
    with wire.counted(sa.URL.create("redis", host="127.0.0.1", port=int(port)), wire.MILLISECOND) as (url, _):
        os.environ[peers.REDIS] = str(url.port)
        try:
            yield
        finally:
            os.environ[peers.REDIS] = port


# ---------------------------------------------------------------- contestants


def _on_engine(body: Body) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        return body(engine)

    return make


def _bare(engine: sa.Engine) -> Callable[[], object]:
    def cycle() -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(UPDATE)

    return cycle


def _locked(engine: sa.Engine) -> Callable[[], object]:
    def cycle() -> None:
        with engine.begin() as connection:
            TransactionLock(connection, "locked").acquire()
            connection.exec_driver_sql(UPDATE)

    return cycle


def _inserted(engine: sa.Engine) -> Callable[[], object]:
    def cycle() -> None:
        with Session(engine) as session, session.begin():
            session.connection().exec_driver_sql(INSERT, (next(NUMBERS),))

    return cycle


def _keyed(engine: sa.Engine) -> Callable[[], object]:
    def cycle() -> None:
        with Session(engine) as session, session.begin():
            number = next(NUMBERS)

            def work() -> int:
                session.connection().exec_driver_sql(INSERT, (number,))
                return number

            idempotent(session, f"{number}", scope="network", payload={"n": number}, result=int).run(work)

    return cycle


def _replayed(engine: sa.Engine) -> Callable[[], object]:
    def cycle() -> None:
        with Session(engine) as session, session.begin():
            idempotent(session, "old", scope="network", payload={"n": 1}, result=int).run(lambda: 1)

    return cycle


def _effect(engine: sa.Engine) -> Callable[[], object]:
    def cycle() -> None:
        number = next(NUMBERS)
        IdempotentEffect(engine, f"{number}", scope="network effect", payload={"n": number}, result=int).run(
            lambda _: number
        )

    return cycle


def _leased(engine: sa.Engine) -> Callable[[], object]:
    lease = Lease(engine, "leased", ttl=60)

    def cycle() -> None:
        with lease.hold():
            pass

    return cycle


def _fenced(place: Place, stack: ExitStack) -> Callable[[], object]:
    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)
    held = stack.enter_context(Lease(engine, "close", ttl=60).hold())

    def cycle() -> None:
        with held.begin(engine) as connection:
            connection.exec_driver_sql(GUARDED)

    return cycle


FIELD: dict[str, Make] = {
    RAW: floor.raw_psycopg("raw"),
    f"{RAW}, again": floor.raw_psycopg("again"),
    HOLD: floor.ours("hold", "hold"),
    "pgfence, Lease.hold()": _on_engine(_leased),
    BARE: _on_engine(_bare),
    LOCKED: _on_engine(_locked),
    FENCED: _fenced,
    BARE_INSERT: _on_engine(_inserted),
    KEYED: _on_engine(_keyed),
    "pgfence, a replay of this transaction": _on_engine(_replayed),
    "pgfence, an effect that does nothing": _on_engine(_effect),
}


def _everybody(found: dict[str, type[peers.Client]]) -> dict[str, Make]:
    field = {
        RAW: FIELD[RAW],
        HOLD: FIELD[HOLD],
        "SQLAlchemy Core, one connection": floor.core("core"),
        "SQLAlchemy Core, from the pool": floor.core("pool", checkout=True),
    }
    return field | {name: _peer(kind) for name, kind in found.items()}


def _peer(kind: type[peers.Client]) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        client = kind(place, "network")
        stack.callback(client.close)
        return client.cycle

    return make


def _async_field(driver: str) -> dict[str, AsyncMake]:
    raw = floor.raw_asyncpg if driver == "asyncpg" else floor.raw_psycopg_async
    return {
        f"raw {ASYNC[driver]}": raw("raw"),
        HOLD: floor.ours_async("hold", driver),
        BARE: _on_async_engine(driver, lock=False),
        LOCKED: _on_async_engine(driver, lock=True),
    }


def _on_async_engine(driver: str, *, lock: bool) -> AsyncMake:
    async def make(place: Place, stack: AsyncExitStack) -> Any:
        engine = create_async_engine(place.url(driver))
        stack.push_async_callback(engine.dispose)

        async def cycle() -> None:
            async with engine.begin() as connection:
                if lock:
                    await AsyncTransactionLock(connection, "locked").acquire()
                await connection.exec_driver_sql(UPDATE)

        return cycle

    return make
