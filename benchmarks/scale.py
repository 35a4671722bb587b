"""How much of one primary's capacity a fleet of hosts uses, from measured costs: `python -m benchmarks.scale --hosts 10 1000`.

The costs are those of `docs/_static/benchmarks.json` and of `benchmarks/scale.json`, which `--measure` writes in about a minute.
Apart from that the program uses no clock and a fixed seed, so the same costs and parameters always give the same tables. `--docs`
writes the tables for the default parameters into the page.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import re
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgfence._leases import terms
from pgfence._leases.heartbeat.queue import EARLY
from pgfence._sql.lease import BATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.place import Place
    from benchmarks.rounds import Make

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operate" / "many-hosts.md"
MARKS = "<!-- written by benchmarks.scale -->\n\n", "\n\n<!-- end -->"
PUBLISHED = ROOT / "docs" / "_static" / "benchmarks.json"
MEASURED = Path(__file__).with_name("scale.json")
HOSTS = (10, 100, 1_000, 10_000)
SHARDS = (1, 4, 16)
LISTENERS = 100
WAITERS = 10


@dataclass(frozen=True)
class Load:
    """What one host does. It runs one process with one engine."""

    leases: int = 10
    ttl: float = 30.0
    pool: int = 5
    session_locks: int = 1
    lock_waiters: float = 0.1
    lease_waiters: int = 1
    grants: float = 0.1
    keys: float = 1.0
    fenced: float = 1.0


@dataclass(frozen=True)
class Primary:
    """The server: PostgreSQL's default settings, and the cores of the machine of the benchmarks."""

    max_connections: int = 100
    max_locks_per_transaction: int = 64
    max_prepared_transactions: int = 0
    cores: int = 2

    @property
    def lock_table(self) -> int:
        """The minimum number of entries that the lock table has room for."""
        return self.max_locks_per_transaction * (self.max_connections + self.max_prepared_transactions)


class Costs:
    """The measured costs, in seconds of server processor time unless the name says otherwise."""

    def __init__(self) -> None:
        own = json.loads(MEASURED.read_text(encoding="utf-8"))["costs"]
        results = {found["scenario"]: found for found in json.loads(PUBLISHED.read_text(encoding="utf-8"))["results"]}
        self.statement: float = (own["renewal of 1"] * BATCH - own[f"renewal of {BATCH}"]) / (BATCH - 1)
        self.renewal: float = own["renewal of 1"] - self.statement
        self.waiter = _find_bar(results["waiters"], r"(\d+) waiters: .*scheduler's count")
        rates = {row[0]: float(row[1].replace(",", "")[:-2]) for row in results["fence_growth"]["tables"][0]["rows"]}
        self.serial_commits, self.commits = rates["1"], max(rates.values())
        self.poll: float = own["unsuccessful request for a lease"]
        self.grant: float = own["lease, acquired and released"]
        self.wake_up: float = (own["the same with listeners"] - self.grant) / LISTENERS
        self.key: float = own["transaction with a key"]
        self.fenced: float = own["fenced transaction"]
        self.entries: float = own["lock table entries of a waiter"]


def _find_bar(result: dict[str, Any], pattern: str) -> float:
    """Return the processor time of one waiter, in seconds per second."""
    for bar in result["bars"]:
        if found := re.match(pattern, bar["what"]):
            return float(bar["value"]) / 100 / int(found[1])
    raise LookupError(f"{PUBLISHED} has no figure {pattern!r}")


def count_statements(load: Load, intervals: int = 50) -> float:
    """Simulate the heartbeat of one host and return the statements per second that renew its leases.

    The leases begin at random moments. A statement also renews those that will be due soon, so they gather in few statements.
    """
    random_times = random.Random(1)
    interval = terms.compute_interval(load.ttl)
    due = [random_times.uniform(0, interval) for _ in range(load.leases)]
    sent = counted = 0
    while due and (now := min(due)) < 2 * intervals * interval:
        together = [number for number, when in enumerate(due) if when <= now + EARLY * interval][:BATCH]
        for number in together:
            due[number] = now + interval
        sent += 1
        counted += now >= intervals * interval
    return counted / (intervals * interval)


@dataclass(frozen=True)
class Need:
    """What all hosts together need from one primary."""

    connections: float
    entries: float
    renewals: float
    commits: float
    notifying: float
    wake_ups: float
    processor: dict[str, float]

    @property
    def cores(self) -> float:
        """The processor time, in cores."""
        return sum(self.processor.values())


