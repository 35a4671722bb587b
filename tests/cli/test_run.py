"""`pgfence run` as processes on a real server: who runs, who does not, and how each end looks from outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from pgfence.keys import LockKey
from support.commandline import Cli, alive, first_line, holding
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

DEAF = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(60)"


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137)])
def test_the_code_of_the_command_is_passed_on(cli: Cli, name: str, script: str, code: int) -> None:
    """The exit status of the command is ours, 128 + N when signal N ended it, and we say nothing."""
    done = cli.run(name, "--", "sh", "-c", script)
    assert (done.returncode, done.stderr) == (code, "")


def test_the_command_sees_its_lock_and_its_input(cli: Cli, name: str) -> None:
    """PGFENCE_NAME is the name, stdin passes through, and the rest of the environment is as it was."""
    before = {k: v for k, v in cli.environment.items() if k not in {"_", "SHLVL", "PWD", "OLDPWD"}}
    program = "import json, os, sys; print(json.dumps([sys.stdin.read(), dict(os.environ)]))"
    done = cli.run(name, "--", sys.executable, "-c", program, stdin="through")
    text, environment = json.loads(done.stdout)
    assert text == "through"
    assert environment.pop("PGFENCE_NAME") == name
    assert {k: v for k, v in environment.items() if k in before} == before
    assert not set(environment) - set(before) - {"_", "SHLVL", "PWD", "OLDPWD", "LC_CTYPE"}


def test_the_command_does_not_inherit_the_connection(cli: Cli, name: str) -> None:
    """The command has none of pgfence's sockets, even if a standard stream was closed and a socket could take its number."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    closing = ["sh", "-c", 'exec "$@" 2>&- <&-', "sh"]
    listing = ["sh", "-c", "readlink /proc/$$/fd/*; true"]
    words = [*closing, sys.executable, "-m", "pgfence", "run", name, "--", *listing]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False, env=cli.environment)
    assert done.returncode == 0
    assert "socket" not in done.stdout
    assert done.stdout.count("/dev/null") == 2


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 5), (signal.SIGINT, 6)])
def test_a_signal_reaches_the_command_and_the_lock_is_freed(
    cli: Cli, name: str, backend: Callable[[], int | None], signum: signal.Signals, code: int
) -> None:
    """SIGTERM and SIGINT are for the command to handle; its code is passed on and the lock released."""
    script = "trap 'exit 5' TERM; trap 'exit 6' INT; echo ready; while :; do sleep 0.05; done"
    with cli.started(name, "--", "sh", "-c", script) as process:
        assert first_line(process) == "ready"
        assert backend() is not None
        process.send_signal(signum)
        _out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "pgfence" not in err
    assert backend() is None


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        ("no-such-program", 127, "cannot run 'no-such-program': there is no such program on PATH"),
        ("./none", 127, "cannot run './none': No such file"),
        (
            "./lost",
            127,
            "cannot run './lost': the file exists, but the interpreter in its first line, or its loader, does not",
        ),
        ("./plain", 126, "Permission denied"),
        ("./garbage", 126, "format"),
    ],
)
def test_a_command_that_cannot_be_started(
    cli: Cli, name: str, backend: Callable[[], int | None], program: str, code: int, said: str
) -> None:
    """127 and 126 as in a shell, and the lock is released."""
    (cli.folder / "plain").write_text("echo")
    (cli.folder / "garbage").write_bytes(b"\x00\x01\x02")
    (cli.folder / "garbage").chmod(0o755)
    (cli.folder / "lost").write_text("#!/no/such/interpreter\n")
    (cli.folder / "lost").chmod(0o755)
    done = cli.run(name, "--", program)
    assert done.returncode == code
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert backend() is None


# ---------------------------------------------------------------- busy


@pytest.mark.parametrize(("options", "code"), [((), 75), (("-n",), 75), (("-E", "9"), 9), (("--on-busy", "ok"), 0)])
def test_busy_has_a_code_and_names_the_holder(
    cli: Cli, dsn: str, name: str, options: tuple[str, ...], code: int
) -> None:
    """C040: the message names the holder, and the command does not run."""
    with holding(dsn, name) as pid:
        done = cli.run(*options, name, "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (code, "")
    assert name in done.stderr
    assert "other-deploy" in done.stderr
    assert f"backend {pid}" in done.stderr
    assert done.stderr.count("\n") == 1


def test_quiet_does_not_mention_that_it_is_busy(cli: Cli, dsn: str, name: str) -> None:
    """A crontab that mails every line stays silent."""
    with holding(dsn, name):
        done = cli.run("--quiet", name, "--", "true")
    assert (done.returncode, done.stdout, done.stderr) == (75, "", "")


def test_a_wait_ends_with_the_lock(cli: Cli, dsn: str, name: str) -> None:
    """C040: `--wait` says at once for whom it waits, and takes the lock when it comes free."""
    with ExitStack() as other:
        other.enter_context(holding(dsn, name))
        with cli.started("-w", "30", name, "--", "echo", "ran") as process:
            assert process.stderr is not None
            waiting = process.stderr.readline()
            assert "waiting" in waiting
            assert "other-deploy" in waiting
            assert process.poll() is None
            other.close()
            out, _err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "ran\n")


