"""At a terminal: signals reach the command once, job control works as with flock(1), and a lost lock ends everything."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(
    not (shutil.which("bash") and shutil.which("setsid")), reason="needs bash and setsid, to have job control"
)

SUPERVISED = """
import os, sys, threading
from pgfence.cli.supervise import Supervisor

def watch(supervisor):
    with open(sys.argv[1]):
        supervisor.lose()

with Supervisor(grace=0.3) as supervisor:
    threading.Thread(target=watch, args=(supervisor,), daemon=True).start()
    print(f"[us {os.getpid()}]", flush=True)
    code = supervisor.run(sys.argv[2:], os.environ, on_loss=lambda: True).code
sys.exit(code)
"""

# Prints its number and works until a signal ends it.
WORK = """
import os, sys, time
os.write(1, f"[work {os.getpid()}]\\n".encode())
while True:
    time.sleep(0.1)  # a signal between two instructions is missed by a sleep that starts just then
"""

COUNTER = """
import os, signal, sys
def tell(signum, frame):
    os.write(1, f"[{signal.Signals(signum).name}]\\n".encode())
for name in ("INT", "CONT", "WINCH", "USR1"):
    signal.signal(getattr(signal, f"SIG{name}"), tell)
os.write(1, b"[ready]\\n")
for line in sys.stdin:
    os.write(1, f"[got {line.strip()}]\\n".encode())
os.write(1, b"[over]\\n")
"""


class Shell:
    """An interactive shell on a separate terminal, and its keyboard."""

    def __init__(self, master: int, folder: Path) -> None:
        self._master = master
        self._seen = ""
        for name, code in (("supervised", SUPERVISED), ("counter", COUNTER), ("work", WORK)):
            (folder / f"{name}.py").write_text(code)
        self._loss = folder / "loss"
        os.mkfifo(self._loss)
        self.supervised = f"{sys.executable} {folder}/supervised.py {self._loss}"
        self.work = f"{sys.executable} -S {folder}/work.py"
        self.command = f"{self.supervised} {sys.executable} -S {folder}/counter.py"

    def lose(self) -> None:
        """Take the lock away."""
        os.close(os.open(self._loss, os.O_WRONLY))

    def number(self, what: str) -> int:
        """Wait for a process to say its number, and return it."""
        self.expect(f"[{what} ")
        return int(self.expect("]"))

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def bring_about(self, keys: str, text: str) -> None:
        """Type until a text is on the screen: keys are lost when a shell that takes the terminal back flushes them."""
        for _ in range(20):
            self.type(keys)
            if text in self._seen or select.select([self._master], [], [], 1.0)[0]:
                self.expect(text)
                return
        raise AssertionError(f"{keys!r} does not bring about {text!r}")

    def prompted(self) -> None:
        """Wait until the shell answers an empty line: what is typed while it takes the terminal back may be flushed."""
        for _ in range(20):
            self.type("\n")
            if select.select([self._master], [], [], 1.0)[0]:
                self.expect("[prompt] ")
                return
        raise AssertionError("the shell does not answer")

    def stopped(self) -> None:
        """Wait until the shell has seen its job stop."""
        for _ in range(20):
            self.type("jobs -s\n")
            if "Stopped" in self.expect("[prompt] "):
                return
            time.sleep(0.05)
        raise AssertionError("the job does not stop")

    def expect(self, text: str) -> str:
        """Wait for a text on the screen; return the text before it."""
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


def test_a_job_that_began_in_the_background_comes_to_the_foreground(tmp_path: Path) -> None:
    """Reading the terminal stops the job; after `fg` the command reads, and Ctrl-C reaches it once."""
    with terminal(tmp_path) as shell:
        shell.type(f"{shell.command} &\n")
        shell.expect("[ready]")
        shell.prompted()
        shell.stopped()
        shell.type("fg\n")
        shell.expect("[SIGCONT]")
        shell.type("\x03")
        shell.expect("[SIGINT]")
        shell.type("on\n")
        assert "SIG" not in shell.expect("[got on]")
        shell.type("\x1a")
        shell.expect("Stopped")
        shell.prompted()
        shell.bring_about("bg\n", "[SIGCONT]")
        shell.prompted()
        shell.stopped()
        shell.type("fg\n")
        shell.expect("[SIGCONT]")
        shell.type("\x04")
        shell.expect("[over]")


@pytest.mark.parametrize("how", ["-USR1 %1", "-INT %1", "-USR1 {us}", "-INT {us}"])
def test_a_signal_reaches_the_command_once(tmp_path: Path, how: str) -> None:
    """Whether it is sent to the whole job, as shells do, or to `pgfence run` alone."""
    with terminal(tmp_path) as shell:
        shell.type(f"(trap '' USR1 INT; exec sleep 60) | {shell.command} &\n")
        us = shell.number("us")
        shell.expect("[ready]")
        shell.prompted()
        shell.type(f"kill {how.format(us=us)}\n")
        shell.expect("[SIG")
        shell.type(f"kill -CONT {us}\n")
        assert "[SIG" not in shell.expect("[SIGCONT]")
        shell.type(f"kill {us}\n")
        eventually(lambda: not psutil.pid_exists(us))


WAYS = {name: getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "TERM", "KILL")}


@pytest.mark.parametrize(("way", "place"), [*((way, "") for way in (*WAYS, "loss")), ("TERM", "&"), ("loss", "&")])
def test_what_a_shell_started_ends_with_it(tmp_path: Path, way: str, place: str) -> None:
    """The program that a script has started does not continue without the lock, however the script ends."""
    with terminal(tmp_path) as shell:
        # A background program of sh ignores INT and QUIT. It is an orphan once its subshell has ended.
        shell.type(f"{shell.supervised} sh -c '({shell.work} &); {shell.work}; echo goes on' {place}\n")
        us = shell.number("us")
        works = [shell.number("work"), shell.number("work")]
        if way == "loss":
            shell.lose()
        else:
            os.kill(us, WAYS[way])
        for pid in works:
            eventually(lambda pid=pid: not psutil.pid_exists(pid))


def test_a_lost_lock_ends_what_has_left_the_session(tmp_path: Path) -> None:
    """A daemon that the command has started works without the lock as well, so it ends too."""
    with terminal(tmp_path) as shell:
        shell.type(f"{shell.supervised} sh -c '(setsid env -i {shell.work} </dev/tty &); exec cat'\n")
        pid = shell.number("work")
        shell.lose()
        eventually(lambda: not psutil.pid_exists(pid))


def test_ctrl_c_ends_a_loop_of_the_shell(tmp_path: Path) -> None:
    """A shell sees by what ended `pgfence run` that Ctrl-C was meant for its loop too."""
    program = "from pgfence.cli import main; main()"
    run = f"{sys.executable} -c '{program}' run --dsn postgresql://127.0.0.1:1/x --on-unreachable run"
    with terminal(tmp_path) as shell:
        shell.type(f"for i in first second; do {run} x -- {shell.work}; done; echo code=$?\n")
        shell.number("work")
        shell.type("\x03")
        assert not re.search(r"\[work \d", shell.expect("[prompt] "))
        shell.type("echo code=$?\n")
        shell.expect("code=130")