def compute_need(hosts: float, load: Load, costs: Costs, shards: int = 1) -> Need:
    """Return what one of `shards` primaries carries if names are spread evenly over them."""
    # A host keeps a heartbeat in each database that has at least one of its leases.
    present = hosts * (1 - (1 - 1 / shards) ** load.leases)
    renewals = hosts * load.leases / terms.compute_interval(load.ttl) / shards
    per_host = replace(load, leases=round(hosts * load.leases / shards / present) if present else 0)
    statements = present * count_statements(per_host)
    # A release sends one notification, which wakes each connection of the database that listens to any channel.
    notifying = hosts * load.grants / shards
    keys, fenced = hosts * load.keys / shards, hosts * load.fenced / shards
    wake_ups = notifying * present
    waiting = hosts * load.lock_waiters / shards
    return Need(
        # Every host has a pool for each database. Leases need one connection for renewals and one for calls.
        connections=hosts * load.pool + 2 * present + hosts * load.session_locks / shards + waiting,
        entries=hosts * load.session_locks / shards + waiting * costs.entries,
        renewals=renewals,
        commits=statements + 2 * notifying + keys + fenced,
        notifying=notifying,
        wake_ups=wake_ups,
        processor={
            "renewals": statements * costs.statement + renewals * costs.renewal,
            "lease waiters": hosts * load.lease_waiters / shards * costs.poll,
            "lock waiters": waiting * costs.waiter,
            "grants": notifying * costs.grant,
            "wake-ups": wake_ups * costs.wake_up,
            "keys": keys * costs.key,
            "fenced transactions": fenced * costs.fenced,
        },
    )


def find_shares(need: Need, primary: Primary, costs: Costs) -> dict[str, float]:
    """Return the used share of each limit."""
    return {
        "connections": need.connections / primary.max_connections,
        "lock table": need.entries / primary.lock_table,
        "processor": need.cores / primary.cores,
        "commits": need.commits / costs.commits,
        "notifying commits": need.notifying / costs.serial_commits,
    }


def find_hosts(what: str, load: Load, primary: Primary, costs: Costs) -> int:
    """Return the largest number of hosts that stays within a limit."""
    low, high = 0, 10_000_000
    while high - low > 1:
        middle = (low + high) // 2
        fits = find_shares(compute_need(middle, load, costs), primary, costs)[what] <= 1
        low, high = (middle, high) if fits else (low, middle)
    return low


def render(hosts: Sequence[int], load: Load, primary: Primary, costs: Costs) -> str:
    """Return the tables in Markdown: the load, its processor time, the limits, and the same over several databases."""
    needs = {count: compute_need(count, load, costs) for count in hosts}
    first = {count: find_shares(need, primary, costs) for count, need in needs.items()}
    parts = list(next(iter(needs.values())).processor)
    limits = list(next(iter(first.values())))
    columns = [
        "Hosts",
        "connections",
        "lock table entries",
        "renewals/s",
        "commits/s",
        "wake-ups/s",
        "cores",
        "beyond limits",
    ]
    tables = [
        _table(
            columns,
            [
                [
                    f"{count:,}",
                    f"{need.connections:,.0f}",
                    f"{need.entries:,.0f}",
                    f"{need.renewals:,.0f}",
                    f"{need.commits:,.0f}",
                    f"{need.wake_ups:,.0f}",
                    f"{need.cores:.2f}",
                    ", ".join(what for what, share in first[count].items() if share > 1) or "none",
                ]
                for count, need in needs.items()
            ],
        ),
        _table(
            ["Hosts", *(f"cores for {part}" for part in parts)],
            [[f"{count:,}", *(f"{need.processor[part]:.3f}" for part in parts)] for count, need in needs.items()],
        ),
        _table(
            ["Limit", "Hosts that stay within it"],
            [[what, f"{find_hosts(what, load, primary, costs):,}"] for what in limits],
        ),
        _table(
            ["Primaries", "Spread", "Hosts", "connections to each", "cores of each", "wake-ups/s on each"],
            [
                [str(shards), how, f"{max(hosts):,}", f"{n.connections:,.0f}", f"{n.cores:.2f}", f"{n.wake_ups:,.0f}"]
                for shards in SHARDS
                for how, n in {
                    "by name": compute_need(max(hosts), load, costs, shards),
                    "by group of hosts": compute_need(max(hosts) / shards, load, costs),
                }.items()
            ],
        ),
    ]
    return "\n".join(tables).rstrip("\n")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def measure() -> None:
    """Measure the costs that the published results lack, and write them with their conditions."""
    from benchmarks.place import machine, server

    described = machine()
    with server(durable=True) as place, ExitStack() as stack:
        costs = _measure_costs(place, stack)
    written = {
        "measured": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": described,
        "conditions": (
            f"server processor time by the scheduler's count, fsync on, psycopg over TCP; {LISTENERS} listeners listen on"
            " another channel of the same database; a waiter is counted two seconds after it began"
        ),
        "costs": costs,
    }
    MEASURED.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _measure_costs(place: Place, stack: ExitStack) -> dict[str, float]:
    import sqlalchemy as sa

    from benchmarks import fences, idempotency, leases
    from pgfence import schema

    engine = sa.create_engine(place.url())
    stack.callback(engine.dispose)
    schema.create_all(engine)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE effect (n int)")
        connection.exec_driver_sql("CREATE TABLE guarded (id int PRIMARY KEY, n int NOT NULL)")
        connection.exec_driver_sql("INSERT INTO guarded VALUES (0, 0)")
    schema.add_fence(engine, "guarded", resource="close")
    found = {f"renewal of {count}": _spend(place, renew(count), 2000 if count == 1 else 100) for count in (1, BATCH)}
    found["unsuccessful request for a lease"] = _spend(place, request_held_lease, 2000)
    found["transaction with a key"] = _spend(place, idempotency.keyed, 2000)
    found["fenced transaction"] = _spend(place, fences.fenced(1), 2000)
    found["lease, acquired and released"] = _spend(place, leases.ours, 1000)
    for _ in range(LISTENERS):
        stack.enter_context(place.connect()).execute("LISTEN pgfence_evicted")
    found["the same with listeners"] = _spend(place, leases.ours, 500)
    found["lock table entries of a waiter"] = _count_entries(place)
    return found


