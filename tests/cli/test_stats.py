"""`pgfence stats`: what is waited for and held longest, as a chart and for programs."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence import AdvisoryLock, monitoring
from pgfence.cli import main
from pgfence.errors import UnreachableError
from support.locking import elsewhere
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    """The test's server in the environment."""
    monkeypatch.setenv("DATABASE_URL", dsn)


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield engine
    engine.dispose()


def test_a_name_that_is_waited_for_comes_first(
    name: str, dsn: str, engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    """The time of all waiters, their number and the longest wait; and who has held it how long."""
    AdvisoryLock(engine, name).acquire().release()  # so that its name is known
    with elsewhere(dsn, name, label="holder"), elsewhere(dsn, f"{name}:idle"), ThreadPoolExecutor() as pool:
        work = pool.submit(AdvisoryLock(engine, name).wrap(timeout=60)(lambda: None))
        eventually(lambda: any(row.waiters for row in monitoring.ps(engine, name)))
        assert main(["stats", name, "--for", "0.6", "--interval", "0.2", "--json"]) == 0
        found = json.loads(capfd.readouterr().out)
        assert main(["stats", name, "--for", "0.1", "--interval", "0.1"]) == 0
        chart = capfd.readouterr().out
        assert work.running()
        with engine.connect() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'holder'"
            )
        work.result(30)
    (waited,) = found["waits"]
    assert (waited["name"], waited["waiters"]) == (name, 1) and waited["waited"] > 0
    assert found["samples"] >= 2 and not found["limited"]
    (held,) = [each for each in found["holds"] if each["name"] == name]
    assert held["kind"] == "session" and held["held"] > 0 and held["holder"].startswith("holder, ")
    assert "Most waited for" in chart and re.search(rf"#+  1 +\S+ +{re.escape(name)}", chart)


def test_nothing_to_see_and_mistakes(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Without holders it says so and exits with 0; misuse is 64, and no response at all is 69."""
    assert main(["stats", f"{name}:none", "--for", "0.1"]) == 0
    out = capfd.readouterr().out
    assert "Nothing was waited for." in out and "Nothing was held." in out
    for words in (["--for", "0"], ["--interval", "0.01"], ["--top", "0"], ["a", "b"]):
        assert main(["stats", *words]) == 64
    assert main(["stats", "--for", "0.1", "--dsn", "postgresql://nobody@127.0.0.1:1/nothing"]) == 69


def test_what_the_samples_cannot_contain_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Otherwise "Nothing was held." would also be the result of a missing privilege or a wrong --schema."""
    assert main(["stats", "--for", "0.1", "--schema", "nowhere"]) == 0
    assert "There are no pgfence tables" in capfd.readouterr().err


def test_failed_samples_are_not_among_the_samples(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One list was read and one was not: the count says so, and does not say that the one sample has failed."""
    real, calls = monitoring.ps, []

    def ps(*args: Any, **options: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            raise UnreachableError("gone")
        return real(*args, **options)

    monkeypatch.setattr(monitoring, "ps", ps)
    assert main(["stats", "--for", "0.15", "--interval", "0.1"]) == 0
    assert "Samples: 1, and 1 that failed." in capfd.readouterr().out