def test_a_wait_that_is_too_short_is_busy(cli: Cli, dsn: str, name: str) -> None:
    """C040: after the seconds of `--wait` the code is that of busy, with the holder's name and no password."""
    start = time.monotonic()
    with holding(dsn, name):
        done = cli.run("--wait", "0.5", name, "--", "true")
    assert time.monotonic() - start >= 0.5
    assert done.returncode == 75
    assert done.stderr.splitlines()[-1].startswith(f"pgfence: {name!r} is held by other-deploy")
    assert done.stderr.endswith("; waited 0.5 s\n")
    password = psycopg.conninfo.conninfo_to_dict(dsn).get("password")
    assert not password or str(password) not in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait(
    cli: Cli, dsn: str, name: str, admin: psycopg.Connection[Any], signum: signal.Signals
) -> None:
    """A signal during the wait exits with 128 + N; the wait ends, and the command does not run."""
    key = LockKey.of(name).value % 2**64

    def waits() -> bool:
        query = "SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND classid = %s::bigint::oid"
        return admin.execute(query, [key >> 32]).fetchone() is not None

    with holding(dsn, name), cli.started("-w", "inf", name, "--", "echo", "ran") as process:
        eventually(waits, 20)
        process.send_signal(signum)
        out, err = process.communicate(timeout=20)
        eventually(lambda: not waits())
    assert (process.returncode, out) == (128 + signum, "")
    assert "Traceback" not in err


def test_many_processes_exclude_each_other(cli: Cli, name: str) -> None:
    """Of five at once, each in its turn: no two commands overlap."""
    script = "mkdir busy && echo in >> log && sleep 0.05 && echo out >> log && rmdir busy"
    words = [sys.executable, "-m", "pgfence", "run", "-w", "40", "-q", name, "--", "sh", "-c", script]
    crowd = [subprocess.Popen(words, cwd=cli.folder, env=cli.environment, stderr=subprocess.DEVNULL) for _ in range(5)]
    assert [process.wait(50) for process in crowd] == [0] * 5
    assert (cli.folder / "log").read_text().split() == ["in", "out"] * 5


def test_a_namespace_makes_it_another_lock(cli: Cli, dsn: str, name: str) -> None:
    """The same name in another namespace is free, and its key is the one that the library uses."""
    with holding(dsn, name):
        done = cli.run("--namespace", "shop", "--json", name, "--", "true")
    assert done.returncode == 0
    assert json.loads(done.stderr)["key"] == LockKey.of(name, namespace="shop").value


# ---------------------------------------------------------------- loss


def terminate(admin: psycopg.Connection[Any], pid: int | None) -> None:
    assert pid is not None
    admin.execute("SELECT pg_terminate_backend(%s)", [pid])


def test_a_lost_lock_stops_the_command(
    cli: Cli, name: str, admin: psycopg.Connection[Any], backend: Callable[[], int | None]
) -> None:
    """C042: when the backend dies the command gets SIGTERM at once, and the code says that the lock was lost."""
    script = "trap 'echo stopping; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    with cli.started("--grace", "inf", name, "--", "sh", "-c", script) as process:
        assert first_line(process) == "ready"
        terminate(admin, backend())
        assert first_line(process) == "stopping"
        _out, err = process.communicate(timeout=20)
    assert process.returncode == 76
    assert f"the lock {name!r} was lost (killed): stopping the command\n" in err


def test_a_deaf_command_is_killed_after_the_grace(
    cli: Cli, name: str, admin: psycopg.Connection[Any], backend: Callable[[], int | None]
) -> None:
    """C042: a command that ignores SIGTERM does not outlive the lock by more than the grace."""
    with cli.started("--grace", "0.3", "--json", name, "--", sys.executable, "-c", DEAF) as process:
        pid = int(first_line(process))
        terminate(admin, backend())
        _out, err = process.communicate(timeout=20)
        assert not alive(pid)
    report = json.loads(err.splitlines()[-1])
    assert (process.returncode, report["outcome"], report["exit_code"]) == (76, "lost", 76)
    assert (report["command_code"], report["loss_reason"]) == (137, "killed")


def test_a_lost_lock_stops_the_command_although_nothing_reads_stderr(
    cli: Cli, name: str, admin: psycopg.Connection[Any], backend: Callable[[], int | None]
) -> None:
    """A pipe whose reader hangs, or a terminal after Ctrl-S, must not delay SIGTERM until the warning can be printed."""
    fill = (
        "import os, time\nos.set_blocking(2, False)\n"
        "try:\n    while True: os.write(2, b'.')\nexcept BlockingIOError: os.set_blocking(2, True)\n"
        "print(os.getpid(), flush=True)\ntime.sleep(600)"
    )
    with cli.started(name, "--", sys.executable, "-c", fill) as process:
        pid = int(first_line(process))
        terminate(admin, backend())
        eventually(lambda: not alive(pid))
        process.communicate(timeout=20)
    assert process.returncode == 76


