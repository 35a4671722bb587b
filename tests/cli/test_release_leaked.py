"""`pgfence release-leaked` and `pgfence audit`: what they print, and their exit codes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence.cli import main
from pgfence.testing._processes import pause
from support.locking import is_free, take
from support.rows import every_row
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("tables")
NOW = ["release-leaked", "--reason", "old import", "--idle-for", "0"]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    """The test's server in the environment."""
    monkeypatch.setenv("DATABASE_URL", dsn)


@pytest.fixture
def leak(dsn: str, name: str) -> Iterator[psycopg.Connection[Any]]:
    """A session that has leaked a lock."""
    connection = psycopg.connect(dsn, autocommit=True, application_name="importer")
    take(connection, name)
    yield connection
    connection.close()


def test_it_shows_asks_ends_and_records(
    name: str,
    leak: psycopg.Connection[Any],
    admin: psycopg.Connection[Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dry run, no, yes; then there is nothing left, and the audit has it."""
    assert main([*NOW, "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert f"importer on 127.0.0.1 (backend {leak.info.backend_pid})" in out
    assert "last statement: SELECT pg_advisory_lock(" in out
    assert main(NOW) == 64
    assert "add --yes, or --dry-run" in capfd.readouterr().err
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("click.confirm", lambda *_, **__: False)
    assert main(NOW) == 77
    assert not is_free(admin, name)
    monkeypatch.setattr("click.confirm", lambda *_, **__: True)
    assert main(NOW) == 0
    assert "Ended 1 of 1 session and recorded this in the audit table." in capfd.readouterr().out
    assert is_free(admin, name)
    assert main(NOW) == 67
    assert "No session that holds a leaked lock has been idle" in capfd.readouterr().out
    assert main(["audit", "--since", "1m", "--action", "release leaked"]) == 0
    assert f"release leaked  backend {leak.info.backend_pid}\n" in capfd.readouterr().out


def test_a_role_that_cannot_see_other_sessions_is_told_so(
    leak: psycopg.Connection[Any], role: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A member of pg_read_all_stats finds the session, and no other role may conclude that there is none."""
    assert main([*NOW, "--dry-run", "--dsn", role()]) == 67
    assert "run GRANT pg_read_all_stats TO <role>" in capfd.readouterr().out
    assert main([*NOW, "--dry-run"]) == 0
    assert "pg_read_all_stats" not in capfd.readouterr().out


def test_a_session_that_takes_long_to_end_is_recorded(
    leak: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str], admin: psycopg.Connection[Any], name: str
) -> None:
    """The signal was sent: the session ends as soon as its process continues, so the audit has it."""
    with pause(leak.info.backend_pid):
        assert main([*NOW, "--yes"]) == 0
    assert "Ended 1 of 1 session and recorded this in the audit table." in capfd.readouterr().out
    blocking(lambda: is_free(admin, name))


def test_a_session_that_is_used_meanwhile_is_left_alone(
    name: str,
    leak: psycopg.Connection[Any],
    admin: psycopg.Connection[Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the list and the answer: 75, and nothing is recorded."""

    def answer(*_: object, **__: object) -> bool:
        leak.execute("SELECT 1")
        return True

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("click.confirm", answer)
    assert main(NOW) == 75
    assert "the session was used again, or has ended, since it was shown" in capfd.readouterr().err
    assert not is_free(admin, name)
    monkeypatch.undo()
    monkeypatch.setenv(
        "DATABASE_URL",
        f"postgresql://{admin.info.user}:{admin.info.password}@{admin.info.host}:{admin.info.port}/{admin.info.dbname}",
    )
    assert main([*NOW, "--yes", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["outcome"], told["sessions"][0]["backend_pid"]) == ("released", leak.info.backend_pid)
    assert main(["audit", "--json"]) == 0
    entries = json.loads(capfd.readouterr().out)["entries"]
    assert sum(entry["resource"] == f"backend {leak.info.backend_pid}" for entry in entries) == 1


@every_row(
    ("words", "said"),
    [
        (["audit", "--since", "yesterday"], "--since 'yesterday' is neither an age nor a time: give an age such as 2h"),
        (["audit", "--since", "99999999999d"], "--since '99999999999d' is too long ago"),
        (
            ["audit", "--since", "0001-01-01T00:00:00+14:00"],
            "is out of range: give a time between the years 2 and 9998",
        ),
        (["audit", "--action", "shrug"], "--action"),
        (["audit", "--dsn", "sqlite://"], "needs PostgreSQL"),
        (["release-leaked"], "--reason"),
        (["release-leaked", "--reason", " ", "--yes"], "--reason must not be blank"),
        (["release-leaked", "--reason", "r", "--idle-for", "-1"], "--idle-for"),
    ],
)
def test_misuse_is_64(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One line that says what to change."""
    assert main(words) == 64
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_an_audit_without_entries_or_tables(capfd: pytest.CaptureFixture[str]) -> None:
    """A sentence that claims no more than was searched; missing tables are 78, no server is 69."""
    assert main(["audit", "--since", "2999-01-01", "--action", "evict"]) == 0
    assert capfd.readouterr().out == "No entries match --since 2999-01-01 and --action evict.\n"
    assert main(["audit", "--prefix", "absent_"]) == 78
    assert "pgfence install --prefix absent_" in capfd.readouterr().err
    assert main(["audit", "--dsn", "postgresql://nobody:secret@127.0.0.1:1/nothing"]) == 69
    assert "secret" not in capfd.readouterr().err
