"""`pgfence elect` as processes on a real server: one copy of a command in a fleet."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

import pgfence.cli
from pgfence import monitoring
from pgfence.cli.elect import LONG_RUN, Backoff
from pgfence.cli.report import Report
from support.commandline import alive
from support.leases import lapse, rival
from support.rows import every_row
from support.waiting import FAR, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import psycopg

    from support.commandline import Cli

pytestmark = pytest.mark.usefixtures("tables")

# Writes its process id, and waits for a signal.
WORK = ("sh", "-c", "echo $$; exec sleep 600")
# Takes two seconds to stop, and says "overlap" if another copy runs when it starts.
SLOW = """
import os, signal, time
from pathlib import Path

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if list(Path.cwd().glob("copy-*")):
    print("overlap", flush=True)
mine = Path(f"copy-{os.getpid()}")
mine.touch()
print(os.getpid(), flush=True)
signal.sigwait({signal.SIGTERM})
time.sleep(2)
mine.unlink()
"""


class Host:
    """One `pgfence elect`; its output can be read without blocking."""

    def __init__(self, cli: Cli, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgfence", "elect", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cli.folder,
            env=cli.environment,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._pipes = {"out": self.process.stdout.fileno(), "err": self.process.stderr.fileno()}
        self._read = {"out": b"", "err": b""}
        for descriptor in self._pipes.values():
            os.set_blocking(descriptor, False)

    def read(self, pipe: str = "out") -> str:
        """Return all that it has printed so far."""
        while select.select([self._pipes[pipe]], [], [], 0)[0]:
            piece = os.read(self._pipes[pipe], 65536)
            if not piece:
                break
            self._read[pipe] += piece
        return self._read[pipe].decode()

    def wait_for(self, text: str, pipe: str = "err", count: int = 1) -> None:
        eventually(lambda: self.read(pipe).count(text) >= count, deadline=2 * FAR)

    def children(self, count: int = 1) -> list[int]:
        """Wait for the number of commands to be started, and return their process ids."""
        eventually(lambda: len(self._pids()) >= count, deadline=2 * FAR)
        return self._pids()

    def _pids(self) -> list[int]:
        return [int(line) for line in self.read().splitlines() if line.isdigit()]

    def end(self, signum: int = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.process.wait(2 * FAR)


@contextmanager
def host(cli: Cli, *words: str) -> Iterator[Host]:
    """Start `pgfence elect`, and end it with the block."""
    one = Host(cli, *words)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            os.kill(one.process.pid, signal.SIGCONT)
            one.process.terminate()
            one.process.wait(2 * FAR)
        with one.process:
            pass


def ask(dsn: str, name: str) -> str | None:
    """Ask the leader to resign, and return its name."""
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    asked = monitoring.ask_to_resign(engine, name, reason="deploy", actor="me")
    engine.dispose()
    assert asked is not None
    return asked.owner


@contextmanager
def leader_and_follower(cli: Cli, name: str, *words: str) -> Iterator[tuple[Host, Host, int]]:
    """Two hosts of one election, and the process id of the only command."""
    with host(cli, "-v", *words) as leader:
        (child,) = leader.children()
        with host(cli, "-v", *words) as follower:
            follower.wait_for(f"{name!r}: the leader is ")
            yield leader, follower, child


def test_one_command_runs_on_two_hosts(cli: Cli, name: str) -> None:
    """The follower runs nothing; SIGTERM to the leader ends its command, and the follower takes over long before the TTL."""
    with leader_and_follower(cli, name, "--ttl", "60", name, "--", *WORK) as (leader, follower, child):
        assert follower.read() == ""
        assert leader.end() == 128 + signal.SIGTERM
        assert not alive(child)
        eventually(follower.read)  # gives up after a third of the TTL
        (second,) = follower.children()
        assert alive(second)
        assert follower.end() == 128 + signal.SIGTERM
        assert not alive(second)


def test_the_command_gets_name_and_token(cli: Cli, name: str) -> None:
    """PGFENCE_TOKEN is the number of the term, and grows with each; PGFENCE_NAME is the name of the election."""
    tokens = []
    for _ in range(2):
        with host(cli, name, "--", "sh", "-c", "echo $PGFENCE_NAME $PGFENCE_TOKEN") as one:
            assert one.process.wait(2 * FAR) == 0
            said, token = one.read().split()
            assert said == name
            tokens.append(int(token))
    assert tokens == [1, 2]


def test_a_killed_leader_is_replaced_after_its_ttl(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """SIGKILL to the leader: its guard ends the command, and the follower starts its own once the term has expired."""
    with leader_and_follower(cli, name, "--ttl", "2", name, "--", *WORK) as (leader, follower, child):
        leader.process.kill()
        (second,) = follower.children()
        eventually(lambda: not alive(child))
        assert alive(second)
        found = admin.execute("SELECT token FROM pgfence_lease WHERE name = %s", [name]).fetchone()
        assert found == (2,)


@every_row(("how", "ttl"), [("SIGTERM", "1"), ("ask", "60")])
def test_the_term_is_released_after_the_command_has_ended(cli: Cli, name: str, dsn: str, how: str, ttl: str) -> None:
    """A command that takes longer than a TTL to stop keeps the term: the next copy starts when it has ended."""
    command = (sys.executable, "-c", SLOW)
    with leader_and_follower(cli, name, "--ttl", ttl, "--grace", "60", name, "--", *command) as (
        leader,
        follower,
        child,
    ):
        if how == "ask":
            ask(dsn, name)
        else:
            leader.process.terminate()
        follower.children()
        assert not alive(child)
        assert "overlap" not in follower.read()
        assert how == "ask" or leader.process.wait(2 * FAR) == 0


def test_a_lost_term_stops_the_command(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """After a loss the command is stopped, and the host is a candidate again: it runs in a later term."""
    # With a shorter TTL, a busy machine could miss the deadline of the term before its next renewal is rejected.
    with host(cli, "--ttl", "3", name, "--", *WORK) as one:
        (child,) = one.children()
        # In one transaction: a renewal between the two would be rejected because the term has expired.
        with admin.transaction():
            lapse(admin, name)
            assert rival(admin, name, ttl=2) == 2
        one.wait_for(f"the term of {name!r} was lost (superseded): stopping the command")
        eventually(lambda: not alive(child))
        first, second = one.children(2)
        assert first == child
        assert alive(second)
        assert one.end() == 128 + signal.SIGTERM
    assert not alive(second)


def test_a_term_ends_at_its_maximum(cli: Cli, name: str) -> None:
    """With --max-hold a command that hangs is stopped, and the host is a candidate again."""
    with host(cli, "--ttl", "1", "--max-hold", "1.5", name, "--", *WORK) as one:
        first, second = one.children(2)[:2]
        assert not alive(first)
        assert first != second
        assert f"the term of {name!r} was lost (overdue)" in one.read("err")


def test_a_paused_leader_stops_its_command_on_waking(cli: Cli, name: str) -> None:
    """Stopped past its TTL, it is replaced; when it is woken it stops its own command, and follows."""
    with leader_and_follower(cli, name, "--ttl", "1", name, "--", *WORK) as (leader, follower, child):
        leader.process.send_signal(signal.SIGSTOP)
        try:
            (second,) = follower.children()
        finally:
            leader.process.send_signal(signal.SIGCONT)
        eventually(lambda: not alive(child))
        leader.wait_for("candidate again in 1 s")
        assert alive(second)


def test_an_asked_leader_stops_its_command_first(cli: Cli, name: str, dsn: str) -> None:
    """ask_to_resign() stops the command, the follower takes over, and the former leader is a candidate again."""
    with leader_and_follower(cli, name, "--ttl", "60", "--owner", "pod-1", name, "--", *WORK) as (
        leader,
        follower,
        child,
    ):
        assert ask(dsn, name) == "pod-1"
        (second,) = follower.children()
        assert not alive(child)
        leader.wait_for("candidate again in 1 s")
        assert follower.end() == 128 + signal.SIGTERM
        assert not alive(second)
        assert len(leader.children(2)) == 2


@every_row(
    ("restart", "code", "again"),
    [
        ("always", 0, True),
        ("always", 3, True),
        ("on-failure", 0, False),
        ("on-failure", 3, True),
        ("never", 0, False),
        ("never", 3, False),
    ],
)
def test_restart_decides_what_follows_the_command(cli: Cli, name: str, restart: str, code: int, again: bool) -> None:
    """The host is a candidate again after a pause that grows, or ends with the exit code of the command."""
    words = ("--ttl", "60", "--restart", restart, name, "--", "sh", "-c", f"echo $$; exit {code}")
    with host(cli, *words) as one:
        if again:
            assert len(set(one.children(3))) == 3
            pauses = re.findall(
                r"the command ended with exit code (\d+); this host becomes a candidate again in (\d+) s",
                one.read("err"),
            )
            assert pauses[:2] == [(str(code), "1"), (str(code), "2")]
            assert one.end() in {128 + signal.SIGTERM, code}
        else:
            assert one.process.wait(2 * FAR) == code
            assert len(one.children()) == 1
            assert one.read("err") == ""


def test_the_term_is_free_while_the_host_pauses(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """While a host pauses after a failure another one may lead; the first one then follows."""
    with host(cli, "--ttl", "60", name, "--", "sh", "-c", "echo $$; exit 3") as one:
        one.wait_for("candidate again in 2 s")
        assert rival(admin, name) == 3
        assert one.end() == 128 + signal.SIGTERM
        assert len(one.children()) == 2


def test_the_pause_grows_to_a_minute_and_starts_again() -> None:
    """A crash loop pauses for 1, 2, 4 ... 60 s; a run of a minute, or a lost term, starts at 1 s."""
    backoff = Backoff()
    failed, long, lost = Report("x", ran=0.1), Report("x", ran=LONG_RUN), Report("x", ran=0.1, outcome="lost")
    assert [backoff.choose_pause(failed) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert backoff.choose_pause(long) == 1
    assert backoff.choose_pause(failed) == 2
    assert backoff.choose_pause(lost) == 1


def test_a_signal_ends_the_program_whatever_restart_says(cli: Cli, name: str) -> None:
    """SIGTERM is for the program: a command that ends with a failure because of it is not started again."""
    program = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    program += "print(os.getpid(), flush=True); signal.sigwait({signal.SIGTERM}); sys.exit(9)"
    with host(cli, "--restart", "always", name, "--", sys.executable, "-c", program) as one:
        one.children()
        assert one.end() == 9
        assert len(one.children()) == 1


def test_hup_reaches_the_command_and_ends_nothing(cli: Cli, name: str) -> None:
    """A command that reloads on SIGHUP goes on, and is started again if it fails later."""
    program = "import os, signal; signal.signal(signal.SIGHUP, lambda *_: print('reloaded', flush=True))\n"
    program += "print(os.getpid(), flush=True)\nsignal.pause(); signal.pause()"
    with host(cli, name, "--", sys.executable, "-c", program) as one:
        (child,) = one.children()
        one.process.send_signal(signal.SIGHUP)
        one.wait_for("reloaded", "out")
        os.kill(child, signal.SIGKILL)
        assert len(one.children(2)) == 2


def test_what_the_command_leaves_behind_ends_with_its_term(cli: Cli, name: str) -> None:
    """A process that the command started in the background is ended before the term is released."""
    with host(cli, name, "--", "sh", "-c", "sleep 600 & echo $!; exit 0") as one:
        (left,) = one.children()
        assert one.process.wait(2 * FAR) == 0
        assert not alive(left)


@every_row(
    ("words", "code", "said"),
    [
        (["NAME", "--", "no-such-program"], 127, "cannot run 'no-such-program': there is no such program on PATH"),
        (["NAME", "--", "/"], 126, "cannot run '/': Permission denied"),
        (["--schema", "nowhere", "NAME", "--", "true"], 78, "pgfence install"),
    ],
)
def test_what_can_never_work_ends_the_program(cli: Cli, name: str, words: list[str], code: int, said: str) -> None:
    """It exits at once with a line that says why, and leaves no term behind."""
    with host(cli, *(name if word == "NAME" else word for word in words)) as one:
        assert one.process.wait(2 * FAR) == code
        assert said.lower() in one.read("err").lower()
        assert "Traceback" not in one.read("err")


@every_row(
    ("words", "said"),
    [
        (["--ttl", "0", "job", "--", "true"], "--ttl"),
        (["--ttl", "inf", "job", "--", "true"], "--ttl must be from 0.3 to 86400 seconds, not inf"),
        (["--max-hold", "-1", "job", "--", "true"], "--max-hold"),
        (["--grace", "nan", "job", "--", "true"], "--grace"),
        (["--owner", "\udcff", "job", "--", "true"], "owner"),
        (["--owner", "", "job", "--", "true"], "owner"),
        (["", "--", "true"], "empty"),
        (["job", "true"], "write -- before the command"),
        (["--restart", "often", "job", "--", "true"], "--restart"),
        (["--dsn", "mysql://h/d", "job", "--", "true"], "--dsn is a url for mysql"),
    ],
)
def test_a_mistake_in_the_words_is_exit_code_64(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the option, and no server was asked."""
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert pgfence.cli.main(["elect", *words]) == 64
    assert said in capfd.readouterr().err.lower()


