"""How a demo ends before its time: Ctrl-C, a death of the command, servers that cannot be used."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import psycopg
import pytest

from pgfence._demo import load
from pgfence._demo.bank import SCHEMA
from pgfence.cli import main
from pgfence.embedded import _binaries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.servers import OwnServer
    from support.standby import Standby

pytestmark = pytest.mark.timeout(180)

LITTLE = ("--seconds", "0.5", "--processes", "3")
COMMAND = ("-m", "pgfence")
# The command with one act for a programme; the whole of it is played elsewhere.
SHORT = """
import sys
from functools import partial
import pgfence.cli.demo
from pgfence._demo import runner
from pgfence._demo.workloads import transaction
pgfence.cli.demo.play = partial(runner.play, acts=[transaction.ACT], scenes=())
sys.exit(pgfence.cli.main())
"""


@contextmanager
def running(
    *words: str, env: dict[str, str] | None = None, program: tuple[str, str] = COMMAND
) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a separate process, and kill it in any case."""
    command = [sys.executable, "-X", "dev", "-W", "error", *program, "demo", *words]
    with subprocess.Popen(
        command,
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], pattern: str) -> str:
    assert process.stderr is not None
    said = ""
    while not re.search(pattern, said):
        line = process.stderr.readline()
        assert line, f"it ended and said: {said}"
        said += line
    return said


def read_until_transfers(process: subprocess.Popen[str], dsn: str, eventually: Callable[..., Any]) -> None:
    """Wait until the first act has moved money. Its result is printed at its end, which is a minute later."""
    read_until(process, "loaded by")
    with psycopg.connect(dsn, autocommit=True) as connection:
        eventually(lambda: connection.execute(f"SELECT FROM {SCHEMA}.pgbench_history LIMIT 1").fetchall(), deadline=30)


def relatives(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


def failed(*words: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    with running(*words, env=env) as process:
        out, err = process.communicate(timeout=150)
    assert out == ""
    assert "Traceback" not in err
    return process.returncode, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(
    number: signal.Signals, dsn: str, admin: psycopg.Connection[Any], eventually: Callable[..., Any]
) -> None:
    """In the middle of an act: exit code 128 + N, no process, no schema, no traceback."""
    with running("--dsn", dsn, "--seconds", "60", "--processes", "3") as process:
        read_until_transfers(process, dsn, eventually)
        processes = relatives(process)
        assert len(processes) == 3
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + number, "")
    assert "Traceback" not in err
    eventually(lambda: gone(processes))
    assert admin.execute("SELECT 1 FROM pg_namespace WHERE nspname = %s", [SCHEMA]).fetchall() == []


def test_when_the_command_is_killed_its_processes_and_server_end(eventually: Callable[..., Any]) -> None:
    """SIGKILL allows no clean-up: the processes end with their input, the server with its parent."""
    with running("--seconds", "60", "--processes", "3") as process:
        read_until(process, "loaded by")
        processes = relatives(process)
        assert len(processes) > 3
        process.kill()
    eventually(lambda: gone(processes), deadline=20)


def test_a_server_that_goes_ends_it(own_server: OwnServer, eventually: Callable[..., Any]) -> None:
    """A crash of the server in the middle of an act is noticed at once: one line, exit code 69."""
    with running("--dsn", own_server.dsn, "--seconds", "60", "--processes", "3") as process:
        read_until_transfers(process, own_server.dsn, eventually)
        processes = relatives(process)
        own_server.stop("immediate")
        _, err = process.communicate(timeout=30)
    assert process.returncode == 69, err
    assert "Traceback" not in err
    eventually(lambda: gone(processes))


def test_without_a_dsn_it_brings_its_own_server(eventually: Callable[..., Any]) -> None:
    """The first command of a newcomer: exit code 0, one JSON document, pgbench's own data, and no process afterwards."""
    with running("--json", *LITTLE, program=("-c", SHORT)) as process:
        read_until(process, "TransactionLock")
        processes = relatives(process)
        out, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    shown = json.loads(out)
    assert shown["embedded"] is True
    assert shown["loaded_by"].startswith("pgbench " if load.find_program("pgbench") else "SQL")
    eventually(lambda: gone(processes))


def test_keep_lets_the_server_run_until_interrupted(eventually: Callable[..., Any]) -> None:
    """What it prints is enough to connect, and the tables are there; Ctrl-C is then no failure."""
    with running("--keep", *LITTLE, program=("-c", SHORT)) as process:
        said = read_until(process, "psql '.*'")
        processes = relatives(process)
        with psycopg.connect(re.findall("psql '(.*)'", said)[0]) as connection:
            found = connection.execute("SELECT count(*) > 0 FROM pgbench_history").fetchone()
        assert found == (True,)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "No guarded act lost a cent." in out
    eventually(lambda: gone(processes))


def test_without_binaries_it_names_the_extra(tmp_path: Path) -> None:
    """69, and what to install or to set."""
    code, said = failed(env={_binaries.VARIABLE: str(tmp_path)})
    assert code == 69
    assert _binaries.VARIABLE in said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--dsn", "mysql://host/db"], 64, "needs PostgreSQL"),
        (["--dsn", "postgresql+asyncpg://host/db"], 64, "async driver"),
        (["--dsn", "postgresql://user:secret@127.0.0.1:1/db"], 69, "127.0.0.1:1"),
        (["--processes", "2"], 64, "--processes"),
        (["--seconds", "0"], 64, "--seconds"),
        (["--seconds", "nan"], 64, "--seconds"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    words: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exit code as documented, the reason, and no password."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert main(["demo", *words]) == code
    out, line = capfd.readouterr()
    assert (out, line.count("\n")) == ("", 1)
    assert said in line and "secret" not in line


def test_a_standby_is_rejected(standby: Standby) -> None:
    """A lock acquired there excludes no other session, and a schema cannot be created."""
    code, said = failed("--dsn", standby.dsn)
    assert code == 78
    assert "standby" in said


def test_the_other_commands_do_not_pay_for_it() -> None:
    """`pgfence run` imports nothing of the demo and of the other commands, no lock that was not requested, and no Rich."""
    code = "import sys; from pgfence.cli import main; main(['run', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert "pgfence.cli.run" in done.stdout.split()
    assert "rich" not in done.stdout.split()
    others = (
        "_demo",
        "_admin",
        "_ddl",
        "cli.evict",
        "cli.init",
        "cli.keys",
        "cli.purge",
        "migrations",
        "lease",
        "once",
    )
    assert [name for name in done.stdout.split() if name.startswith(tuple(f"pgfence.{each}" for each in others))] == []
