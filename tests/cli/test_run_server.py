"""Which server `pgfence run` connects to, and what happens to the command without one."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from support.commandline import Cli, first_line

if TYPE_CHECKING:
    from collections.abc import Callable


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("options", "code", "ran", "said"),
    [
        ((), 69, False, "refused"),
        (("--on-unreachable", "fail"), 69, False, "refused"),
        (("--on-unreachable", "skip"), 0, False, "was not run"),
        (("--on-unreachable", "run"), 7, True, "WITHOUT the lock"),
    ],
)
def test_without_a_server_the_user_decides(
    cli: Cli, name: str, options: tuple[str, ...], code: int, ran: bool, said: str
) -> None:
    """An unreachable server is neither free nor busy; the command runs only by option, with a warning."""
    url = f"postgresql://ann:s3cret@127.0.0.1:{unused_port()}/d"
    done = cli.run(*options, name, "--", "sh", "-c", "echo ran; exit 7", DATABASE_URL=url)
    assert (done.returncode, done.stdout) == (code, "ran\n" if ran else "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "s3cret" not in done.stderr


def test_a_rejected_login_is_unreachable_too(cli: Cli, dsn: str, name: str) -> None:
    """A rejected login counts as unreachable; the message has the reason and no password."""
    done = cli.run(name, "--", "echo", "ran", DATABASE_URL=f"{dsn.rpartition('/')[0]}/no_such_database")
    assert (done.returncode, done.stdout) == (69, "")
    assert "no_such_database" in done.stderr
    assert "Traceback" not in done.stderr
    password = psycopg.conninfo.conninfo_to_dict(dsn).get("password")
    assert not password or str(password) not in done.stderr


def test_an_unsuitable_server_has_its_own_exit_code(cli: Cli, dsn: str, name: str) -> None:
    """A pooler in transaction mode is rejected with 78, and the command does not run."""
    (cli.folder / "pooled.py").write_text(
        "from sqlalchemy import create_engine\n"
        "from pgfence.config import configure\n"
        f"engine = create_engine({dsn.replace('postgresql:', 'postgresql+psycopg:')!r})\n"
        "configure(engine, pooler='transaction')\n"
    )
    done = cli.run("--engine", "pooled:engine", name, "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (78, "")
    assert "transaction mode" in done.stderr
    assert all(advice in done.stderr for advice in ("--dsn", "--lease", "pgfence install"))
    assert "configure" not in done.stderr
    again = cli.run("--engine", "pooled:engine", "--pooler", "session", name, "--", "true")
    assert again.returncode == 64
    assert "--pooler" in again.stderr


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_an_engine_of_the_application_is_used(
    cli: Cli, dsn: str, name: str, admin: psycopg.Connection[Any], backend: Callable[[], int | None], driver: str
) -> None:
    """`--engine` takes an Engine, or calls a function for one, with its connect arguments."""
    url = dsn.replace("postgresql:", f"postgresql+{driver}:")
    (cli.folder / "shop.py").write_text(
        "from sqlalchemy import create_engine\n"
        f"engine = create_engine({url!r}, connect_args={{'application_name': 'shop'}})\n"
        "def get_engine(): return engine\n"
    )
    for attribute in ("engine", "get_engine"):
        words = ("--engine", f"shop:{attribute}", name, "--", "sh", "-c", "echo ready; read x")
        with cli.started(*words, DATABASE_URL="") as process:
            assert first_line(process) == "ready"
            row = admin.execute("SELECT application_name FROM pg_stat_activity WHERE pid = %s", [backend()]).fetchone()
            process.communicate("\n", timeout=20)
        assert (row, process.returncode) == (("shop",), 0)


def test_a_module_that_exits_is_misuse(cli: Cli, name: str) -> None:
    """A script that calls sys.exit() at its end would otherwise end `pgfence` with 0, and the command would not run."""
    (cli.folder / "script.py").write_text("import sys\nengine = None\nsys.exit()\n")
    done = cli.run("--engine", "script:engine", name, "--", "true")
    assert (done.returncode, "cannot load --engine 'script:engine': SystemExit" in done.stderr) == (64, True)


def test_the_current_directory_may_be_deleted(cli: Cli, dsn: str, name: str) -> None:
    """A deployment may replace the directory of a shell; the module is then found on PYTHONPATH."""
    url = dsn.replace("postgresql:", "postgresql+psycopg:")
    (cli.folder / "mine.py").write_text(f"from sqlalchemy import create_engine\nengine = create_engine({url!r})\n")
    script = (
        f"mkdir gone && cd gone && rmdir ../gone && {sys.executable} -m pgfence run --engine mine:engine {name} -- true"
    )
    environment = cli.environment | {"PYTHONPATH": str(cli.folder)}
    done = subprocess.run(["sh", "-c", script], cwd=cli.folder, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_signal_reaches_the_command_if_the_application_handles_it_too(cli: Cli, dsn: str, name: str) -> None:
    """A handler of the module of --engine would otherwise end `pgfence` with 0, and the guard the command."""
    url = dsn.replace("postgresql:", "postgresql+psycopg:")
    (cli.folder / "worker.py").write_text(
        "import signal, sys\n"
        "from sqlalchemy import create_engine\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        f"engine = create_engine({url!r})\n"
    )
    work = "trap 'echo got; exit 9' TERM; echo ready; while :; do sleep 0.1; done"
    with cli.started("--engine", "worker:engine", name, "--", "sh", "-c", work) as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        assert (process.communicate(timeout=20)[0], process.returncode) == ("got\n", 9)


def test_a_signal_ends_what_an_engine_is_waiting_for(cli: Cli, name: str) -> None:
    """A module that hangs while it is imported can be interrupted."""
    # Python misses a signal between its last check and the start of a sleep: a single long sleep would hide it.
    (cli.folder / "slow.py").write_text(
        "import time\nprint('importing', flush=True)\nfor _ in range(600): time.sleep(0.1)\n"
    )
    with cli.started("--engine", "slow:engine", name, "--", "true") as process:
        assert first_line(process) == "importing"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg2"])
def test_a_url_picks_its_driver(cli: Cli, dsn: str, name: str, scheme: str) -> None:
    """A URL as libpq and cloud providers write it works like one with a driver's name."""
    url = scheme + dsn[dsn.index("://") :]
    assert cli.run(name, "--", "true", DATABASE_URL=url).returncode == 0


