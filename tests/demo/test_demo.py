"""The whole demo on a real server with real processes: its figures, its exit codes, and that nothing is left behind."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from sqlalchemy import create_engine, make_url

import pgfence.cli.demo
from pgfence._demo import measurement, runner
from pgfence._demo.bank import NAMESPACE, SCHEMA
from pgfence._demo.errors import DemoError
from pgfence._demo.workload import Fault, keeps_every_cent, loses_money
from pgfence._demo.workloads import ACTS, advisory, transaction, unguarded
from pgfence.advisory import AdvisoryLock
from pgfence.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import psycopg
    from sqlalchemy import Engine

    from pgfence._demo.workload import Workload

pytestmark = pytest.mark.timeout(240)

FIGURES = {
    "act": str,
    "title": str,
    "verdict": str,
    "seconds": float,
    "transfers": int,
    "per_second": float,
    "cents_lost": int,
    "accounts_off": int,
    "waits": int,
    "takeovers": list,
    "retries": dict,
}


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """Assert that the demo's processes have ended."""
    yield
    assert workers() == []


@pytest.fixture(autouse=True)
def what_the_parser_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    engine = create_engine(dsn)
    yield engine
    engine.dispose()


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts other acts on the programme of the command."""

    def put(*those: Workload) -> None:
        monkeypatch.setattr(pgfence.cli.demo, "play", partial(runner.play, acts=those, scenes=()))

    return put


class Quiet:
    """A reporter that watches; `during` is called while an act goes on."""

    def __init__(self, during: Any = lambda: None) -> None:
        self._during = during

    def step(self, what: str) -> None:
        pass

    def progress(self, *_: Any) -> None:
        self._during()

    def result(self, *_: Any) -> None:
        pass


def demo(dsn: str, *more: str, seconds: str = "1", processes: str = "4") -> int:
    return main(["demo", "--dsn", dsn, "--seconds", seconds, "--processes", processes, *more])


def workers() -> list[psutil.Process]:
    """Return the demo's processes that live."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            found += [child] if "pgfence._demo.worker" in child.cmdline() else []
    return found


def schemas(admin: psycopg.Connection[Any]) -> Sequence[Any]:
    return admin.execute("SELECT nspname FROM pg_namespace WHERE nspname = %s", [SCHEMA]).fetchall()


