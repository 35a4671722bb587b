"""The cost of a fence on the server when many sessions write with one token at once, measured with pgbench."""

from __future__ import annotations

import os
import random
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import sqlalchemy as sa

from benchmarks import picture, report
from benchmarks.place import server
from pgfence import Lease, fence, schema
from pgfence.embedded._binaries import find

if TYPE_CHECKING:
    from benchmarks.place import Place

WRITERS = (1, 8, 32)
BARE, AGAIN, FENCED, REPEATABLE = "bare", "bare, again", "fenced", "fenced, REPEATABLE READ"
LONGER = "with SELECT 1"
_UPDATE = "UPDATE {} SET n = n + 1 WHERE id = :client_id;\nCOMMIT;\n"
_TPS = re.compile(r"tps = ([\d.]+)")
_DONE = re.compile(r"actually processed: (\d+)")


class _Round(NamedTuple):
    """The result of one run of pgbench."""

    per_second: float
    multixacts: float
    """Multixacts per transaction."""


def run(quick: bool) -> dict[str, Any]:
    """Measure 1, 8 and 32 sessions that each write their own row, bare and fenced, on a server that syncs to disk."""
    skipped, bars, tables, pictures = {}, [], [], []
    if (pgbench := _find_pgbench()) is None:
        skipped["pgbench"] = "it is neither beside the server's programs nor on the PATH"
    else:
        found = _measure(pgbench, *((1, ("-t", "10")) if quick else (3, ("-T", "3"))))
        growth = _ratio(found[32], FENCED) / _ratio(found[1], FENCED)
        lists = max(each.multixacts for rounds in found.values() for each in rounds[FENCED])
        bars = [
            report.bar(
                "fenced, 32 writers: ratio to bare, divided by that of 1 writer", "at most 1.3x", growth, 1.3, "x"
            ),
            report.bar("fenced: multixacts per transaction", "under 0.01", lists, 0.01, digits=3),
            report.null_test(_ratio(found[32], AGAIN), f"{BARE}, 32 writers"),
        ]
        tables = [_table(found)]
        lines = {name: [_ratio(found[writers], name) for writers in WRITERS] for name in (LONGER, FENCED, REPEATABLE)}
        pictures = [
            picture.curves("benchmark-fence-growth", "writers with one token", WRITERS, {"ratio to bare": lines})
        ]
    return {
        "scenario": "fence_growth",
        "title": "Many writers with one token",
        "method": (
            "pgbench runs a transaction that updates one row, in as many sessions as there are writers, each with a"
            " separate row. The transaction is bare, begins with `SELECT 1`, or begins with `pgfence_enter_gate_v1` and"
            " updates a table with the statement trigger. The server syncs each commit to disk. The contestants take turns of"
            " three seconds in random order; a ratio is the median of the quotients within the same turn. Multixacts"
            " are counted between two checkpoints."
        ),
        "bars": bars,
        "tables": tables,
        "skipped": skipped,
        "pictures": pictures,
    }


def _find_pgbench() -> str | None:
    return shutil.which("pgbench", path=find()) or shutil.which("pgbench")


def _measure(pgbench: str, rounds: int, length: tuple[str, str]) -> dict[int, dict[str, list[_Round]]]:
    found: dict[int, dict[str, list[_Round]]] = {}
    with server(durable=True) as place, TemporaryDirectory() as folder:
        engine = sa.create_engine(place.url())
        schema.create_all(engine)
        with engine.begin() as connection:
            for table in ("bare", "guarded"):
                connection.exec_driver_sql(f"CREATE TABLE {table} (id int PRIMARY KEY, n int) WITH (fillfactor = 50)")
                connection.exec_driver_sql(f"INSERT INTO {table} SELECT i, 0 FROM generate_series(0, 99) AS i")
        schema.add_fence(engine, "guarded", resource="close")
        with Lease(engine, "close", ttl=600).hold() as held:
            with engine.begin() as connection:
                fence(connection, "close", held.token)
            scripts = _write_scripts(Path(folder), held.token)
            for writers in WRITERS:
                found[writers] = {name: [] for name in scripts}
                for _ in range(rounds):
                    for name in random.sample(list(scripts), len(scripts)):
                        found[writers][name].append(_run(pgbench, place, scripts[name], writers, length))
        engine.dispose()
    return found


def _write_scripts(folder: Path, token: int) -> dict[str, Path]:
    enter = f"SELECT pgfence_enter_gate_v1('close', {token});\n"
    texts = {
        BARE: f"BEGIN;\n{_UPDATE.format('bare')}",
        AGAIN: f"BEGIN;\n{_UPDATE.format('bare')}",
        LONGER: f"BEGIN;\nSELECT 1;\n{_UPDATE.format('bare')}",
        FENCED: f"BEGIN;\n{enter}{_UPDATE.format('guarded')}",
        REPEATABLE: f"BEGIN ISOLATION LEVEL REPEATABLE READ;\n{enter}{_UPDATE.format('guarded')}",
    }
    scripts = {name: folder / f"{number}.sql" for number, name in enumerate(texts)}
    for name, script in scripts.items():
        script.write_text(texts[name])
    return scripts


def _run(pgbench: str, place: Place, script: Path, writers: int, length: tuple[str, str]) -> _Round:
    url = place.url()
    command = (pgbench, "-n", "-M", "prepared", "-c", writers, "-j", 2, *length, "-f", script)
    where = ("-h", url.host, "-p", url.port, "-U", url.username, url.database)
    before = _count_multixacts(place)
    done = subprocess.run(
        [str(word) for word in command + where],
        env=os.environ | {"PGPASSWORD": url.password or ""},
        capture_output=True,
        text=True,
        check=True,
    )
    transactions, speed = _DONE.search(done.stdout), _TPS.search(done.stdout)
    assert transactions and speed and "ERROR" not in done.stderr, done.stdout + done.stderr
    return _Round(float(speed[1]), (_count_multixacts(place) - before) / int(transactions[1]))


def _count_multixacts(place: Place) -> int:
    """Return how many multixacts the server has written."""
    with place.connect() as connection:
        connection.execute("CHECKPOINT")
        row = connection.execute("SELECT next_multixact_id::text::bigint FROM pg_control_checkpoint()").fetchone()
    assert row is not None
    return int(row[0])


def _ratio(rounds: dict[str, list[_Round]], name: str) -> float:
    """Return how many bare transactions run in the time of one transaction of a contestant."""
    return statistics.median(
        bare.per_second / each.per_second for bare, each in zip(rounds[BARE], rounds[name], strict=True)
    )


def _table(found: dict[int, dict[str, list[_Round]]]) -> dict[str, Any]:
    names = (AGAIN, LONGER, FENCED, REPEATABLE)
    rows = [
        (
            writers,
            f"{statistics.median(each.per_second for each in rounds[BARE]):,.0f}/s",
            *(f"{_ratio(rounds, name):.2f}x" for name in names),
            *(f"{statistics.median(each.multixacts for each in rounds[name]):.2f}" for name in names[2:]),
        )
        for writers, rounds in found.items()
    ]
    columns = ("Writers", BARE, *names, *(f"multixacts, {name}" for name in names[2:]))
    return report.table("Bare transactions per second, and their ratio to the other contestants", columns, rows)
