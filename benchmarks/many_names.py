"""One lock with many names, compared with one statement that locks as many keys and one that unlocks them."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from benchmarks import picture, report, rounds
from benchmarks.place import server
from pgfence import AdvisoryLock, TransactionLock

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from benchmarks.place import Place
    from benchmarks.rounds import Make, Medians

# Each contestant has its own keys.
TAKE = "SELECT count(pg_try_advisory{0}_lock(i)) FROM generate_series(%s::bigint, %s::bigint) AS i"
FREE = "SELECT count(pg_advisory_unlock(i)) FROM generate_series(%s::bigint, %s::bigint) AS i"
RAW, AGAIN, HOLD, NEW = "raw psycopg", "raw psycopg, again", "pgfence, hold()", "pgfence, a new lock object each time"
RAW_TX, TX = "raw transaction", "pgfence, TransactionLock"
BARS = {1_000: 3.0, 10_000: 4.0}
WITH_KEYS = {1_000: 5.0}


def run(quick: bool) -> dict[str, Any]:
    """Measure locks of one name to ten thousand names."""
    sizes = (1, 10, 300) if quick else (1, 10, 100, 1_000, 10_000)
    medians: dict[int, Medians] = {}
    with server(max_locks_per_transaction="512") as place:
        for size in sizes:
            cycles = 5 if quick else max(8, min(120, 20_000 // size))
            effort = rounds.Effort(2 if quick else 8, cycles, 2 + cycles // 5)
            medians[size] = rounds.alternate(place, _field(size), effort)
    bars = []
    for size in sizes:
        wanted = (
            (f"a lock of {size:,} names", HOLD, BARS),
            (f"a lock of {size:,} names, including its keys", NEW, WITH_KEYS),
        )
        for what, name, limits in wanted:
            if size in limits or quick:
                limit = limits.get(size, 5.0)
                figure = rounds.ratio(medians[size], name, RAW)
                bars.append(report.bar(f"{what}, against the driver", f"at most {limit:g}x", figure, limit, "x"))
    bars.append(report.null_test(rounds.ratio(medians[sizes[-1]], AGAIN, RAW), f"{RAW}, {sizes[-1]:,} keys"))
    lines = {
        label: [rounds.ratio(medians[size], name, base) for size in sizes]
        for label, name, base in (
            ("hold()", HOLD, RAW),
            ("new object each time", NEW, RAW),
            ("TransactionLock", TX, RAW_TX),
        )
    }
    return {
        "scenario": "many_names",
        "title": "Many names in one lock",
        "method": (
            "One cycle acquires all names and releases them. The driver acquires and releases with one statement"
            " each, over `generate_series`. The driver is compared with an existing lock object, whose keys are"
            " computed at its first use, and with a new lock object, which hashes its names. A transaction with"
            " a `TransactionLock`, including its COMMIT, is compared with a transaction that runs the"
            " transaction-level form of the driver's statement."
        ),
        "bars": bars,
        "tables": [_table(medians)],
        "skipped": {},
        "pictures": [
            picture.curves("benchmark-many-names", "names of one lock", sizes, {"ratio to the driver": lines})
        ],
    }


def _table(medians: dict[int, Medians]) -> dict[str, Any]:
    compared = ((HOLD, RAW), (NEW, RAW), (TX, RAW_TX))
    rows = [
        (
            f"{size:,}",
            *(f"{rounds.ratio(found, name, base):.2f}x" for name, base in compared),
            f"{1e3 * statistics.median(found[RAW]):.2f} ms",
        )
        for size, found in medians.items()
    ]
    return report.table("Against the driver", ("Names", *(name for name, _ in compared), "Raw"), rows) | {
        "seconds": {str(size): found for size, found in medians.items()}
    }


def _field(size: int) -> dict[str, Make]:
    return {
        RAW: _raw(size, 1),
        AGAIN: _raw(size, 2),
        HOLD: _ours(size, new=False),
        NEW: _ours(size, new=True),
        RAW_TX: _raw_transaction(size),
        TX: _our_transaction(size),
    }


def _raw(size: int, number: int) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        connection = stack.enter_context(place.connect())
        start = number * 1_000_000_000

        def cycle() -> None:
            for text in (TAKE.format(""), FREE):
                connection.execute(text, (start, start + size - 1)).fetchone()

        return cycle

    return make


def _ours(size: int, *, new: bool) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        names = [f"{'new' if new else 'kept'}:{number}" for number in range(size)]
        kept = AdvisoryLock(engine, *names)

        def cycle() -> None:
            with (AdvisoryLock(engine, *names) if new else kept).hold():
                pass

        return cycle

    return make


def _raw_transaction(size: int) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)

        def cycle() -> None:
            with engine.begin() as connection:
                connection.exec_driver_sql(TAKE.format("_xact"), (3_000_000_000, 3_000_000_000 + size - 1)).scalar()

        return cycle

    return make


def _our_transaction(size: int) -> Make:
    def make(place: Place, stack: ExitStack) -> Callable[[], object]:
        engine = sa.create_engine(place.url())
        stack.callback(engine.dispose)
        names = [f"transaction:{number}" for number in range(size)]

        def cycle() -> None:
            with engine.begin() as connection:
                TransactionLock(connection, *names).acquire()

        return cycle

    return make
