"""`pgfence install`: what it makes and prints, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from pgfence import schema
from pgfence._sql.storage import TableNames
from pgfence.cli import main
from pgfence.cli.codes import Code
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import psycopg


@pytest.fixture(autouse=True)
def only_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server in the environment, plain text, and the import path put back."""
    for name in ("DATABASE_URL", "PGSERVICE", "PGHOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def place(admin: psycopg.Connection[Any], name: str) -> Iterator[TableNames]:
    """A schema that is not there yet."""
    here = TableNames(f"install_{name[-12:]}", "x_")
    yield here
    admin.execute(f"DROP SCHEMA IF EXISTS {here.schema} CASCADE".encode())


def tables(admin: psycopg.Connection[Any], place: TableNames) -> int:
    row = admin.execute("SELECT count(*) FROM pg_tables WHERE schemaname = %s AND tablename ~ '^x_'", [place.schema])
    return row.fetchone()[0]  # type: ignore[index]


def test_it_makes_everything_and_may_run_twice(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """With schema and prefix from the options; one line says so, none with --quiet."""
    words = ["install", "--dsn", dsn, "--schema", str(place.schema), "--prefix", place.prefix]
    assert main(words) == Code.OK
    assert capfd.readouterr() == ("", "pgfence: tables and functions are installed\n")
    assert main([*words, "--quiet"]) == Code.OK
    assert tables(admin, place) == len(schema.tables(_metadata()))
    assert capfd.readouterr() == ("", "")


def test_a_rejected_statement_prints_one_line(dsn: str, capfd: pytest.CaptureFixture[str]) -> None:
    """PostgreSQL reserves the names of schemas that begin with pg_."""
    assert main(["install", "--dsn", dsn, "--schema", "pg_mine"]) == Code.REFUSED
    err = capfd.readouterr().err
    assert "rejected a statement: unacceptable schema name" in err and err.count("\n") == 1


def _metadata() -> Any:
    from sqlalchemy import MetaData

    return MetaData()


def test_the_server_may_come_from_the_environment(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DATABASE_URL, as for the other commands."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    assert main(["install", "--schema", str(place.schema), "--prefix", "x_"]) == Code.OK
    assert tables(admin, place)


def test_the_script_is_printed_without_a_server_and_works_in_psql(
    place: TableNames, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """--sql prints what `schema.sql` returns, and a plain connection runs it."""
    assert main(["install", "--sql", "--schema", str(place.schema), "--prefix", "x_"]) == Code.OK
    out, err = capfd.readouterr()
    assert (out, err) == (schema.sql(schema=place.schema, prefix="x_"), "")
    admin.execute(out.encode())
    assert tables(admin, place)


def test_the_settings_of_the_applications_engine_count(
    dsn: str, place: TableNames, admin: psycopg.Connection[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """--engine uses its schema and prefix; options that contradict them are rejected."""
    module = tmp_path / f"app_{place.schema}.py"
    module.write_text(
        "from sqlalchemy import create_engine\nfrom pgfence import configure\n"
        f"engine = create_engine('postgresql+psycopg://{dsn.split('://', 1)[1]}')\n"
        f"configure(engine, schema='{place.schema}', prefix='x_')\n"
    )
    words = [sys.executable, "-m", "pgfence", "install", "--engine", f"{module.stem}:engine"]
    refused = subprocess.run([*words, "--prefix", "y_"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (refused.returncode, refused.stderr.count("\n")) == (Code.MISUSE, 1)
    assert "--prefix contradicts the settings of the application's engine: omit it, or change" in refused.stderr
    subprocess.run(words, cwd=tmp_path, check=True)
    assert tables(admin, place)


@every_row(
    ("words", "message"),
    [
        (["--sql", "--dsn", "postgresql://h/d"], "--sql does not contact a server: omit"),
        (["--sql", "--engine", "a:b"], "--sql does not contact a server: omit"),
        (["--schema", "", "--sql"], "--schema is empty"),
        (["--dsn", "postgresql://h/d", "--schema", ""], "--schema is empty"),
        (["--prefix", "p" * 41, "--sql"], "longer than 40 bytes"),
        (["--dsn", "sqlite:///x"], "pgfence needs PostgreSQL"),
        (["extra"], ""),
    ],
)
def test_misuse_is_64_and_says_why(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """What cannot be meant is said in one line."""
    assert main(["install", *words]) == Code.MISUSE
    assert message in capfd.readouterr().err


def test_no_server_is_69(capfd: pytest.CaptureFixture[str]) -> None:
    """The line says which server did not respond, and shows no password."""
    assert main(["install", "--dsn", "postgresql://somebody:hunter2@127.0.0.1:1/d"]) == Code.UNAVAILABLE
    said = capfd.readouterr().err
    assert "127.0.0.1:1/d" in said
    assert "Nothing was created" in said
    assert "hunter2" not in said


def test_a_role_that_may_not_is_78(
    place: TableNames, role: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """The line contains the server's reason and the command, which another role must run."""
    least = role()
    assert main(["install", "--dsn", least, "--schema", str(place.schema)]) == Code.REFUSED
    said = capfd.readouterr().err
    assert f"pgfence install --schema {place.schema}" in said
    assert str(urlsplit(least).password) not in said


def test_a_server_that_takes_no_writes_is_78(
    place: TableNames, role: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A standby, or a role that only reads."""
    least = role({"default_transaction_read_only": "on"})
    assert main(["install", "--dsn", least, "--schema", str(place.schema)]) == Code.REFUSED
    assert "standby" in capfd.readouterr().err


def test_ctrl_c_prints_no_traceback(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The exit code is that of a process that SIGINT has ended."""

    def interrupt(_engine: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(schema, "create_all", interrupt)
    assert main(["install", "--dsn", "postgresql://127.0.0.1:1/d"]) == 130
    assert capfd.readouterr().err.strip() == ""
