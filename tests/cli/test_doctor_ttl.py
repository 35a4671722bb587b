"""`pgfence doctor --ttl`: what is measured, the advice, and the exit code."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence import Lease
from pgfence.cli import main, ttl

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    """The test's server, and a short measurement."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setattr(ttl, "_SAMPLES", 5)


def test_it_measures_and_advises_without_touching_the_lease(
    dsn: str, name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Five renewals and pauses; the row of the lease is read and stays as it is, and no other row is added."""
    assert main(["doctor", "--ttl", name, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["name"], told["lease"], told["renewals"]["count"], told["pauses"]["count"]) == (name, None, 5, 5)
    assert told["advice"] >= max(30, told["shortest"])
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    with Lease(engine, name, ttl=20, heartbeat="manual").hold():
        before = admin.execute("SELECT l::text FROM pgfence_lease AS l ORDER BY 1").fetchall()
        assert main(["doctor", "--ttl", name]) == 0
        assert admin.execute("SELECT l::text FROM pgfence_lease AS l ORDER BY 1").fetchall() == before
    engine.dispose()
    out = capfd.readouterr().out
    assert "The lease is held, and has a TTL of 20 s; its last renewal was " in out
    assert "Not measured: the pauses of your application" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_ttl_that_is_too_short_is_1(
    dsn: str, name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With pauses of 10 s a TTL of 15 s is lost, one of 20 s is not."""
    monkeypatch.setattr(ttl, "_measure", lambda _: (ttl.Sample([0.5, 0.5]), ttl.Sample([0.0, 10.0])))
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    for length, code in ((15, 1), (20, 0)):
        with Lease(engine, name, ttl=length).hold():
            assert main(["doctor", "--ttl", name]) == code
        out = capfd.readouterr().out
        assert "Shortest TTL for these figures: 18.53 s." in out
        assert ("The TTL of the lease, 15 s, is too short." in out) == (code == 1)
        assert "Advice: 60 s. With this TTL, a lease survives 35.0 s" in out
    engine.dispose()


def test_without_tables_or_rights_the_fix_is_named(role: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    """78, and a name that cannot be used is 64."""
    assert main(["doctor", "--ttl", "a", "--prefix", "absent_"]) == 78
    assert "pgfence install --prefix absent_" in capfd.readouterr().err
    assert main(["doctor", "--ttl", "a", "--dsn", role()]) == 78
    assert "GRANT" in capfd.readouterr().err
    assert main(["doctor", "--ttl", ""]) == 64