def test_the_command_may_outlive_its_lock(
    cli: Cli, name: str, admin: psycopg.Connection[Any], backend: Callable[[], int | None]
) -> None:
    """With `--on-lost warn` the command continues after a warning, and its exit code is passed on."""
    with cli.started("--on-lost", "warn", name, "--", "sh", "-c", "echo ready; read x; exit 4") as process:
        assert first_line(process) == "ready"
        terminate(admin, backend())
        assert process.stderr is not None
        assert "other hosts may run the same command now" in process.stderr.readline()
        process.communicate("\n", timeout=20)
    assert process.returncode == 4


def test_a_loss_at_the_very_end_is_not_a_success(
    cli: Cli, dsn: str, name: str, backend: Callable[[], int | None]
) -> None:
    """C005: lost before it was released, another process may have held the lock: 76, for any code of the command."""
    key = LockKey.of(name).value % 2**64
    program = (
        "import os, psycopg, signal; signal.signal(15, signal.SIG_IGN)\n"
        f"with psycopg.connect({dsn!r}, autocommit=True) as c:\n"
        "    c.execute('SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = %s AND granted'\n"
        f"              ' AND classid = {key >> 32}::bigint::oid AND objid = {key & 0xFFFFFFFF}::bigint::oid', ['advisory'])\n"
        "os._exit(0)"
    )
    done = cli.run(name, "--", sys.executable, "-c", program)
    assert done.returncode == 76
    assert name in done.stderr
    assert backend() is None


def test_killed_the_lock_is_free_and_the_command_ends(cli: Cli, name: str, backend: Callable[[], int | None]) -> None:
    """SIGKILL to pgfence: the server frees the lock, and the command does not go on without it."""
    with cli.started("--grace", "0.3", name, "--", "sh", "-c", f"{sys.executable} -c '{DEAF}'; true") as process:
        pid = int(first_line(process))
        process.kill()
        eventually(lambda: backend() is None, 20)
        eventually(lambda: not alive(pid), 20)


# ---------------------------------------------------------------- what is said


def test_the_report_for_programs_is_the_last_line(cli: Cli, dsn: str, name: str) -> None:
    """`--json` ends stderr with one object that tells what happened, and replaces the message."""
    done = cli.run("--json", name, "--", "sh", "-c", "echo noise >&2; exit 3")
    noise, line = done.stderr.splitlines()
    report = json.loads(line)
    assert noise == "noise"
    assert (report["outcome"], report["exit_code"], report["command_code"], report["locked"]) == ("ran", 3, 3, True)
    assert (report["name"], report["key"]) == (name, LockKey.of(name).value)
    with holding(dsn, name) as pid:
        busy = json.loads(cli.run("--json", name, "--", "true").stderr)
    assert (busy["outcome"], busy["exit_code"], busy["command_code"], busy["locked"]) == ("busy", 75, None, False)
    assert [(h["backend_pid"], h["application_name"]) for h in busy["holders"]] == [(pid, "other-deploy")]


def test_verbose_tells_each_step(cli: Cli, name: str) -> None:
    """`--verbose` says when the lock is held, how the command ended, and that it is released."""
    lines = cli.run("-v", name, "--", "true").stderr.splitlines()
    assert [line.split()[1] for line in lines] == ["acquired", "the", "released"]


def test_a_closed_output_pipe_does_no_harm(cli: Cli, dsn: str, name: str) -> None:
    """When stderr has no reader any more, the command still runs to its end."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "pgfence", "run", "-v", name, "--", "sh", "-c", "exit 3"]
    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(words, stderr=gone, env=cli.environment, timeout=50, check=False)
    assert done.returncode == 3


def test_the_holder_is_called_by_its_process(cli: Cli, name: str) -> None:
    """Others see the beginning of the name, the pid and the host of a `pgfence run` that keeps them out."""
    with cli.started(name, "--", "sh", "-c", "echo ready; read x") as process:
        assert first_line(process) == "ready"
        done = cli.run(name, "--", "true")
        process.communicate("\n", timeout=20)
    process_name = re.escape(f"(pid {process.pid} on {socket.gethostname()})")
    assert re.search(rf"pgfence {name[:4]}\S* {process_name}", done.stderr)


def test_as_pid_1_of_a_container_a_wait_can_be_ended(cli: Cli, dsn: str, name: str) -> None:
    """PID 1 has no default action for SIGTERM; a wait ends all the same."""
    inside = ["unshare", "-Ufpr", "--kill-child", "--mount-proc", "--"]
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a PID namespace")
    words = [*inside, sys.executable, "-m", "pgfence", "run", "-w", "inf", name, "--", "true"]
    with (
        holding(dsn, name),
        subprocess.Popen(words, env=cli.environment, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stderr is not None
            assert "waiting" in process.stderr.readline()
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]), signal.SIGTERM)
            assert process.wait(20) == 143
        finally:
            process.kill()
