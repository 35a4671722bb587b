"""The supervision of a command, without a lock: signals, terminal, loss, end, and what is left behind."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from pgfence.cli import guard
from pgfence.cli.supervise import Interrupted, Supervisor
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and process groups are POSIX's")

# Supervises the command of its arguments; whoever writes to descriptor LOSS takes the lock away.
PROGRAM = """
import os, sys, threading
from pgfence.cli.supervise import Interrupted, Supervisor

grace, answer, loss, *command = sys.argv[1:]

def watch(supervisor):
    if os.read(int(loss), 1):
        supervisor.lose()
        supervisor.lose()

def on_loss():
    os.write(2, b"asked\\n")
    return answer.startswith("stop")

with Supervisor(grace=float(grace)) as supervisor:
    threading.Thread(target=watch, args=(supervisor,), daemon=True).start()
    on_continue = supervisor.lose if answer == "stop on CONT" else lambda: None
    ended = supervisor.run(command, {**os.environ, "GIVEN": "yes"}, on_loss=on_loss, on_continue=on_continue)
    os.write(2, f"ended code={ended.code} signal={ended.signal} stopped={ended.stopped}\\n".encode())
sys.exit(ended.code)
"""

# Tells what reaches it, one line a signal, until TERM or INT ends it. It waits with sigwait, because a signal that arrives just
# before signal.pause() would be told only with the next one. The handlers replace SIG_IGN, which it may have inherited.
TELLER = """
import os, signal, sys
names = [getattr(signal, "SIG" + name) for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT", "WINCH")]
signal.pthread_sigmask(signal.SIG_BLOCK, names)
for signum in names:
    signal.signal(signum, lambda *_: None)
os.write(1, b"ready\\n")
while True:
    signum = signal.sigwait(names)
    os.write(1, f"{signal.Signals(signum).name}\\n".encode())
    if signum in (signal.SIGTERM, signal.SIGINT):
        sys.exit(7)
"""

DEAF = "import os, signal; signal.signal(15, signal.SIG_IGN); os.write(1, b'ready %d\\n' % os.getpid()); signal.pause()"


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


@contextmanager
def supervised(
    *command: str, grace: float = 10, answer: str = "stop", prefix: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[], None]]]:
    """Run PROGRAM; yield it and the function that makes it lose its lock."""
    reader, writer = os.pipe()
    words = [*prefix, sys.executable, "-c", PROGRAM, str(grace), answer, str(reader), *command]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, pass_fds=[reader], start_new_session=True, **pipes) as process:
        try:
            yield process, lambda: os.write(writer, b"x") and None
        finally:
            process.kill()
            os.close(reader)
            os.close(writer)


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def guards() -> list[psutil.Process]:
    """Return the guards that this process has started and that are still there."""
    return [child for child in psutil.Process().children() if guard.__file__ in child.cmdline()]


def run(*command: str, **kwargs: float) -> tuple[int, int | None, bool]:
    """Run a command in this process; return how it ended."""
    with Supervisor(grace=kwargs.get("grace", 5)) as supervisor:
        ended = supervisor.run(command, os.environ, on_loss=lambda: True)
    return ended.code, ended.signal, ended.stopped


@pytest.mark.parametrize(
    ("script", "code", "signum"), [("true", 0, None), ("exit 3", 3, None), ("kill -9 $$", 137, 9), ("kill $$", 143, 15)]
)
def test_the_exit_status_comes_back_as_shells_count_it(script: str, code: int, signum: int | None) -> None:
    """An exit status is passed on as it is, death by signal N as 128 + N."""
    assert run("sh", "-c", script) == (code, signum, False)


def test_a_command_that_does_not_exist_raises_and_leaves_nothing() -> None:
    """What cannot be started is an OSError, and no guard stays behind."""
    with pytest.raises(FileNotFoundError):
        run("/no/such/program")
    assert guards() == []


def test_the_command_has_the_standard_streams_and_its_environment() -> None:
    """Stdin passes through, stdout and stderr are ours, the environment is the one given."""
    with supervised("sh", "-c", "cat; echo $GIVEN; echo oops >&2") as (process, _):
        out, err = process.communicate(b"through\n", timeout=20)
    assert out == b"through\nyes\n"
    assert err.startswith(b"oops\n")


def test_the_command_inherits_descriptors_open_at_the_start() -> None:
    """Descriptors of the caller are open in the command; those of pgfence, such as the guard's pipes, are not."""
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc")
    with supervised("sh", "-c", "ls /proc/$$/fd") as (process, _):
        passed = process.args[5]
        out, _err = process.communicate(timeout=20)
    assert set(out.decode().split()) == {"0", "1", "2", passed}


def test_a_caller_may_have_more_descriptors_than_select_supports() -> None:
    """With a thousand inherited descriptors, the numbers of our own pipes are above the limit of select()."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert run("sh", "-c", "exit 3") == (3, None, False)
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_sockets_of_systemd_are_for_the_command() -> None:
    """The command finds its own number in LISTEN_PID, as sd_listen_fds(3) asks; one for another process stays as it is."""
    for number, own in (("$$", True), ("1", False)):
        prefix = ("sh", "-c", f'LISTEN_PID={number} LISTEN_FDS=1 exec "$@"', "sh")
        with supervised("sh", "-c", "echo $LISTEN_FDS $LISTEN_PID $$", prefix=prefix) as (process, _):
            out, _err = process.communicate(timeout=20)
        fds, listener, pid = out.decode().split()
        assert (fds, listener) == ("1", pid if own else "1")


@pytest.mark.parametrize("last", ["INT", "TERM"])
def test_signals_reach_the_whole_group_of_the_command(last: str) -> None:
    """Each signal to us reaches the command and what it started, once."""
    second = " ".join(f"'{word}'" for word in python(TELLER))
    # The shell ignores them, or it would end before the two programs that tell; both choose to hear them again.
    ignored = "trap '' HUP INT QUIT TERM USR1 USR2"
    with supervised("sh", "-c", f"{ignored}; {second} & {second}; wait") as (process, _):
        assert [line(process), line(process)] == ["ready", "ready"]
        for name in ("HUP", "QUIT", "USR1", "USR2", "CONT", "WINCH", last):
            process.send_signal(getattr(signal, f"SIG{name}"))
            assert [line(process), line(process)] == [f"SIG{name}"] * 2
        out, _err = process.communicate(timeout=20)
    assert (out, process.returncode) == (b"", 0)


def test_a_signal_that_was_ignored_before_stays_ignored() -> None:
    """Under nohup(1) a hang-up reaches neither us nor the command."""
    with supervised(
        "sh", "-c", "echo ready; read x; kill -HUP $$; echo $x", prefix=("sh", "-c", 'trap "" HUP; exec "$@"', "sh")
    ) as (process, _):
        assert line(process) == "ready"
        process.send_signal(signal.SIGHUP)
        out, _err = process.communicate(b"alive\n", timeout=20)
    assert (out, process.returncode) == (b"alive\n", 0)


def test_a_signal_interrupts_what_comes_before_the_command() -> None:
    """Before the command starts a signal raises in the interruptible block; after one outside of it nothing runs."""
    with Supervisor(grace=1) as supervisor:
        with pytest.raises(Interrupted) as caught, supervisor.allow_interrupts():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)
        assert caught.value.signum == signal.SIGTERM
    with Supervisor(grace=1) as supervisor:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            supervisor.run(["false"], os.environ, on_loss=lambda: True)


def test_no_signal_is_lost_before_the_interruptible_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that arrives as soon as its handler is set raises at the beginning of the block."""
    set_handler = signal.signal

    def set_and_kill(signum: int, handler: Any) -> Any:
        before = set_handler(signum, handler)
        if signum == signal.SIGTERM and before == signal.SIG_DFL:
            os.kill(os.getpid(), signal.SIGTERM)
        return before

    monkeypatch.setattr(signal, "signal", set_and_kill)
    with Supervisor(grace=1) as supervisor, pytest.raises(Interrupted), supervisor.allow_interrupts():
        pytest.fail("the block began")


def test_handlers_are_put_back() -> None:
    """After the block every signal and the wake-up descriptor are as they were."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGUSR1)
    before = [signal.getsignal(s) for s in watched]
    assert run("true")[0] == 0
    assert [signal.getsignal(s) for s in watched] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_lost_lock_stops_the_command() -> None:
    """On a loss the command gets SIGTERM and its own status comes back; the question is put once."""
    with supervised(*python(TELLER)) as (process, lose):
        assert line(process) == "ready"
        lose()
        out, err = process.communicate(timeout=20)
    assert b"SIGTERM" in out
    assert err == b"asked\nended code=7 signal=None stopped=True\n"


def test_a_command_that_was_stopped_by_a_signal_still_ends_on_a_loss() -> None:
    """A stopped command is continued so that it receives SIGTERM."""
    with supervised("sh", "-c", "echo ready; kill -STOP $$; echo continued") as (process, lose):
        assert line(process) == "ready"
        lose()
        _out, err = process.communicate(timeout=20)
    assert b"code=143 signal=15 stopped=True" in err


def test_a_loss_is_noticed_before_a_stopped_command_continues() -> None:
    """A lease may have expired while this process was stopped: the command must not write on before it gets SIGTERM."""
    with supervised(*python(TELLER), answer="stop on CONT") as (process, _):
        assert line(process) == "ready"
        process.send_signal(signal.SIGCONT)
        assert line(process) == "SIGTERM"


def test_a_deaf_command_is_killed_after_the_grace() -> None:
    """A command that ignores SIGTERM gets SIGKILL once the grace is over, and not before."""
    with supervised(*python(DEAF), grace=0.3) as (process, lose):
        assert line(process).startswith("ready")
        start = time.monotonic()
        lose()
        _out, err = process.communicate(timeout=20)
        assert time.monotonic() - start >= 0.3
    assert b"code=137 signal=9 stopped=True" in err


def test_what_a_dead_shell_leaves_behind_is_killed_too() -> None:
    """A shell dies of SIGTERM at once; the deaf program it started does not outlive the grace."""
    program = " ".join(f'"{word}"' for word in python(DEAF))
    with supervised("sh", "-c", f"{program}; true", grace=0.3) as (process, lose):
        pid = int(line(process).split()[1])
        lose()
        _out, err = process.communicate(timeout=20)
    assert b"code=143 signal=15 stopped=True" in err
    eventually(lambda: not alive(pid))


def test_the_command_may_go_on_after_a_loss() -> None:
    """When the answer is to warn, the command runs to its own end."""
    with supervised("sh", "-c", "echo ready; read x; exit 4", answer="warn") as (process, lose):
        assert line(process) == "ready"
        lose()
        assert process.stderr is not None
        assert process.stderr.readline() == b"asked\n"
        _out, err = process.communicate(b"\n", timeout=20)
    assert err == b"ended code=4 signal=None stopped=False\n"


def test_on_sigterm_the_whole_group_is_waited_for() -> None:
    """After SIGTERM the end is reported when what a shell started has cleaned up as well."""
    cleanup = "trap 'sleep 0.3; echo cleaned; exit' TERM; echo ready; while :; do sleep 0.05; done"
    with supervised("sh", "-c", f'sh -c "{cleanup}"; true') as (process, _):
        assert line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert out == b"cleaned\n"
    assert b"code=143" in err


def test_on_sigterm_remaining_processes_are_killed_after_the_grace() -> None:
    """A program that outlives SIGTERM and the shell that started it would work on without the lock."""
    program = " ".join(f'"{word}"' for word in python(DEAF))
    with supervised("sh", "-c", f"{program}; true", grace=0.3) as (process, _):
        pid = int(line(process).split()[1])
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 143
        assert not alive(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a reaper other than PID 1")
def test_a_lost_lock_ends_what_has_left_the_group() -> None:
    """Daemons that the command has started end too, with its environment or without; other processes stay."""
    daemon = " ".join(f'"{word}"' for word in python(DEAF))
    both = f"(setsid {daemon} &); (setsid env -i setsid {daemon} &)"
    with supervised("sh", "-c", f"{both}; cat", grace=0.3) as (process, lose):
        pids = [int(line(process).split()[1]) for _ in range(2)]
        lose()
        assert process.stderr is not None
        # Before communicate() ends the command, which reads its standard input, by closing that.
        assert process.stderr.readline() == b"asked\n"
        _out, err = process.communicate(timeout=20)
        assert [alive(pid) for pid in pids] == [False, False]
    assert b"stopped=True" in err


def test_a_normal_end_does_not_wait_for_a_background_process() -> None:
    """A process that the command has left in the background does not delay the end."""
    with supervised("sh", "-c", "sleep 30 >/dev/null 2>&1 & echo $!; exit 5") as (process, _):
        pid = int(line(process))
        assert process.wait(20) == 5
        assert alive(pid)
        os.kill(pid, signal.SIGKILL)


def test_a_loss_that_comes_too_late_is_ignored() -> None:
    """`lose` may be called after everything is over: another thread cannot know. Its descriptors may be others' by then."""
    with Supervisor(grace=1) as supervisor:
        pass
    reader, writer = os.pipe()  # the numbers that were given back just now
    try:
        assert {reader, writer} == {supervisor._reader, supervisor._writer}
        supervisor.lose()
        os.set_blocking(reader, False)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)


