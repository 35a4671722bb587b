"""The thread that stores the names of locks on connections of the application."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import create_engine, event, make_url

from pgfence import TransactionLock
from pgfence._locks import name_recorder
from pgfence.config import configure
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

pytestmark = pytest.mark.one_driver


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    """An engine of psycopg, where the driver does not matter."""
    engine = create_engine(make_url(dsn).set(drivername="postgresql+psycopg"))
    yield engine
    engine.dispose()


def test_the_background_thread_ends_and_does_not_try_in_vain(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the table it opens one connection in five minutes, closes it, and ends; dispose() drops what is pending."""
    for setting, seconds in (("TICK", 0.05), ("BETWEEN", 0.0), ("LINGER", 0.2)):
        monkeypatch.setattr(name_recorder, setting, seconds)
    configure(engine, prefix="no_such_")
    events: list[str] = []
    with engine.connect():  # so that only the thread opens connections from here on
        pass
    event.listen(engine, "connect", lambda *_: events.append("connect"))
    for n in range(2):
        with TransactionLock.begin(engine, f"{name}:{n}"):
            eventually(lambda: events and not any(thread.name == "pgfence-names" for thread in threading.enumerate()))
    assert events == ["connect"]
