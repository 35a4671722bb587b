"""What the facts of a server allow: pure judgement, without a server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgfence._sql.params import DRIVERS, style_of
from pgfence._sql.server import ServerInfo, judge_capacity, judge_session
from pgfence.errors import CapacityError, PoolerError, StandbyError, UnsupportedServerError
from support.rows import every_row

GOOD = ServerInfo(
    backend_pid=100,
    standby=False,
    version="PostgreSQL 16.4 on x86_64-pc-linux-gnu, compiled by gcc",
    number=160004,
    deadlock_timeout=1.0,
    lock_limit=6400,
    locks_used=3,
    locks_seen=1,
    started="1764374400.123456",
    settings={"statement_timeout": "0"},
    set_up=True,
)


def test_a_direct_primary_is_trusted() -> None:
    """The driver's pid is the server's, and no second client was asked."""
    assert judge_session(GOOD, 100, "auto", None) is None
    assert judge_session(GOOD, 100, "direct", None) is None
    assert judge_session(GOOD, 100, "session", None) is None


@every_row("declared", ["auto", "direct"])
def test_another_pid_is_a_pooler_of_unknown_mode(declared: Any) -> None:
    """C019: rejected, with the alternatives: a direct engine, or a declaration of session pooling."""
    refusal = judge_session(GOOD, 999, declared, 101)
    assert isinstance(refusal, PoolerError)
    assert refusal.mode == "unknown"
    assert "lock_engine" in str(refusal)
    assert 'pooler="session"' in str(refusal)


def test_two_clients_on_one_backend_prove_transaction_pooling() -> None:
    """C019, C021: rejected whatever was declared, because the proof is stronger than the declaration."""
    for declared in ("auto", "direct", "session", "transaction"):
        refusal = judge_session(GOOD, 999, declared, 100)  # type: ignore[arg-type]
        assert isinstance(refusal, PoolerError)
        assert refusal.mode == "transaction"
        assert "lock_engine" in str(refusal)


def test_a_declared_session_pooler_is_trusted() -> None:
    """Another pid is expected there; a second client on another backend agrees with it."""
    assert judge_session(GOOD, 999, "session", None) is None
    assert judge_session(GOOD, 999, "session", 101) is None


def test_a_declared_transaction_pooler_is_rejected_without_asking() -> None:
    """Even where the pids are equal, as some proxies pass the true one on."""
    refusal = judge_session(GOOD, 100, "transaction", None)
    assert isinstance(refusal, PoolerError)
    assert refusal.mode == "transaction"


def test_a_standby_does_not_exclude() -> None:
    """C046: rejected with the way to reach the primary, before poolers are considered."""
    refusal = judge_session(GOOD._replace(standby=True), 999, "auto", 100)
    assert isinstance(refusal, StandbyError)
    assert "primary" in str(refusal)


@every_row(
    "version",
    [
        "CockroachDB CCL v23.1.11 (x86_64-pc-linux-gnu)",
        "PostgreSQL 11.2-YB-2.20.1.0-b0 on x86_64-pc-linux-gnu",
        "PostgreSQL 15.2-YB-2025.1 on x86_64",
        "Amazon Redshift 1.0.0",
        "DuckDB 1.0",
        "",
    ],
)
def test_look_alikes_are_rejected(version: str) -> None:
    """Rule 20: a server that only speaks PostgreSQL's protocol is not PostgreSQL, whatever version it reports."""
    refusal = judge_session(GOOD._replace(version=version), 100, "auto", None)
    assert isinstance(refusal, UnsupportedServerError)


def test_stub_functions_are_rejected() -> None:
    """Rule 20: a server that grants locks and shows none keeps none, whatever it calls itself."""
    refusal = judge_session(GOOD._replace(locks_seen=0), 100, "auto", None)
    assert isinstance(refusal, UnsupportedServerError)
    assert "exclude no other session" in str(refusal)


@every_row(("number", "refused"), [(90624, True), (139999, True), (140000, False), (180006, False)])
def test_old_versions_are_rejected(number: int, refused: bool) -> None:
    """Rule 20: before 14 some settings that a quiet holder needs do not exist."""
    answer = judge_session(GOOD._replace(number=number), 100, "auto", None)
    assert isinstance(answer, UnsupportedServerError) == refused


def test_an_unsupported_server_is_said_to_be_that_first() -> None:
    """For a look-alike behind a pooler on a standby, the error is about the server, because fixing the pooler would not help."""
    bad = GOOD._replace(version="CockroachDB", standby=True)
    assert isinstance(judge_session(bad, 999, "transaction", 100), UnsupportedServerError)


def test_facts_are_read_from_one_row() -> None:
    """Milliseconds become seconds, the settings a mapping of text."""
    row = (7, False, "PostgreSQL 16", 160000, 1500, 6400, 12, 1, "99.5", json.dumps({"lock_timeout": "70"}), True)
    facts = ServerInfo.of(row, set_up=True)
    assert (facts.backend_pid, facts.deadlock_timeout, facts.settings) == (7, 1.5, {"lock_timeout": "70"})
    assert facts.has_names


@every_row(
    ("used", "wanted", "answer"),
    [(0, 1, "fine"), (0, 799, "fine"), (0, 800, "warn"), (799, 1, "warn"), (0, 899, "warn"), (890, 9, "warn")],
)
def test_the_lock_table_is_judged_with_the_request(used: int, wanted: int, answer: str) -> None:
    """Rule 16: warn from 80 % on, of what would be in it afterwards."""
    assert judge_capacity(used, wanted, 1000) == answer


@every_row(("used", "wanted"), [(0, 900), (899, 1), (5000, 1), (0, 20_000)])
def test_a_nearly_full_lock_table_is_rejected(used: int, wanted: int) -> None:
    """Rule 16: from 90 % on, with both numbers and the setting to raise."""
    refusal = judge_capacity(used, wanted, 1000)
    assert isinstance(refusal, CapacityError)
    assert (refusal.used, refusal.limit, refusal.retryable) == (used, 1000, True)
    assert "max_locks_per_transaction" in str(refusal)
    assert str(used) in str(refusal)


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_more_is_never_better(used: int, wanted: int, limit: int) -> None:
    """One lock more in the table never turns a rejection into a grant."""

    def rank(value: Any) -> int:
        return {"fine": 0, "warn": 1}.get(value, 2) if isinstance(value, str) else 2

    assert rank(judge_capacity(used, wanted, limit)) <= rank(judge_capacity(used + 1, wanted, limit))
    assert rank(judge_capacity(used, wanted, limit)) <= rank(judge_capacity(used, wanted + 1, limit))


@every_row("driver", sorted(DRIVERS))
def test_known_drivers_have_their_way_of_marking_parameters(driver: str) -> None:
    """Each supported driver has a parameter style, and no other driver has one."""
    assert style_of(SimpleNamespace(name="postgresql", driver=driver)) in ("format", "numeric")  # type: ignore[arg-type]


@every_row(
    ("name", "driver"),
    [("sqlite", "pysqlite"), ("mysql", "pymysql"), ("postgresql", "pg8000"), ("cockroachdb", "psycopg")],
)
def test_other_dialects_and_drivers_are_rejected(name: str, driver: str) -> None:
    """Rule 20: before anything is connected to, and by name."""
    with pytest.raises(UnsupportedServerError, match=f"{name}|{driver}"):
        style_of(SimpleNamespace(name=name, driver=driver))  # type: ignore[arg-type]
