"""`pgfence run --once-per` as processes on a real server: one run per slot."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest

import pgfence.cli
from support.commandline import Cli, first_line
from support.proxy import Proxy
from support.rows import every_row
from support.zones import write_zone

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import psycopg

pytestmark = pytest.mark.usefixtures("tables")

YEARLY = "0 0 1 1 *"  # a test that runs over New Year's Eve may fail


def back(admin: psycopg.Connection[Any], name: str, past: str = "1 year") -> None:
    """Make what was done older, as if the next slot had begun."""
    admin.execute("UPDATE pgfence_slot SET done = done - %s::interval WHERE name = %s", [past, name])


# ---------------------------------------------------------------- one run for each slot


def test_of_eight_hosts_one_runs_and_in_the_next_slot_one_more(
    cli: Cli, name: str, admin: psycopg.Connection[Any]
) -> None:
    """C087: eight processes at once with a command of milliseconds: one run; and one more in the next slot, for four."""
    words = [
        sys.executable,
        "-m",
        "pgfence",
        "run",
        "-q",
        "--once-per",
        YEARLY,
        name,
        "--",
        "sh",
        "-c",
        "echo ran >> log",
    ]
    for expected, hosts in ((1, 8), (2, 4)):
        crowd = [
            subprocess.Popen(words, cwd=cli.folder, env=cli.environment, stderr=subprocess.PIPE) for _ in range(hosts)
        ]
        assert [process.communicate(timeout=60)[1] for process in crowd] == [b""] * hosts
        assert sorted(process.returncode for process in crowd) == [0] + [75] * (hosts - 1)
        assert (cli.folder / "log").read_text().split() == ["ran"] * expected
        back(admin, name)


def test_a_later_caller_exits_because_the_slot_is_done(cli: Cli, name: str) -> None:
    """C088: long after the short job, the slot is done and not free; the message names it, and when there is a next."""
    assert cli.run("--once-per", "day", name, "--", "true").returncode == 0
    for options, code in ((), 75), (("-E", "9"), 9), (("--on-busy", "ok"), 0):
        done = cli.run("--once-per", "day", *options, name, "--", "echo", "again")
        assert (done.returncode, done.stdout) == (code, ""), options
        assert "is done" in done.stderr
        assert name in done.stderr
        assert done.stderr.count("\n") == 1


def test_quiet_says_nothing_of_a_slot_that_is_done(cli: Cli, name: str) -> None:
    """A crontab that mails every line stays silent on the hosts that come second."""
    cli.run("--once-per", "day", name, "--", "true")
    done = cli.run("--quiet", "--once-per", "day", name, "--", "true")
    assert (done.returncode, done.stderr) == (75, "")


def test_a_slot_done_by_a_wrong_clock_has_its_own_exit_code(
    cli: Cli, name: str, admin: psycopg.Connection[Any]
) -> None:
    """65, in spite of every option that makes "done" silent or a success, with the statement that lets the job run again."""
    assert cli.run("--once-per", "day", name, "--", "true").returncode == 0
    back(admin, name, "-30 days")
    for options in ("--json", "-q"), ("-q",), ("-E", "9"), ("--on-busy", "ok"), ("--wait", "60"):
        done = cli.run("--once-per", "day", *options, name, "--", "echo", "again")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (65, "", 1), options
        said = done.stderr
        if "--json" in options:
            report = json.loads(said)
            said = report["message"]
            ahead = datetime.fromisoformat(report["slot"]) - datetime.now(UTC)
            assert (report["outcome"], timedelta(days=28) < ahead < timedelta(days=31)) == ("clock", True)
        assert "begins only in 29 days" in said
    assert admin.execute(said[said.index("UPDATE ") :]).rowcount == 1
    assert cli.run("--once-per", "day", name, "--", "echo", "again").stdout == "again\n"


def test_a_slot_that_is_done_is_named_in_the_report(cli: Cli, name: str) -> None:
    """`--json` reports the slot that is done, as the command that ran it received it."""
    ran = cli.run("--once-per", YEARLY, name, "--", "sh", "-c", "echo $PGFENCE_SLOT")
    done = cli.run("--json", "--once-per", YEARLY, name, "--", "true")
    report = json.loads(done.stderr)
    assert (done.returncode, report["outcome"], report["slot"]) == (75, "done", ran.stdout.strip())


def test_a_host_with_old_zone_rules_does_not_run_the_day_twice(cli: Cli, name: str, tmp_path: Path) -> None:
    """The host whose rules differ from the server's exits with 65, whatever its options; the others run the job once."""
    old, new, change = tmp_path / "old", tmp_path / "new", datetime(2026, 1, 1, tzinfo=UTC)
    for folder, ahead in ((old, timedelta(hours=-5)), (new, timedelta(hours=-6))):
        write_zone(folder, "America/Mexico_City", ahead, change, ahead)
    quiet, lenient, for_programs = ("-q",), ("--on-busy", "ok"), ("--json", "-q", "-E", "9")
    for folder, options in (
        (old, quiet),
        (old, lenient),
        (new, quiet),
        (old, quiet),
        (old, lenient),
        (old, for_programs),
    ):
        words = ("--once-per", "day", "--tz", "America/Mexico_City", *options, name, "--", "echo", "ran")
        done = cli.run(*words, PYTHONTZPATH=str(folder))
        assert (done.returncode, done.stdout) == ((65, "") if folder is old else (0, "ran\n")), options
        if folder is old:
            said = json.loads(done.stderr)["message"] if "--json" in options else done.stderr
            assert "UTC-5:00:00 by this host's rules and UTC-6:00:00 by those of the server" in said
            assert "pip install -U tzdata" in said