def test_a_host_without_a_server_waits_for_it(cli: Cli, name: str, tmp_path: Path) -> None:
    """An unreachable server is a warning, not an end: SIGTERM ends the host with 143."""
    with host(cli, "--dsn", f"postgresql:///x?host={tmp_path}", name, "--", *WORK) as one:
        one.wait_for("cannot be a candidate now, and will try again")
        assert one.read() == ""
        assert one.end() == 128 + signal.SIGTERM


def test_a_leader_runs_its_command_although_nothing_reads_stderr(cli: Cli, name: str) -> None:
    """A log collector that hangs must not keep the elected host from starting the command."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b".")
    os.set_blocking(writer, True)
    words = [sys.executable, "-m", "pgfence", "elect", "--verbose", name, "--", "echo", "ran"]
    with subprocess.Popen(words, cwd=cli.folder, env=cli.environment, stdout=subprocess.PIPE, stderr=writer) as process:
        try:
            assert process.communicate(timeout=20)[0] == b"ran\n"
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


def test_warnings_are_printed_whatever_logging_the_application_configures(cli: Cli, name: str) -> None:
    """`dictConfig` disables the loggers that exist, so a host without a server would print nothing."""
    (cli.folder / "logged.py").write_text(
        "import logging.config\n"
        "from sqlalchemy import create_engine\n"
        'logging.config.dictConfig({"version": 1, "root": {"level": "ERROR"}})\n'
        'engine = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")\n'
    )
    with host(cli, "--engine", "logged:engine", name, "--", "true") as one:
        eventually(lambda: "cannot be a candidate now" in one.read("err"))
