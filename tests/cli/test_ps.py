"""`pgfence ps`: a table for people, full lines for pipes, JSON for programs, and the live view."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence import AdvisoryLock, Lease, LockKey, TransactionLock
from pgfence.cli import main

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import tzinfo

    from sqlalchemy import Engine

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    """The test's server in the environment, and what the parser changes put back."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}", connect_args={"application_name": "app"})
    yield engine
    engine.dispose()


class Terminal(io.StringIO):
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


def read_terminal(monkeypatch: pytest.MonkeyPatch, *words: str, columns: int, colour: bool = True) -> str:
    """Run the command on a terminal of a width, and return what it printed."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    for name, value in {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    assert main(["ps", *words]) == 0
    return screen.getvalue()


def test_a_pipe_gets_lines_in_full(name: str, engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    """Titles, then a line for each hold with nothing cut off and no colours."""
    long = f"{name}:{'x' * 150}"
    with Lease(engine, long, ttl=30, owner="worker-7").hold() as lease:
        assert main(["ps", name]) == 0
    titles, line = capfd.readouterr().out.splitlines()
    assert titles.split() == ["NAME", "KIND", "STATE", "FOR", "HOLDER", "OR", "WAITER"]
    cells = re.split(r"  +", line)
    assert cells[:2] == [long, "lease"] and re.fullmatch(r"held, \d+(\.\d)?s left", cells[2])
    assert cells[4].startswith("worker-7, ") and f"token {lease.token}" in cells[4]


@pytest.mark.parametrize("columns", [80, 200])
def test_control_characters_in_names_are_escaped(
    columns: int,
    name: str,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A name or owner can neither control the terminal nor look like another row, and ordinary letters stay as they are."""
    hostile = f"{name}\x1b]0;t\x07\n\u202e\x9b2J é日"
    with Lease(engine, hostile, ttl=30, owner="pod\x1b[2J\r\nrow").hold():
        assert main(["ps", name]) == 0
        titles, line = capfd.readouterr().out.splitlines()
        screen = read_terminal(monkeypatch, name, columns=columns, colour=False)
    assert f"{name}\\x1b]0;t\\x07\\n\\u202e\\x9b2J é日  lease" in line and "pod\\x1b[2J\\r\\nrow, " in line
    assert "NAME" in titles and all(each.isprintable() for each in screen.replace("\n", ""))


@pytest.mark.parametrize(("columns", "length"), [(80, 90), (200, 30)])
def test_a_terminal_is_not_exceeded(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch, columns: int, length: int
) -> None:
    """Every line fits, and the name, the state and the holder are all there."""
    with engine.begin() as connection, Lease(engine, f"{name}:{'x' * length}", ttl=30, owner="worker-7").hold():
        TransactionLock(connection, f"{name}:t").acquire()
        out = read_terminal(monkeypatch, columns=columns, colour=False)
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= columns
    assert "x" * length in out.replace("\n", "").replace(" ", "")
    assert "idle in transaction" in out and "worker-7" in out