def _spend(place: Place, make: Make, cycles: int) -> float:
    """Return the processor time of the server for one cycle, in seconds."""
    with ExitStack() as stack:
        cycle = make(place, stack)
        for _ in range(cycles // 10):
            cycle()
        before = place.cpu_seconds()
        for _ in range(cycles):
            cycle()
        return (place.cpu_seconds().exact - before.exact) / cycles


def renew(count: int) -> Make:
    """Renew leases with the statement of the heartbeat."""

    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        from uuid import uuid4

        from benchmarks.leases import ACQUIRE

        connection = stack.enter_context(place.connect())
        names, ids = [f"renewed {count}: {number}" for number in range(count)], [str(uuid4()) for _ in range(count)]
        tokens = []
        for name, lease in zip(names, ids, strict=True):
            asked = (name, lease, 3600.0, 0.0, 0.0, None, "scale", "here", 1, "", None)
            tokens.append((connection.execute(ACQUIRE, asked, prepare=True).fetchone() or (0, 0))[1])
        text = "SELECT pgfence_renew_leases_v1(%s::text[], %s::text[], %s::bigint[], %s::float8[])"
        return lambda: connection.execute(text, (names, ids, tokens, [3600.0] * count), prepare=True).fetchone()

    return make


def request_held_lease(place: Place, stack: ExitStack) -> Callable[[], object]:
    """Request a lease that is held, as a waiter does once a second."""
    from uuid import uuid4

    from benchmarks.leases import ACQUIRE

    connection = stack.enter_context(place.connect())

    def cycle() -> object:
        asked = ("held", str(uuid4()), 3600.0, 0.0, 0.0, None, "scale", "here", 1, "", None)
        return connection.execute(ACQUIRE, asked, prepare=True).fetchone()

    cycle()
    return cycle


def _count_entries(place: Place) -> float:
    """Return the entries in the lock table of one waiter for a session lock."""
    import sqlalchemy as sa

    from pgfence import AdvisoryLock

    def wait(number: int) -> None:
        engine = sa.create_engine(place.url())
        with AdvisoryLock(engine, f"held {number}").hold(timeout=30):
            pass
        engine.dispose()

    engine = sa.create_engine(place.url())
    waiters = [threading.Thread(target=wait, args=(number,)) for number in range(WAITERS)]
    with AdvisoryLock(engine, *(f"held {number}" for number in range(WAITERS))).hold(), place.connect() as look:
        for waiter in waiters:
            waiter.start()
        time.sleep(2)
        (count,) = look.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() or (0,)
    for waiter in waiters:
        waiter.join(30)
    engine.dispose()
    return (count - WAITERS) / WAITERS


def main() -> None:
    """Print the tables, or measure the costs first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--measure", action="store_true", help="measure the costs and write benchmarks/scale.json")
    parser.add_argument("--docs", action="store_true", help="write the tables into the page")
    parser.add_argument("--hosts", type=int, nargs="+", default=HOSTS, metavar="N")
    for field in (*fields(Load), *fields(Primary)):
        option = f"--{field.name.replace('_', '-')}"
        kind = float if isinstance(field.default, float) else int
        parser.add_argument(option, type=kind, default=field.default, metavar="N", help="default: %(default)s")
    given = parser.parse_args()
    if given.measure:
        measure()
    load = Load(**{field.name: getattr(given, field.name) for field in fields(Load)})
    primary = Primary(**{field.name: getattr(given, field.name) for field in fields(Primary)})
    if given.docs:
        _write_page(render(HOSTS, Load(), Primary(), Costs()))
    else:
        print(render(given.hosts, load, primary, Costs()))


def _write_page(tables: str) -> None:
    """Replace each table of the page with the table of the same place in the output."""
    parts = PAGE.read_text(encoding="utf-8").split(MARKS[0])
    for number, table in enumerate(tables.split("\n\n"), start=1):
        parts[number] = table + parts[number][parts[number].index(MARKS[1]) :]
    PAGE.write_text(MARKS[0].join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
