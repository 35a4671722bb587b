"""`pgfence run --lease` as processes on a real server: a TTL, a token, a minimum and a maximum."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from support.commandline import Cli, first_line
from support.waiting import eventually

if TYPE_CHECKING:
    import psycopg

pytestmark = pytest.mark.usefixtures("tables")


def free_after(admin: psycopg.Connection[Any], name: str) -> float:
    """Return the seconds from when it was granted to when others may have it."""
    query = "SELECT EXTRACT(EPOCH FROM free_at - acquired_at)::float8 FROM pgfence_lease WHERE name = %s"
    row = admin.execute(query, [name]).fetchone()
    assert row is not None
    return float(row[0])


def test_the_command_runs_with_a_token_that_grows(cli: Cli, name: str) -> None:
    """PGFENCE_TOKEN is the fencing token of the run and grows with each; other callers are busy during it."""
    tokens = []
    for _ in range(2):
        with cli.started("--lease", name, "--", "sh", "-c", "echo $PGFENCE_TOKEN; read x; exit 4") as process:
            tokens.append(int(first_line(process)))
            busy = cli.run("--lease", name, "--", "echo", "ran")
            process.communicate("\n", timeout=20)
        assert process.returncode == 4
        assert (busy.returncode, busy.stdout) == (75, "")
        assert " is held by " in busy.stderr
    assert tokens[1] > tokens[0] >= 1


def test_a_short_job_keeps_its_name_for_the_minimum(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """C088: a node that comes soon after a job of milliseconds is rejected; after the minimum it is admitted."""
    assert cli.run("--lease", "--min-hold", "50", name, "--", "true").returncode == 0
    assert cli.run("--lease", "--min-hold", "50", name, "--", "true").returncode == 75
    assert 49.9 < free_after(admin, name) < 50.1
    admin.execute("UPDATE pgfence_lease SET free_at = clock_timestamp(), min_until = NULL WHERE name = %s", [name])
    assert cli.run("--lease", "--wait", "20", name, "--", "true").returncode == 0


def test_a_crash_within_the_minimum_blocks_others_too(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """C088: after a kill within the minimum the name stays taken until the TTL is over, which is not shorter."""
    with cli.started(
        "--lease", "--ttl", "60", "--min-hold", "50", name, "--", "sh", "-c", "echo ready; read x"
    ) as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    assert cli.run("--lease", name, "--", "true").returncode == 75
    assert free_after(admin, name) >= 60
    admin.execute(
        "UPDATE pgfence_lease SET expires_at = free_at - interval '60 s', free_at = clock_timestamp() WHERE name = %s",
        [name],
    )
    assert cli.run("--lease", "--wait", "20", name, "--", "true").returncode == 0


def test_a_job_longer_than_its_ttl_keeps_the_lease(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """C083: it is renewed for as long as the command runs: no second copy starts."""
    over = "SELECT clock_timestamp() > acquired_at + interval '3 s' FROM pgfence_lease WHERE name = %s"
    with cli.started("--lease", "--ttl", "3", name, "--", "sh", "-c", "echo ready; read x") as process:
        assert first_line(process) == "ready"
        eventually(lambda: admin.execute(over, [name]).fetchone()[0])
        assert cli.run("--lease", name, "--", "true").returncode == 75
        process.communicate("\n", timeout=20)
    assert process.returncode == 0


def test_a_job_that_hangs_is_stopped_at_the_maximum(cli: Cli, name: str) -> None:
    """C083: at `--max-hold` the lease is over, the command is stopped, and the report says why."""
    words = (
        "--json",
        "--lease",
        "--ttl",
        "1",
        "--max-hold",
        "1.5",
        name,
        "--",
        "sh",
        "-c",
        "echo ready; exec sleep 60",
    )
    with cli.started(*words) as process:
        assert first_line(process) == "ready"
        _out, err = process.communicate(timeout=20)
    report = json.loads(err.splitlines()[-1])
    assert (process.returncode, report["outcome"], report["loss_reason"]) == (76, "lost", "overdue")


def test_a_paused_run_stops_on_waking_after_a_loss(cli: Cli, name: str) -> None:
    """C073: stopped past its TTL, it finds the lease lost when it is woken, and stops the command: 76."""
    with cli.started("--lease", "--ttl", "1", name, "--", "sh", "-c", "echo ready; exec sleep 60") as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGSTOP)
        try:
            assert cli.run("--lease", "--wait", "20", name, "--", "true").returncode == 0
        finally:
            process.send_signal(signal.SIGCONT)
        _out, err = process.communicate(timeout=20)
    assert process.returncode == 76
    assert f"the lock {name!r} was lost" in err


def test_a_lease_needs_no_session_lock(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """No advisory lock is held: a lease is a row, and works through a pooler in transaction mode."""
    with cli.started("--pooler", "transaction", "--lease", name, "--", "sh", "-c", "echo ready; read x") as process:
        assert first_line(process) == "ready"
        # Of this database: other workers of the test run lock in theirs.
        held = "SELECT count(*) FROM pg_locks JOIN pg_database AS d ON d.oid = database WHERE locktype = 'advisory'"
        assert admin.execute(f"{held} AND datname = current_database()").fetchone() == (0,)
        process.communicate("\n", timeout=20)
    assert process.returncode == 0


def test_the_tables_may_be_elsewhere(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """--schema and --prefix select the installation; without them the error names the command."""
    where = "--schema", "elsewhere", "--prefix", "my_"
    words = [sys.executable, "-m", "pgfence", "install", *where]
    subprocess.run(words, cwd=cli.folder, env=cli.environment, check=True, timeout=50, capture_output=True)
    try:
        for kind in (("--lease",), ("--once-per", "day")):
            done = cli.run(*where, *kind, name, "--", "sh", "-c", "echo $PGFENCE_TOKEN")
            assert (done.returncode, done.stderr) == (0, "")
            assert int(done.stdout) > 0
        assert admin.execute("SELECT count(*) FROM elsewhere.my_lease").fetchone() == (1,)
        lost = cli.run("--schema", "nowhere", "--lease", name, "--", "true")
        assert lost.returncode == 78
        assert "pgfence install --schema nowhere" in lost.stderr
    finally:
        admin.execute("DROP SCHEMA elsewhere CASCADE")


def test_a_command_gets_no_token_of_another_name(cli: Cli, name: str) -> None:
    """Within the command of another `pgfence run`, the outer token would be combined with the inner name."""
    outer = {"PGFENCE_NAME": "outer", "PGFENCE_TOKEN": "7", "PGFENCE_SLOT": "2026-11-30", "PGFENCE_RESUMED": "1"}
    done = cli.run(name, "--", "sh", "-c", "env | grep ^PGFENCE_", **outer)
    assert done.stdout == f"PGFENCE_NAME={name}\n"