def test_while_the_first_still_runs_the_others_are_busy(cli: Cli, name: str) -> None:
    """The second caller's message names the holder, and its wait ends when the first is done."""
    with cli.started("--once-per", YEARLY, name, "--", "sh", "-c", "echo ready; read x") as process:
        assert first_line(process) == "ready"
        busy = cli.run("--json", "--once-per", YEARLY, name, "--", "true")
        with cli.started("--wait", "30", "--once-per", YEARLY, name, "--", "echo", "again") as second:
            assert second.stderr is not None
            assert "waiting" in second.stderr.readline()
            process.communicate("\n", timeout=20)
            out, err = second.communicate(timeout=20)
    report = json.loads(busy.stderr)
    assert (busy.returncode, report["outcome"], len(report["holders"])) == (75, "busy", 1)
    assert (second.returncode, out) == (75, "")
    assert "is done" in err


def test_a_command_that_failed_leaves_the_slot_to_another_attempt(cli: Cli, name: str) -> None:
    """After any code but 0 the slot is free at once; the next attempt is marked as resumed and has a larger token."""
    show = "echo $PGFENCE_RESUMED $PGFENCE_TOKEN; exit "
    first = cli.run("--once-per", YEARLY, name, "--", "sh", "-c", f"{show} 3")
    second = cli.run("--once-per", YEARLY, name, "--", "sh", "-c", f"{show} 0")
    third = cli.run("--once-per", YEARLY, name, "--", "true")
    assert (first.returncode, second.returncode, third.returncode) == (3, 0, 75)
    resumed, tokens = zip(*(map(int, done.stdout.split()) for done in (first, second)), strict=True)
    assert resumed == (0, 1)
    assert tokens[1] > tokens[0] >= 1


def test_a_command_that_could_not_be_started_leaves_the_slot_free(cli: Cli, name: str) -> None:
    """A program that is not installed on one host does not cost the day."""
    assert cli.run("--once-per", YEARLY, name, "--", "no-such-program").returncode == 127
    assert cli.run("--once-per", YEARLY, name, "--", "true").returncode == 0


def test_a_host_that_died_half_way_is_resumed_after_its_ttl(cli: Cli, name: str) -> None:
    """C045: after SIGKILL the slot is free one TTL later, and the next attempt is marked as resumed."""
    words = ("--once-per", YEARLY, "--ttl", "2", name, "--", "sh", "-c")
    with cli.started(*words, "echo ready; read x") as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    done = cli.run("--wait", "20", *words, "echo $PGFENCE_RESUMED")
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_a_stopped_run_leaves_the_slot_free(cli: Cli, name: str) -> None:
    """SIGTERM to pgfence ends the command; what was not finished may be tried again."""
    with cli.started("--once-per", YEARLY, name, "--", "sh", "-c", "echo ready; exec sleep 60") as process:
        assert first_line(process) == "ready"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    assert process.returncode == 143
    assert cli.run("--once-per", YEARLY, name, "--", "true").returncode == 0


