"""Run by `nox -s prometheus`: a real Prometheus scrapes a process with locks, and answers every query of dashboard and alerts.

Needs `prometheus` and `promtool` on the PATH.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import prometheus_client
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from pgfence import AdvisoryLock, Lease, embedded, idempotent, monitoring, run_transaction, schema, telemetry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

HERE = Path(__file__).parent
PAGES = HERE.parents[1] / "docs" / "operate"
RULES, DASHBOARD = PAGES / "pgfence-alerts.yml", PAGES / "pgfence-dashboard.json"
MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
EMPTY = ("failures", "rejections", "conflicts", "reclaims", "losses")
"""Parts of the names of metrics that have no values here, because nothing goes wrong."""


def list_queries() -> list[str]:
    """Return the queries of the dashboard's panels, with its variables replaced."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    replaced = {"$__rate_interval": "20s", "$__range": "1m", "$job": ".*", "$database": ".*"}
    return [re.sub("|".join(map(re.escape, replaced)), lambda match: replaced[match[0]], each) for each in found]


def use_locks(engine: Engine, stop: threading.Event) -> None:
    """Hold, contend, renew and evict until stopped."""
    logging.getLogger("pgfence").setLevel(logging.ERROR)  # losses are intended
    sessions, number = sessionmaker(engine), 0
    lock = AdvisoryLock(engine, "account:1")
    while not stop.wait(0.05):
        number += 1
        with lock.hold():
            waiter = threading.Thread(target=lambda: lock.acquire(timeout=5).release())
            waiter.start()
            threading.Thread(target=lock.try_acquire).start()
            time.sleep(0.02)
        waiter.join()
        lease = Lease(engine, f"close:{number}", ttl=5).acquire()
        lease.renew()
        if number % 5 == 0:
            monitoring.evict(engine, f"close:{number}", reason="test")
            lease.abandon() if lease.lost else lease.release()
        else:
            lease.release()
        for _ in range(2):
            run_transaction(sessions, partial(pay, str(number)))


def pay(key: str, work: Session) -> object:
    return idempotent(work, key, scope="payments").run(lambda: "paid")


@contextlib.contextmanager
def run_prometheus(target: int, folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes a port every second, and yield its address."""
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{RULES}]\n"
        f"scrape_configs: [{{job_name: app, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}]\n"
    )
    subprocess.run(["promtool", "check", "config", config], check=True, stdout=subprocess.DEVNULL)
    port = find_free_port()
    command = [
        *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def find_free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def ask(address: str, path: str, **parameters: str) -> Any:
    """Return the data of a response of Prometheus, which must be a success."""
    with urllib.request.urlopen(f"{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    return found["data"]


def wait_for(address: str, query: str) -> None:
    """Wait until a query has a result."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if ask(address, "query", query=query)["result"]:
                return
        time.sleep(0.2)
    raise SystemExit(f"no result within a minute: {query}")


def check(address: str) -> None:
    """Send every query, and check the health of every rule."""
    # A rate needs two scrapes after the first value.
    wait_for(address, "rate(pgfence_lock_contention_total[20s]) > 0")
    wait_for(address, "rate(pgfence_idempotency_replays_total[20s]) > 0")
    wait_for(address, "rate(pgfence_lease_renewal_duration_seconds_count[20s]) > 0")
    wait_for(address, "rate(pgfence_lock_wait_duration_seconds_count[20s]) > 0")
    wait_for(address, "rate(pgfence_process_pause_duration_seconds_count[20s]) > 0")
    wait_for(address, "rate(pgfence_lock_evictions_total[20s]) > 0")
    queries = list_queries()
    empty = [query for query in queries if not ask(address, "query", query=query)["result"]]
    unexpected = [query for query in empty if not any(part in query for part in EMPTY)]
    assert not unexpected, unexpected
    (group,) = ask(address, "rules")["groups"]
    sick = [(rule["name"], rule.get("lastError")) for rule in group["rules"] if rule["health"] != "ok"]
    assert not sick, sick
    print(
        f"{len(queries)} queries, {len(empty)} of them without a result here; {len(group['rules'])} rules, all healthy"
    )


def main() -> None:
    if MISSING:
        sys.exit(f"not found on the PATH: {', '.join(MISSING)}. On Debian: apt-get install prometheus")
    for command in (["check", "rules", RULES], ["test", "rules", HERE / "alerts_test.yml"]):
        subprocess.run(["promtool", *command], check=True)
    with embedded.server() as dsn, tempfile.TemporaryDirectory() as folder:
        engine = create_engine(dsn)
        schema.create_all(engine)
        telemetry.instrument(engine, MeterProvider([PrometheusMetricReader()]))
        server, _ = prometheus_client.start_http_server(0, "127.0.0.1")
        stop = threading.Event()
        working = threading.Thread(target=use_locks, args=(engine, stop))
        working.start()
        try:
            # Held all the time, so that every scrape finds a hold.
            with Lease(engine, "indexer", ttl=30).hold(), run_prometheus(server.server_port, Path(folder)) as address:
                check(address)
        finally:
            stop.set()
            working.join()
            server.shutdown()
            engine.dispose()


if __name__ == "__main__":
    main()
