"""`pgfence purge`: what it does is that of the function; here what it says, and its exit codes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence.cli import main
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """The test's server in the environment, no expired key, and what the parser changes put back."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    admin.execute("DELETE FROM pgfence_idempotency_key WHERE expires_at <= clock_timestamp()")


def expire(admin: psycopg.Connection[Any], count: int, table: str = "pgfence_idempotency_key") -> None:
    """Make expired keys."""
    admin.execute(
        f"INSERT INTO {table} (scope, key, status, created_at, expires_at)"
        " SELECT 'purge', n, 'done', clock_timestamp(), clock_timestamp() FROM generate_series(1, %s) AS n".encode(),
        [count],
    )


def test_it_prints_the_number_of_deleted_keys(
    admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """One line on stdout, none with --quiet; nothing to do is a success too."""
    expire(admin, 25)
    assert main(["purge", "--batch", "10"]) == 0
    assert capfd.readouterr() == ("deleted 25 expired keys\n", "")
    assert main(["purge"]) == 0
    assert capfd.readouterr().out == "deleted 0 expired keys\n"
    expire(admin, 1)
    assert main(["purge"]) == 0
    assert capfd.readouterr().out == "deleted 1 expired key\n"
    expire(admin, 1)
    assert main(["purge", "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    assert admin.execute("SELECT count(*) FROM pgfence_idempotency_key WHERE scope = 'purge'").fetchone() == (0,)


def test_json_is_one_object_in_every_outcome(admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """--json: how many, the exit code, and the message that people would get."""
    expire(admin, 3)
    assert main(["purge", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "purged": 3,
        "exit_code": 0,
        "message": "deleted 3 expired keys",
    }
    assert main(["purge", "--json", "--prefix", "absent_"]) == 78
    told = json.loads(capfd.readouterr().out)
    assert (told["purged"], told["exit_code"]) == (None, 78)
    assert "pgfence install --prefix absent_" in told["message"]


def test_schema_and_prefix_find_the_table(admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """The two options name the application's tables, as its configure() does."""
    where = ["--schema", "purge_cli", "--prefix", "my_"]
    assert main(["install", *where]) == 0
    try:
        expire(admin, 4, "purge_cli.my_idempotency_key")
        expire(admin, 1)
        assert main(["purge", *where]) == 0
        assert capfd.readouterr().out == "deleted 4 expired keys\n"
    finally:
        admin.execute("DROP SCHEMA purge_cli CASCADE")


@every_row("words", [["--batch", "0"], ["--batch", "1000000"], ["--batch", "x"], ["--dsn", "sqlite://"]])
def test_misuse_exits_with_64_and_a_message(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """A batch out of range, or another database."""
    assert main(["purge", *words]) == 64
    assert capfd.readouterr().err


def test_no_rights_is_78_and_no_server_is_69(role: Callable[..., str], capfd: pytest.CaptureFixture[str]) -> None:
    """With the GRANT that is missing; and never "0 keys". No message holds a password."""
    login = role()
    assert main(["purge", "--dsn", login]) == 78
    err = capfd.readouterr().err
    assert "GRANT" in err
    assert login.split("@")[0].rsplit(":", 1)[1] not in err
    assert main(["purge", "--dsn", "postgresql://nobody:secret@127.0.0.1:1/nothing"]) == 69
    out, err = capfd.readouterr()
    assert (out, "secret" in err) == ("", False)


def test_a_purge_that_the_server_ends_is_75(
    dsn: str, admin: psycopg.Connection[Any], role: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The role's own lock_timeout, while the table is being altered: the server's message, and no traceback."""
    login = role({"lock_timeout": "50ms"})
    admin.execute(
        f"GRANT SELECT, UPDATE, DELETE ON pgfence_idempotency_key TO {login.split('//')[1].split(':')[0]}".encode()
    )
    with psycopg.connect(dsn) as other:
        other.execute("LOCK TABLE pgfence_idempotency_key IN ACCESS EXCLUSIVE MODE")
        assert main(["purge", "--dsn", login]) == 75
    out, err = capfd.readouterr()
    assert out == ""
    assert err == (
        "pgfence: the server ended the purge: canceling statement due to lock timeout. Keys that were already purged stay deleted\n"
    )
