"""Make the picture of `pgfence ps --watch`: `python docs/_diagrams/ps_watch.py` writes it to docs/_static.

It is the frame that the command shows, read from a throwaway server on which a few programs hold locks.
"""

from __future__ import annotations

import io
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console
from sqlalchemy import Engine, create_engine, make_url

from pgfence import (
    AdvisoryLock,
    Lease,
    TransactionLock,
    embedded,
    monitoring,
    schema,
)
from pgfence.cli.ps_view import build_frame

PICTURE = Path(__file__).parents[1] / "_static" / "ps-watch.svg"
WIDTH = 80


def connect(dsn: str, name: str) -> Engine:
    """Return the engine of a program."""
    url = make_url(dsn).set(drivername="postgresql+psycopg")
    return create_engine(url, connect_args={"application_name": name})


def is_waiting(engine: Engine, seconds: float) -> bool:
    """Say whether a session has waited that long."""
    waits = [waiter.waiting for row in monitoring.ps(engine) for waiter in row.waiters]
    return any(wait >= timedelta(seconds=seconds) for wait in waits)


def draw(dsn: str) -> str:
    """Return the picture."""
    engine = connect(dsn, "operator")
    schema.create_all(engine)
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), highlight=False, markup=False
    )
    AdvisoryLock(engine, "account:42").acquire().release()  # its name is known
    with (
        ThreadPoolExecutor() as pool,
        Lease(
            connect(dsn, "billing"), "close:2026-04", ttl=60, owner="worker-7"
        ).hold(),
        AdvisoryLock(connect(dsn, "indexer"), "indexer", token=True).hold(),
        connect(dsn, "shop-web").connect() as web,
    ):
        TransactionLock(web, "account:42").acquire()
        waiting = pool.submit(
            AdvisoryLock(connect(dsn, "backup"), "account:42").wrap(timeout=60)(
                lambda: None
            )
        )
        while not is_waiting(engine, 3):
            time.sleep(0.1)
        console.print(build_frame(monitoring.ps(engine), datetime.now(UTC), WIDTH))
        web.rollback()
        waiting.result()
    text = console.export_svg(title="pgfence ps --watch", unique_id="ps")
    # Without fonts from other servers: a page of documentation loads nothing from elsewhere.
    return re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL)


if __name__ == "__main__":
    with embedded.server() as server:
        PICTURE.write_text(draw(server), encoding="utf-8")