def test_if_pgfence_is_killed_the_guard_ends_the_whole_group() -> None:
    """SIGKILL to the supervisor: SIGTERM to the command and what it started, SIGKILL after the grace."""
    deaf, teller = (" ".join(f'"{word}"' for word in python(code)) for code in (DEAF, TELLER.replace('"', "'")))
    with supervised("sh", "-c", f"{deaf} & {teller}; true", grace=0.3) as (process, _):
        lines = [line(process), line(process)]
        assert "ready" in lines
        pid = next(int(text.split()[1]) for text in lines if text != "ready")
        process.kill()
        assert line(process) == "SIGTERM"
        eventually(lambda: not alive(pid))


def test_no_guard_stays_behind() -> None:
    """When the command has ended, no process of pgfence is left."""
    assert run("true")[0] == 0
    assert guards() == []


def test_as_pid_1_orphans_are_reaped() -> None:
    """In a container's PID namespace an orphan that ends does not stay a zombie."""
    inside = ("unshare", "-Ufpr", "--kill-child", "--mount-proc", "--")
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a PID namespace")
    # The subshell's child is an orphan at once, comes to PID 1, and ends.
    orphan = "(sleep 0.1 & echo $! >&3) 3>&1 | { read pid; echo ready; while [ -e /proc/$pid ]; do sleep 0.05; done; echo gone; }"
    with supervised("sh", "-c", orphan, prefix=inside) as (process, _):
        assert [line(process), line(process)] == ["ready", "gone"]
        assert process.wait(20) == 0


def test_as_pid_1_signals_work() -> None:
    """PID 1 has no default actions, so what it does not handle would be dropped."""
    inside = ("unshare", "-Ufpr", "--kill-child", "--mount-proc", "--")
    if not shutil.which("unshare") or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a PID namespace")
    with supervised(*python(TELLER), prefix=inside) as (process, _):
        assert line(process) == "ready"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        out, _err = process.communicate(timeout=20)
    assert (out, process.returncode) == (b"SIGTERM\n", 7)