def test_the_option_comes_before_the_environment(cli: Cli, dsn: str, name: str) -> None:
    """`--dsn` overrides DATABASE_URL."""
    done = cli.run("--dsn", dsn, name, "--", "true", DATABASE_URL="postgresql://127.0.0.1:1/d")
    assert done.returncode == 0


def test_without_a_url_libpq_finds_the_server(cli: Cli, dsn: str, name: str) -> None:
    """PGHOST and its like, or PGSERVICE with a service file, name the server as they do for psql."""
    known = {k: str(v) for k, v in psycopg.conninfo.conninfo_to_dict(dsn).items() if v is not None}
    variables = {f"PG{ {'dbname': 'DATABASE'}.get(k, k.upper()) }": v for k, v in known.items()}
    assert cli.run(name, "--", "true", DATABASE_URL="", **variables).returncode == 0
    service = cli.folder / "services"
    service.write_text("[shop]\n" + "".join(f"{k}={v}\n" for k, v in known.items()))
    assert cli.run(name, "--", "true", DATABASE_URL="", PGSERVICE="shop", PGSERVICEFILE=str(service)).returncode == 0


def test_a_missing_server_setting_is_explained(cli: Cli, name: str) -> None:
    """In an empty environment, such as a crontab's, the message says that no server was given."""
    del cli.environment["DATABASE_URL"]
    done = cli.run(name, "--", "echo", "ran", PGCONNECT_TIMEOUT="5", PGUSER="ann", PGPASSWORD="s3cret")
    assert (done.returncode, done.stdout) == (69, "")
    assert "cannot connect to the default host: no server was given: give --dsn or --engine, or set" in done.stderr
    assert "?." not in done.stderr
    assert done.stderr.count("\n") == 1
    assert "s3cret" not in done.stderr


def test_a_url_that_did_not_arrive_is_misuse(cli: Cli, name: str) -> None:
    """An empty DATABASE_URL, a secret that is missing, does not lead to whatever server is on this host."""
    done = cli.run(name, "--", "echo", "ran", DATABASE_URL="")
    assert (done.returncode, done.stdout) == (64, "")
    assert "DATABASE_URL is empty" in done.stderr


def test_what_the_driver_says_is_one_line_and_ends_once(cli: Cli, name: str) -> None:
    """A question of libpq's keeps its mark and gets no full stop behind it; a place without a database has no slash."""
    done = cli.run(name, "--", "true", DATABASE_URL=f"postgresql://127.0.0.1:{(port := unused_port())}")
    assert f"cannot connect to 127.0.0.1:{port}: " in done.stderr
    assert "accepting TCP/IP connections? The state of the lock is unknown" in done.stderr
