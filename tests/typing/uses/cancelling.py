"""A worker that gives up its waits at shutdown."""

from __future__ import annotations

import math
import threading
from typing import assert_type

from sqlalchemy import create_engine

from pgfence import AdvisoryLock, Held, WaitCancelledError, cancel_waits

engine = create_engine("postgresql+psycopg://")
stop = threading.Event()


def work() -> tuple[str, ...]:
    try:
        with cancel_waits(stop), AdvisoryLock(engine, "indexer").hold(timeout=math.inf) as held:
            assert_type(held, Held)
    except WaitCancelledError as error:
        return error.names
    return ()