@pytest.fixture
def proxy(cli: Cli) -> Iterator[Proxy]:
    """A proxy to the server, for `unreachable_at_the_end`."""
    with closing(Proxy(cli.environment["DATABASE_URL"])) as made:
        yield made


@contextmanager
def unreachable_at_the_end(cli: Cli, proxy: Proxy, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command that succeeds while no connection to the server is possible, until its slot cannot be recorded."""
    with cli.started(*words, "--", "sh", "-c", "echo ready; read x", DATABASE_URL=proxy.dsn) as process:
        assert first_line(process) == "ready"
        proxy.refuse()
        proxy.cut()
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert "is not recorded as done yet" in process.stderr.readline()
        yield process


def test_a_slot_is_recorded_after_an_outage_at_the_end_of_the_command(cli: Cli, proxy: Proxy, name: str) -> None:
    """If pgfence ended immediately, the slot would not be done, and the command would run again."""
    with unreachable_at_the_end(cli, proxy, "--once-per", YEARLY, "--ttl", "40", name) as process:
        proxy.heal()
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 0
    assert cli.run("--once-per", YEARLY, name, "--", "true").returncode == 75


@pytest.mark.parametrize(("options", "code"), [((), 76), (("--on-lost", "warn"), 0)])
def test_an_outage_at_the_end_that_outlasts_the_ttl_is_reported(
    cli: Cli, proxy: Proxy, name: str, options: tuple[str, ...], code: int
) -> None:
    """The command succeeded, but the next attempt runs it again."""
    with unreachable_at_the_end(cli, proxy, "--once-per", YEARLY, "--ttl", "2", *options, name) as process:
        _out, err = process.communicate(timeout=30)
    assert (process.returncode, "did not confirm" in err) == (code, True)
    assert cli.run("--wait", "10", "--once-per", YEARLY, name, "--", "echo", "again").stdout == "again\n"


def test_a_signal_ends_the_wait_for_a_server_that_is_down(cli: Cli, proxy: Proxy, name: str) -> None:
    """`systemctl stop` does not wait for the TTL."""
    with unreachable_at_the_end(cli, proxy, "--once-per", YEARLY, "--ttl", "600", name) as process:
        process.send_signal(signal.SIGTERM)
        _out, err = process.communicate(timeout=10)
    assert (process.returncode, "did not confirm" in err) == (76, True)


def test_an_evicted_run_is_stopped_and_not_done(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """After an eviction the command gets SIGTERM, the code says lost, and the slot is there for another attempt."""
    with cli.started(
        "--once-per", YEARLY, "--ttl", "3", name, "--", "sh", "-c", "echo ready; exec sleep 60"
    ) as process:
        assert first_line(process) == "ready"
        admin.execute("SELECT pgfence_evict_lease_v1(%s, 'me', 'test', NULL)", [name])
        _out, err = process.communicate(timeout=20)
    assert process.returncode == 76
    assert "evicted" in err
    assert cli.run("--once-per", YEARLY, name, "--", "true").returncode == 0


# ---------------------------------------------------------------- what the command is told


def test_the_command_knows_its_slot(cli: Cli, name: str) -> None:
    """PGFENCE_SLOT names it by its beginning, the same for every attempt and on every host."""
    done = cli.run("--json", "--once-per", "day", "--tz", "Europe/Vienna", name, "--", "sh", "-c", "echo $PGFENCE_SLOT")
    slot = datetime.fromisoformat(done.stdout.strip())
    assert slot.utcoffset() == timedelta(0)
    local = slot.astimezone(ZoneInfo("Europe/Vienna"))
    assert (local.hour, local.minute, local.second) == (0, 0, 0)
    assert timedelta(0) <= datetime.now(slot.tzinfo) - slot < timedelta(hours=26)
    report = json.loads(done.stderr)
    assert (report["slot"], report["resumed"], report["token"]) == (done.stdout.strip(), False, 1)
    assert (report["outcome"], report["exit_code"], report["key"]) == ("ran", 0, None)


@pytest.mark.parametrize("period", ["minute", "@hourly", "30 2 * * 1-5"])
def test_slots_come_in_words_and_in_cron_lines(cli: Cli, name: str, period: str) -> None:
    """Each form names a slot that has begun."""
    done = cli.run("--once-per", period, name, "--", "sh", "-c", "echo $PGFENCE_SLOT")
    assert done.returncode == 0
    slot = datetime.fromisoformat(done.stdout.strip())
    assert timedelta(0) <= datetime.now(slot.tzinfo) - slot < timedelta(days=4)


# ---------------------------------------------------------------- bad input


@every_row(
    ("words", "said"),
    [
        (["--once-per", "fortnight"], "--once-per='fortnight'"),
        (["--once-per", "week"], "'0 7 * * 1-5'. Or use one of: day, hour, minute"),
        (["--once-per", "61 * * * *"], "bad minute"),
        (["--once-per", "0 0 30 2 *"], "bad day-of-month"),
        (["--once-per", "0 0 2 * * *"], "6 fields, not five"),
        (["--once-per", "@reboot"], "--once-per='@reboot' is not a time"),
        (["--once-per", "day", "--tz", "Mars/Base"], "--tz='Mars/Base'"),
        (["--once-per", "day", "--tz", ""], "--tz=''"),
        (["--tz", "UTC"], "--tz needs --once-per"),
        (["--once-per", "day", "--lease"], "not both"),
        (["--once-per", "day", "--min-hold", "5"], "--min-hold needs --lease"),
        (["--once-per", "day", "--ttl", "0"], "--ttl"),
        (["--once-per", "day", "--ttl", "-1"], "--ttl must be from 0.3 to 86400 seconds, not -1"),
        (["--lease", "--ttl", "0.2"], "--ttl must be from 0.3 to 86400 seconds, not 0.2"),
        (["--once-per", "day", "--ttl", "nan"], "--ttl"),
        (["--once-per", "day", "--ttl", "90000"], "--ttl"),
        (["--once-per", "day", "--max-hold", "0"], "--max-hold"),
        (["--ttl", "5"], "--ttl needs --lease"),
        (["--max-hold", "5"], "--max-hold needs --lease"),
        (["--lease", "--ttl", "2", "--min-hold", "3"], "--min-hold"),
    ],
)
def test_terms_that_cannot_be_used_are_misuse(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C100: 64, one line that names the option, and no server was asked."""
    monkeypatch.setenv("DATABASE_URL", "postgresql://nobody@127.0.0.1:1/none")
    assert pgfence.cli.main(["run", *words, "job", "--", "true"]) == 64
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_without_tables_it_says_what_makes_them(cli: Cli, name: str) -> None:
    """78 and the command that helps, not a traceback."""
    program = f"from sqlalchemy import create_engine; import pgfence; url = {cli.environment['DATABASE_URL']!r}"
    program += ".replace('postgresql:', 'postgresql+psycopg:'); engine = create_engine(url)"
    program += "; pgfence.configure(engine, prefix='absent_')"
    (cli.folder / "elsewhere.py").write_text(program)
    done = cli.run("--engine", "elsewhere:engine", "--once-per", "day", name, "--", "true")
    assert done.returncode == 78
    assert "pgfence install --prefix absent_" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("way", "code", "ran"), [("fail", 69, ""), ("skip", 0, ""), ("run", 0, "ran\n")])
def test_without_a_server_the_slot_is_unknown(cli: Cli, way: str, code: int, ran: str) -> None:
    """C021: no server is neither done nor free; only `--on-unreachable` may decide otherwise."""
    done = cli.run(
        "--on-unreachable", way, "--once-per", "day", "job", "--", "echo", "ran",
        DATABASE_URL="postgresql://nobody@127.0.0.1:1/none",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, ran)


def test_each_namespace_has_its_own_slots(cli: Cli, name: str, admin: psycopg.Connection[Any]) -> None:
    """The same name in another namespace is another job."""
    assert cli.run("--once-per", YEARLY, name, "--", "true").returncode == 0
    assert cli.run("--once-per", YEARLY, "--namespace", "shop", name, "--", "true").returncode == 0
    names = admin.execute("SELECT name FROM pgfence_slot WHERE name LIKE '%%' || %s ORDER BY name", [name]).fetchall()
    assert {stored for (stored,) in names} == {name, f"shop\x1f{name}"}