def test_the_control_loses_money_and_no_guarded_act_does(
    dsn: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """One JSON document on stdout, exit code 0, every lock taken over, and neither schema nor the user's tables touched."""
    admin.execute("CREATE TABLE public.pgbench_accounts AS SELECT 7 AS mine")
    assert demo(dsn, "--json") == 0
    shown = json.loads(capfd.readouterr().out)

    assert shown.keys() == {
        *(
            "server",
            "loaded_by",
            "processes",
            "acts",
            "scenes",
            "verdict",
            "embedded",
            "seconds_per_act",
            "exit_code",
            "seconds",
        )
    }
    assert (shown["processes"], shown["embedded"], shown["seconds_per_act"]) == (4, False, 1.0)
    assert (shown["verdict"], shown["exit_code"]) == ("ok", 0)
    paused, slots, election, partitions, contention, retries = shown["scenes"]
    assert (paused["scene"], paused["verdict"], paused["late_fenced"]) == ("paused", "ok", 0)
    assert paused["late"] > 0
    assert (slots["scene"], slots["verdict"]) == ("slots", "ok")
    assert slots["slots"] == slots["runs"] >= 50
    assert (election["scene"], election["verdict"], election["overlapping"]) == ("election", "ok", 0)
    assert election["terms"] >= 3 and election["writes"] >= 3
    assert (partitions["scene"], partitions["verdict"], partitions["disordered"]) == ("partitions", "ok", 0)
    assert partitions["taken"] > 0 and partitions["events"] > 0
    assert (contention["scene"], contention["verdict"], contention["accounts_off"]) == ("contention", "ok", 0)
    assert (retries["scene"], retries["verdict"], retries["keyed_twice"], retries["differ"]) == ("retries", "ok", 0, 0)
    assert retries["plain_twice"] > 0 and retries["keyed_ended"] > 0
    control, *guarded = shown["acts"]
    assert [act["act"] for act in shown["acts"]] == [act.name for act in ACTS]
    for act in shown["acts"]:
        assert act.keys() == {*FIGURES, "wait_p50", "wait_p99", "wait_longest"}
        assert {key: type(act[key]) for key in FIGURES} == FIGURES
        assert act["transfers"] > 0 and act["seconds"] >= 1
        assert act["verdict"] == "ok"
    assert control["cents_lost"] > 0 and control["accounts_off"] > 0
    assert control["waits"] == 0 and control["wait_p50"] is None
    for act in guarded:
        assert (act["cents_lost"], act["accounts_off"]) == (0, 0)
        assert 0 < act["wait_p50"] <= act["wait_p99"] <= act["wait_longest"]
    faults = shown["acts"][-1]["takeovers"]
    assert [each["blow"] for each in faults] == [Fault.KILL, Fault.TERMINATE]
    assert all(0 < each["seconds"] < 30 for each in faults)
    assert sum(shown["acts"][-1]["retries"].values()) >= 1, "no worker noticed that its session was ended"

    assert schemas(admin) == []
    assert admin.execute("TABLE public.pgbench_accounts").fetchall() == [(7,)]
    admin.execute("DROP TABLE public.pgbench_accounts")


def test_a_guarded_act_that_loses_money_is_exit_code_1(
    dsn: str, acts: Any, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """An act that only says it is guarded is found out by the ledger."""
    acts(replace(unguarded.ACT, title="a broken guard", check=keeps_every_cent))
    assert demo(dsn, seconds="2") == 1
    shown = capfd.readouterr().out
    assert "a broken guard: THE GUARD FAILED" in shown
    assert "No guarded act lost a cent" not in shown
    assert schemas(admin) == []


def test_a_control_that_loses_nothing_is_exit_code_3(
    dsn: str, acts: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A control with a guard is given more time, and then said to prove nothing."""
    monkeypatch.setattr(measurement, "_TIMES_LONGER", 1.0)
    monkeypatch.setattr(measurement, "_SECONDS_LONGER", 1.0)
    acts(replace(transaction.ACT, check=loses_money))
    assert demo(dsn, "--json", seconds="0.5", processes="3") == 3
    shown = json.loads(capfd.readouterr().out)
    assert (shown["verdict"], shown["exit_code"]) == ("control_failed", 3)
    assert shown["acts"][0]["seconds"] > 1, "it was not given more time"


def test_a_lock_that_is_never_taken_over_is_exit_code_1(
    dsn: str, acts: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Blows that never fall are a failure too: nothing was shown."""
    monkeypatch.setattr(measurement, "_TIMES_LONGER", 1.0)
    monkeypatch.setattr(measurement, "_SECONDS_LONGER", 0.0)
    # These locks are over too soon to tell of them, so nobody is known to hold one.
    acts(replace(transaction.ACT, faults=(Fault.KILL,)))
    assert demo(dsn, seconds="0.5", processes="3") == 1
    assert "SIGKILL: no process took over the lock." in capfd.readouterr().out


def test_a_schema_of_that_name_is_left_alone(
    dsn: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """An existing schema is unchanged, and the message says what to do."""
    admin.execute(f"CREATE SCHEMA {SCHEMA} CREATE TABLE mine ()")
    try:
        assert demo(dsn) == 78
        assert f"DROP SCHEMA {SCHEMA} CASCADE" in capfd.readouterr().err
        assert admin.execute(f"TABLE {SCHEMA}.mine").fetchall() == []
    finally:
        admin.execute(f"DROP SCHEMA {SCHEMA} CASCADE")


def test_two_demos_in_one_database_do_not_meet(
    dsn: str, engine: Engine, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """The second one finds the first one's lock and leaves with 75."""
    with AdvisoryLock(engine, "demo", namespace=NAMESPACE).hold():
        assert demo(dsn) == 75
    assert "another demo" in capfd.readouterr().err
    assert schemas(admin) == []


def test_keep_leaves_the_tables_of_the_last_look(
    dsn: str, acts: Any, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """With --keep and --dsn the ledger can be read afterwards, and says what the table said."""
    acts(transaction.ACT)
    assert demo(dsn, "--keep", "--json", seconds="0.5", processes="3") == 0
    said = capfd.readouterr()
    assert f"to remove them, run DROP SCHEMA {SCHEMA} CASCADE" in said.err
    (lines,) = admin.execute(f"SELECT count(*) FROM {SCHEMA}.pgbench_history").fetchone() or ()
    assert lines == 2 * json.loads(said.out)["acts"][0]["transfers"]
    admin.execute(f"DROP SCHEMA {SCHEMA} CASCADE")


def test_a_process_that_ends_unexpectedly_ends_the_demo(engine: Engine, admin: psycopg.Connection[Any]) -> None:
    """Any end of a process other than by a fault raises an error that names the process, and everything is cleaned up."""

    def kill_one() -> None:
        workers()[0].kill()

    with pytest.raises(DemoError, match=r"process \d ended unexpectedly with return code -9"):
        runner.play(engine, Quiet(kill_one), seconds=5, processes=3, keep=True, acts=[advisory.ACT], scenes=())
    assert schemas(admin) == []


def test_a_mistake_in_a_workload_is_reported(engine: Engine, admin: psycopg.Connection[Any]) -> None:
    """An error that is not a loss ends the process that raised it, and its text is reported."""

    def break_the_bank() -> None:
        admin.execute(f"ALTER TABLE IF EXISTS {SCHEMA}.pgbench_history RENAME TO elsewhere")

    with pytest.raises(DemoError, match=r"process \d: ProgrammingError: .*pgbench_history"):
        runner.play(engine, Quiet(break_the_bank), seconds=5, processes=3, keep=False, acts=[unguarded.ACT], scenes=())
    assert schemas(admin) == []


def test_a_role_that_cannot_create_a_schema_is_rejected(
    role: Any, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """No traceback: one line that says what may not be done, without the password."""
    dsn = role()
    assert demo(dsn) == 78
    said = capfd.readouterr().err
    assert "permission denied" in said
    assert "Traceback" not in said and make_url(dsn).password not in said
    assert schemas(admin) == []
