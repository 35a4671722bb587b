"""The server ends with the process that started it, however that ends, and under whichever user it runs."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pgfence.embedded import _binaries
from support.processes import alive
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.processes import Script

SERVER = """
from pgfence.embedded import _process
from pgfence.embedded._server import Server
server = Server(fsync=False)
server.start()
say(server.pid)
say(server.folder)
say("nobody" if _process.find_other_user() else "ourselves")
say("ready")
park()
server.close()
"""


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that makes a program fail for every process started from now on, as on hosts that forbid it."""

    def fail(program: str) -> None:
        (tmp_path / program).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / program).chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return fail


@pytest.mark.parametrize("refused", ["nothing", "setpriv"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_when_its_process_is_killed(
    refused: str, number: int, without: Callable[[str], None], script: Callable[..., Script]
) -> None:
    """A killed process leaves no server behind, with the kernel's death signal and without it."""
    without(refused)
    running = script(SERVER)
    pid, folder = int(running.read_line()), Path(running.read_line())
    assert alive(pid)
    running.kill(number)
    eventually(lambda: not alive(pid), deadline=10)
    script(SERVER).wait_for("ready")
    assert not folder.exists(), "the next start removes what a killed process left"


def test_a_watchdog_ends_with_the_server(without: Callable[[str], None], script: Callable[..., Script]) -> None:
    """A watchdog process must end before the server's process id can be reused."""
    without("setpriv")
    running = script("""
from pathlib import Path
from pgfence.embedded._server import Server
def children():
    return sum(len(thread.read_text().split()) for thread in Path(f"/proc/{os.getpid()}/task").glob("*/children"))
server = Server(fsync=False)
server.start()
say(children())
server.close()
say(children())
""")
    assert running.read_line() == "2"
    assert running.read_line() == "0"
    assert running.go_on() == 0


def test_a_forked_child_that_leaves_the_block_stops_nothing(script: Callable[..., Script]) -> None:
    """The server belongs to the process that started it."""
    running = script("""
from contextlib import closing
from pgfence.embedded._server import Server
with closing(Server(fsync=False)) as server:
    server.start()
    child = os.fork()
    if child == 0:
        sys.exit()
    os.waitpid(child, 0)
    assert server.folder.exists()
    server._process.ended.wait(0.2)
    say("gone" if server._process.ended.is_set() else "there")
""")
    assert running.read_line() == "there"
    assert running.go_on() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
def test_root_without_namespaces_runs_it_as_nobody(
    without: Callable[[str], None], script: Callable[..., Script], tmp_path: Path
) -> None:
    """Without user namespaces, as in a plain container, the server runs as nobody and can be stopped."""
    _needs_nobody()
    without("unshare")
    running = script(SERVER)
    pid, folder = int(running.read_line()), Path(running.read_line())
    running.wait_for("nobody")
    assert Path(f"/proc/{pid}").owner() == "nobody"
    assert running.go_on() == 0
    assert not alive(pid)
    assert not folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become an ordinary user")
def test_an_ordinary_user_runs_it_without_a_wrapper() -> None:
    """A user without any right, and without a home, starts and stops a server; what stays is the template, for that user."""
    python, nobody = _needs_nobody(), pwd.getpwnam("nobody")
    code = "from pgfence import embedded\nwith embedded.server(fsync=False) as url: print(url.partition('://')[0])"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "HOME": "/nonexistent",
    }
    with tempfile.TemporaryDirectory(prefix="pgfence-test-", dir="/tmp") as temporary:
        os.chown(temporary, nobody.pw_uid, nobody.pw_gid)
        answer = subprocess.run(
            ["runuser", "-u", "nobody", "--", python, "-c", code],
            env=environment | {"TMPDIR": temporary},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        assert (answer.stdout, answer.stderr) == ("postgresql+psycopg\n", "")
        (cache,) = Path(temporary).iterdir()
        assert (cache.name, cache.stat().st_mode & 0o777) == (f"pgfence-{nobody.pw_uid}", 0o700)


def _needs_nobody() -> str:
    """Return a Python of our version that the user nobody can run; skip where it cannot reach that or the binaries."""
    if shutil.which("runuser") is None:
        pytest.skip("there is no runuser")
    for program in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        reach = [
            "runuser",
            "-u",
            "nobody",
            "--",
            program,
            "-c",
            "import os, sys; os.execv(sys.argv[1], [sys.argv[1], '-V'])",
        ]
        if (
            subprocess.run(
                [*reach, _binaries.find() / "postgres"], capture_output=True, check=False, cwd="/"
            ).returncode
            == 0
        ):
            return program
    pytest.skip("the user nobody may not enter the folders of Python or of the binaries")