def test_idle_in_transaction_is_red_unless_colours_are_off(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NO_COLOR is respected, and a pipe never gets colours."""
    with engine.begin() as connection:
        TransactionLock(connection, name).acquire()
        words = ("--kind", "transaction")
        assert re.search("\x1b\\[1;31midle in transaction", read_terminal(monkeypatch, *words, columns=120))
        assert "\x1b" not in read_terminal(monkeypatch, *words, columns=120, colour=False)


def test_for_programs_there_is_one_object(name: str, engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    """--json has every field, times in ISO 8601 with a zone, and what the role may not see."""
    with Lease(engine, name, ttl=30, owner="worker-7").hold() as lease:
        assert main(["ps", name, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    (row,) = found.pop("rows")
    assert found == {"limited": False, "hidden": []}
    assert all("+" in row.pop(at) for at in ("since", "expires_at"))
    assert (row["name"], row["kind"], row["state"], row["token"]) == (name, "lease", "held", lease.token)
    assert (row["owner"], row["waiters"], row["blocked_by"], row["scope"]) == ("worker-7", [], [], None)


def test_an_empty_list_and_a_limit_are_explained(name: str, engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing held is exit code 0 and a sentence; a list that is cut off says so."""
    assert main(["ps", f"{name}:none"]) == 0
    assert capfd.readouterr().out == f"Nothing is held under a name that begins with '{name}:none'.\n"
    with Lease(engine, f"{name}:a", ttl=30).hold(), Lease(engine, f"{name}:b", ttl=30).hold():
        assert main(["ps", name, "--limit", "1"]) == 0
        out = capfd.readouterr().out
        assert f"{name}:a" in out and f"{name}:b" not in out
        assert out.splitlines()[-1] == "There are more than 1 row; increase --limit to see more."
        assert main(["ps", name, "--kind", "slot", "--state", "held"]) == 0
        said = f"Nothing that matches --kind slot, --state held is held under a name that begins with '{name}'.\n"
        assert capfd.readouterr().out == said
        assert main(["ps", name, "--limit", "0", "--state", "held"]) == 0
        assert f"{name}:b" in capfd.readouterr().out


def test_watch_prints_the_list_again_and_again_until_interrupted(name: str, engine: Engine, dsn: str) -> None:
    """Without a terminal: a list for each interval, as lines of JSON with --json. Ctrl-C is the normal end."""
    command = [sys.executable, "-m", "pgfence", "ps", name, "--watch", "--interval", "0.1", "--json"]
    with (
        AdvisoryLock(engine, name, token=True).hold(),
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "DATABASE_URL": dsn}
        ) as watcher,
    ):
        try:
            assert watcher.stdout is not None
            lists = [json.loads(watcher.stdout.readline()) for _ in range(2)]
            watcher.send_signal(signal.SIGINT)
            assert watcher.wait(20) == 0
        finally:
            watcher.kill()
    assert lists[0]["at"] < lists[1]["at"]
    assert [each["rows"][0]["name"] for each in lists] == [name, name]


def test_mistakes_and_servers_that_cannot_be_used_have_codes(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Misuse is 64, no response is 69; missing tables are no error, because locks need none."""
    for words in (["--kind", "leases"], ["--state", "x"], ["--limit", "-1"], ["--interval", "0"], ["a", "b"]):
        assert main(["ps", *words]) == 64
        assert capfd.readouterr().err.startswith("pgfence: error: ")
    assert main(["ps", "--dsn", "postgresql://nobody@127.0.0.1:1/nothing"]) == 69
    assert capfd.readouterr().err.rstrip().endswith("Nothing was done")
    assert main(["ps", "--prefix", "no_such_"]) == 0
    assert capfd.readouterr().out.startswith(
        "Nothing is held.\nThere are no pgfence tables with the prefix 'no_such_' in database "
    )


def test_closed_stdout_discards_the_output(name: str, engine: Engine) -> None:
    """`pgfence ps >&-` has no traceback, and neither has a command that prints in color."""
    with Lease(engine, name, ttl=30).hold():
        for words in (["ps"], ["doctor"], ["stats", "--for", "0.1"]):
            line = ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-m", "pgfence", *words]
            done = subprocess.run(line, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
            assert (done.returncode in (0, 1), done.stderr) == (True, "")


def test_the_printed_expression_computes_the_key(dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`pgfence key` prints SQL that psql runs, for any name; --who finds a stored name in the database."""
    assert main(["key", 'it\'s \\ a "name"', "--namespace", "shop", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(f"SELECT {found['sql']}".encode()).fetchone()
        assert row is not None and row[0] == found["key"]
        stored = LockKey.of("stored", namespace="ns").value
        connection.execute("INSERT INTO pgfence_lock_name VALUES (%s, %s, now())", [stored, "ns\x1fstored"])
        assert main(["key", f"--who={stored}", "--dsn", dsn]) == 0
        connection.execute("DELETE FROM pgfence_lock_name WHERE key = %s", [stored])
    assert "pgfence lock 'stored' in the namespace 'ns'" in capsys.readouterr().out


def test_spans_do_not_depend_on_the_clock_of_this_host(
    monkeypatch: pytest.MonkeyPatch, name: str, engine: Engine, capfd: pytest.CaptureFixture[str]
) -> None:
    """With a clock that is an hour ahead, a live lease would seem to have no time left."""

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:
            return datetime.now(tz) + timedelta(hours=1)

    for module in ("ps_view", "stats"):
        monkeypatch.setattr(f"pgfence.cli.{module}.datetime", Ahead, raising=False)
    with Lease(engine, name, ttl=600).hold():
        assert main(["ps", name]) == 0
        assert re.search(r"held, (9m5\ds|10m00s) left +\d\.\ds ", capfd.readouterr().out)
        assert main(["stats", name, "--for", "0.1", "--interval", "0.1", "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["holds"][0]["held"] < 60
