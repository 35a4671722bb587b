"""Under a terminal: keys reach the command once, job control works, pipelines keep their terminal."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not (shutil.which("bash") and shutil.which("setsid")), reason="needs bash and setsid, to have job control"
)

SUPERVISED = """
import os, sys
from pgfence.cli.supervise import Supervisor

with Supervisor(grace=5) as supervisor:
    sys.exit(supervisor.run(sys.argv[1:], os.environ, on_loss=lambda: True).code)
"""

COUNTER = """
import os, signal, sys
def tell(signum, frame):
    os.write(1, f"[{signal.Signals(signum).name}]\\n".encode())
signal.signal(signal.SIGINT, tell)
signal.signal(signal.SIGCONT, tell)
signal.signal(signal.SIGWINCH, tell)
os.write(1, b"[ready]\\n")
for line in sys.stdin:
    os.write(1, f"[got {line.strip()}]\\n".encode())
os.write(1, b"[over]\\n")
"""


class Shell:
    """An interactive shell under a terminal of its own, and the hands on its keyboard."""

    def __init__(self, master: int, folder: Path) -> None:
        self._master = master
        self._seen = ""
        for name, code in (("supervised", SUPERVISED), ("counter", COUNTER)):
            (folder / f"{name}.py").write_text(code)
        self.command = f"{sys.executable} {folder}/supervised.py {sys.executable} -S {folder}/counter.py"

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def prompted(self) -> None:
        """Wait until the shell answers an empty line: what is typed while it takes the terminal back may be flushed."""
        for _ in range(20):
            self.type("\n")
            if select.select([self._master], [], [], 1.0)[0]:
                self.expect("[prompt] ")
                return
        raise AssertionError("the shell does not answer")

    def expect(self, text: str) -> str:
        """Wait for a text on the screen; return what stood before it."""
        deadline = time.monotonic() + 20
        while text not in self._seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {text!r} in {self._seen!r}"
            self._seen += os.read(self._master, 4096).decode(errors="replace")
        before, _, self._seen = self._seen.partition(text)
        return before


@contextmanager
def terminal(folder: Path) -> Iterator[Shell]:
    master, slave = os.openpty()
    words = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "-i"]
    environment = {**os.environ, "PS1": "[prompt] ", "TERM": "dumb", "BASH_SILENCE_DEPRECATION_WARNING": "1"}
    with subprocess.Popen(words, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        try:
            shell = Shell(master, folder)
            shell.expect("[prompt] ")
            yield shell
        finally:
            process.send_signal(signal.SIGHUP)
            process.kill()
            os.close(master)


def test_ctrl_c_reaches_the_command_once(tmp_path: Path) -> None:
    """The terminal tells every process of the job itself, so we do not pass it on."""
    with terminal(tmp_path) as shell:
        shell.type(f"{shell.command}; echo code=$?\n")
        shell.expect("[ready]")
        shell.type("\x03")
        shell.expect("[SIGINT]")
        shell.type("on\n")
        assert "SIGINT" not in shell.expect("[got on]")
        shell.type("\x04")
        shell.expect("[over]")
        shell.expect("code=0")


def test_ctrl_z_stops_the_job_and_fg_continues_it(tmp_path: Path) -> None:
    """The shell sees the job stop, and in the foreground again the command reads the terminal."""
    with terminal(tmp_path) as shell:
        shell.type(f"{shell.command}\n")
        shell.expect("[ready]")
        shell.type("\x1a")
        shell.expect("Stopped")
        shell.expect("[prompt] ")
        shell.prompted()
        shell.type("fg\n")
        shell.expect("[SIGCONT]")
        shell.type("back\n")
        assert "SIGCONT" not in shell.expect("[got back]")
        shell.type("\x04")
        shell.expect("[over]")


def test_a_pipeline_keeps_its_terminal(tmp_path: Path) -> None:
    """A neighbour in the pipeline can still read from the terminal: its group stays in front."""
    with terminal(tmp_path) as shell:
        shell.type(f"{shell.command} </dev/null | {{ cat; read -r x </dev/tty; echo neighbour=$x; }}\n")
        shell.expect("[over]")
        shell.type("reads\n")
        shell.expect("neighbour=reads")


def test_sigterm_is_passed_on_under_a_terminal(tmp_path: Path) -> None:
    """What the terminal does not deliver, we do."""
    with terminal(tmp_path) as shell:
        shell.type(f"{shell.command}\n")
        shell.expect("[ready]")
        shell.type("\x1a")
        shell.expect("Stopped")
        shell.expect("[prompt] ")
        shell.prompted()
        shell.type("kill -TERM $(jobs -p); fg; echo code=$?\n")
        shell.expect("code=143")
