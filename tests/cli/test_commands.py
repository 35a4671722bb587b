"""The parts of the command line that need no server: help, version, keys, and every kind of misuse."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from importlib.metadata import version
from pathlib import Path

import click
import pytest

import pgfence.cli.app
import pgfence.cli.keys
from pgfence.cli import main
from pgfence.cli.codes import Code
from pgfence.compat import pals_key, with_advisory_lock_key
from pgfence.keys import LockKey
from support.rows import every_row

HELD = LockKey.of("nightly-billing", namespace="shop")


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server in the environment, plain text, and what the parser changes put back."""
    for name in ("DATABASE_URL", "PGSERVICE", "PGHOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_version_prints_the_version_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    """`pgfence --version` is one line."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pgfence {version('pgfence')}\n"


@every_row("words", [["--help"], ["run", "--help"], ["run", "-h"], ["key", "--help"]])
def test_help_is_not_misuse(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Asking for help ends with 0 and says how to write the command."""
    assert main(words) == 0
    assert "Usage: pgfence" in capsys.readouterr().out


def test_help_of_run_ends_with_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    """Options stand under headings; then come three examples and every exit code that `pgfence run` has of its own."""
    assert main(["run", "--help"]) == 0
    options, _, end = capsys.readouterr().out.partition("\nExamples:\n")
    headings = [line for line in options.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[0] == "Arguments:"
    assert len(headings) == 6
    examples, _, codes = end.partition("\nExit codes:\n")
    assert examples.count("    pgfence run ") == 3
    listed = {line.split()[0] for line in codes.splitlines()}
    assert listed >= {str(int(code)) for code in Code if code not in {Code.NOBODY, Code.DECLINED, Code.OUTPUT}}


@every_row(
    "words",
    [[name] for name in ("run", "elect", "install", "init", "evict", "keys", "purge", "key", "demo")]
    + [["keys", "free"]],
)
def test_help_of_each_command_says_when_to_use_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Each help text has a sentence about its use, and ends with exit codes."""
    assert main([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\n  (Use|Run) it ", out)
    assert "\nExit codes:\n  0" in out


def test_help_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    """No escape sequence, box or markup, whether or not a terminal is there."""
    for words in (["--help"], ["run", "--help"]):
        assert main(words) == 0
        assert capsys.readouterr().out.isascii()


def test_without_the_extra_it_says_what_to_install(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pip install pgfence` brings no Click: the command prints one line with what to install and exits with 78."""
    monkeypatch.setitem(sys.modules, "click", None)
    assert main(["run", "x", "--", "true"]) == 78
    assert (
        capfd.readouterr().err
        == "pgfence: the packages of the command line are not installed: run pip install 'pgfence[cli]'\n"
    )


def test_help_of_run_says_what_it_excludes(capsys: pytest.CaptureFixture[str]) -> None:
    """As the table in the docs does: a plain lock and a lease of one name do not meet."""
    assert main(["run", "--help"]) == 0
    assert (
        "excludes other runs, AdvisoryLock and TransactionLock with that name. With --lease or --once-per, it excludes Lease and Once instead."
        in " ".join(capsys.readouterr().out.split())
    )


def test_python_m_pgfence_is_the_same_program() -> None:
    """`python -m pgfence` works where no script is on PATH."""
    done = subprocess.run(
        [sys.executable, "-m", "pgfence", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("pgfence ")


def test_key_shows_what_pg_locks_shows(capsys: pytest.CaptureFixture[str]) -> None:
    """`pgfence key` prints the number and its two halves, unsigned, as pg_locks has them."""
    assert main(["key", "nightly-billing", "--namespace", "shop"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert int(shown["key"]) == HELD.value
    assert (int(shown["classid"]) << 32 | int(shown["objid"])) == HELD.value % 2**64
    assert shown["objsubid"] == "1"


def test_key_has_a_form_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints one object."""
    assert main(["key", "nightly-billing", "--namespace", "shop", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown.keys() == {"name", "namespace", "key", "classid", "objid", "objsubid", "sql"}
    assert (shown["name"], shown["namespace"], shown["key"]) == ("nightly-billing", "shop", HELD.value)


@every_row(
    ("words", "said"),
    [
        ([], "Usage"),
        (["no-such-command"], "no such command 'no-such-command'; see `pgfence --help`"),
        (["run"], "--"),
        (["run", "x", "true"], "write -- before the command; see `pgfence run --help`"),
        (["run", "x", "--"], "COMMAND"),
        (["run", "--", "true"], "write NAME before --; see `pgfence run --help`"),
        (["run", "--", "x", "true"], "write NAME before --"),
        (["run", "night", "job", "--", "true"], "write one NAME before --, not night job; see"),
        (["run", "--nosuch", "x", "--", "true"], "no such option '--nosuch'; see `pgfence run --help`"),
        (["run", "--waits", "5", "x", "--", "true"], "no such option '--waits' (did you mean --wait?); see"),
        (["key", "--dns", "x"], "(did you mean --dsn?)"),
        (["realease-leaked"], "no such command 'realease-leaked' (did you mean release-leaked?); see `pgfence --help`"),
        (["keys", "fre"], "(did you mean free?); see `pgfence keys --help`"),
        (["run", "--wait", "5m", "x", "--", "true"], "'5m' is not a number of seconds; see `pgfence run --help`"),
        (
            ["run", "--lease", "--max-hold", "0", "x", "--", "true"],
            "--max-hold must be more than 0 seconds; omit it for an unlimited hold",
        ),
        (["run", "--lease", "--min-hold", "61", "x", "--", "true"], "Increase --ttl to at least --min-hold"),
        (["run", "--wait", "-1", "x", "--", "true"], "--wait must be 0 or more seconds, not -1"),
        (["run", "--wait", "nan", "x", "--", "true"], "--wait"),
        (["run", "--grace", "-1", "x", "--", "true"], "--grace"),
        (["run", "-n", "-w", "5", "x", "--", "true"], "--nonblock"),
        (["run", "-E", "256", "x", "--", "true"], "--conflict-exit-code"),
        (["run", "-E", "4", "--on-busy", "ok", "x", "--", "true"], "--on-busy"),
        (["run", "--on-lost", "shrug", "x", "--", "true"], "--on-lost"),
        (["run", "--dsn", "postgresql://h/d", "--engine", "a:b", "x", "--", "true"], "--dsn or --engine"),
        (["run", "", "--", "true"], "empty"),
        (["key", ""], "empty"),
        (["key", "x", "--engine", "shop.db:engine"], "--engine needs --who"),
        (
            ["key", "--who", "5000000000,1"],
            "'5000000000,1' is not the key of a lock, because it does not fit into a pair of 32-bit",
        ),
        (["key", "a\x1fb"], "U+001F"),
        (["install", "--sql", "--schema", ""], "--schema is empty: give a name, or omit --schema"),
        (
            ["ps", "--dsn", "postgresql://h/d", "--namespace", "a\x1fb", "--prefix", "x"],
            "--namespace: a namespace must not contain U+001F",
        ),
        (
            ["ps", "--dsn", "postgresql://h/d", "--namespace", "a", "--prefix", "x" * 41],
            "error: --prefix must not be longer than 40",
        ),
        (["demo", "--processes", "2"], "--processes must be from 3 to 32, not 2"),
        (["demo", "--seconds", "0.1"], "--seconds must be at least 0.5, not 0.1"),
    ],
)
def test_misuse_has_one_code_and_no_traceback(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Any mistake on the command line exits with 64 and prints one line without a traceback."""
    assert main(words) == 64
    out, err = capfd.readouterr()
    assert said in out + err
    assert not words or (err.startswith("pgfence: error: ") and err.count("\n") == 1)


@every_row(
    ("url", "said"),
    [
        ("postgresql://ann:s3cret@h:port/d", "not a database URL"),
        ("postgresql://ann:s3cret@h1:1,h2:2/d", "not a database URL"),
        ("ann:s3cret@h/d", "not a database URL"),
        ("host=h password=s3cret", "not a database URL"),
        ("mysql://ann:s3cret@h/d", "needs PostgreSQL"),
        ("postgresql+asyncpg://ann:s3cret@h/d", "async driver"),
        ("postgresql+psycopg_async://ann:s3cret@h/d", "async driver"),
        ("postgresql+pg8000://ann:s3cret@h/d", "psycopg and psycopg2"),
        ("postgresql+nosuch://ann:s3cret@h/d", "psycopg and psycopg2"),
    ],
)
@every_row("source", ["--dsn", "DATABASE_URL"])
def test_a_bad_url_is_named_by_its_source_and_never_shown(
    source: str, url: str, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message says where the URL came from and what is wrong, and holds no part of it."""
    monkeypatch.setenv("DATABASE_URL", url if source == "DATABASE_URL" else "")
    options = ["--dsn", url] if source == "--dsn" else []
    assert main(["run", *options, "x", "--", "true"]) == 64
    err = capfd.readouterr().err
    assert said in err
    assert source in err
    assert "s3cret" not in err
    assert err.count("\n") == 1


@every_row(
    ("path", "said"),
    [
        ("shop", "package.module:attribute"),
        ("shop:", "package.module:attribute"),
        ("no_such_shop:engine", "No module named 'no_such_shop'"),
        ("broken_shop:engine", "KeyError: 'SHOP_URL'"),
        ("shop:nothing", "no attribute 'nothing'"),
        ("shop:number", "neither an Engine nor a function that returns one, but of the type int"),
        ("shop:fails", "RuntimeError: no vault"),
        ("shop:later", "'shop:later' is a coroutine function"),
        ("shop:nothing_at_all", "the function of --engine 'shop:nothing_at_all' must return an Engine, not NoneType"),
        ("shop:aio", "AsyncEngine"),
        ("shop:make_aio", "AsyncEngine"),
    ],
)
def test_an_engine_that_cannot_be_used_is_explained(
    path: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--engine` finds modules where the command is typed, and says in one line why one is of no use."""
    (tmp_path / "shop.py").write_text(
        "from sqlalchemy.ext.asyncio import create_async_engine\n"
        "number = 7\n"
        "def fails(): raise RuntimeError('no vault')\n"
        "async def later(): ...\n"
        "def nothing_at_all(): ...\n"
        "aio = create_async_engine('postgresql+asyncpg://h/d')\n"
        "def make_aio(): return aio\n"
    )
    (tmp_path / "broken_shop.py").write_text("import os\nos.environ['SHOP_URL']\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    assert main(["run", "--engine", path, "x", "--", "true"]) == 64
    err = capfd.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@every_row(
    ("url", "said"),
    [
        ("postgresql://h/d", "no PostgreSQL driver is installed"),
        ("postgres://h/d", "no PostgreSQL driver is installed"),
        ("postgresql+psycopg2://h/d", "the driver psycopg2 is not installed"),
    ],
)
def test_a_missing_driver_is_named_with_the_way_to_get_one(
    url: str, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no driver can be imported, the message holds the command that installs one."""
    for driver in ("psycopg", "psycopg2"):
        monkeypatch.setitem(sys.modules, driver, None)
    assert main(["run", "--dsn", url, "x", "--", "true"]) == 64
    err = capfd.readouterr().err
    assert said in err
    assert "run pip install 'pgfence[psycopg" in err


def test_a_driver_without_its_library_is_not_called_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with psycopg without libpq: the message has the reason, because `pip list` shows that the driver is installed."""
    (tmp_path / "psycopg2.py").write_text("raise ImportError('libpq library not found')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "psycopg2", raising=False)
    assert main(["run", "--dsn", "postgresql+psycopg2://h/d", "x", "--", "true"]) == 64
    assert "the driver psycopg2 cannot be imported (libpq library not found): run pip install" in capfd.readouterr().err


def test_an_unexpected_error_has_its_own_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug shows a traceback and ends with 70, which no command is likely to use."""

    def broken(**_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pgfence.cli.app.pgfence, "main", broken)
    assert main(["run"]) == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_reference_lists_every_option() -> None:
    """Each option of each command is in the section of docs/reference/cli.md about that command."""
    page = (Path(__file__).parents[2] / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (pgfence [a-z -]+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    context = click.Context(pgfence.cli.app.pgfence)
    commands = {
        f"pgfence {name}": pgfence.cli.app.pgfence.get_command(context, name) for name in pgfence.cli.app.MODULES
    }
    commands["pgfence keys free"] = pgfence.cli.keys.keys.commands["free"]
    assert sections.keys() == commands.keys()
    missing = [
        f"{name}: {option}"
        for name, command in commands.items()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
        if f"`{option}" not in sections[name]
    ]
    assert missing == []


@every_row(
    ("words", "code", "said"),
    [
        (["--who", "72707369"], 0, "key 72707369: Prisma migration"),
        (["--who", "77431708279161"], 0, "key 77431708279161: Flyway migration"),
        (["--who=-5616906625745643920", "b", "a"], 0, "pgfence lock 'a'"),
        ([f"--who={HELD.value}", "shop:nightly-billing"], 0, "in the namespace 'shop'"),
        (
            [f"--who={HELD.value}", "nightly-billing", "--namespace", "shop"],
            0,
            "pgfence lock 'nightly-billing' in the namespace 'shop'",
        ),
        ([f"--who={pals_key('app', 'job').value}", "app.job"], 0, "pals lock 'job'"),
        (["--who", "{},{}".format(*with_advisory_lock_key("a").halves), "a"], 0, "with_advisory_lock"),
        (["--who", str(2053462845 * zlib.crc32(b"shop")), "shop"], 0, "Rails migration"),
        (
            ["--who", str(zlib.crc32(b"public\0schema_migrations\0shop") * 1486364155 % 2**32), "shop"],
            0,
            "golang-migrate",
        ),
        (["--who", "5", "a"], 67, "key 5 is not known."),
        (["--who", "x"], 64, "a pair of numbers"),
        (["--who", str(2**64)], 64, "64-bit"),
        ([], 64, "NAME is missing"),
        (["a", "b"], 64, "give one NAME, not 2"),
    ],
)
def test_a_key_is_recognized(words: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Keys of migration tools, and of names in the form of several libraries; an unknown one is 67."""
    assert main(["key", *words]) == code
    found = capfd.readouterr()
    assert said in found.out + found.err
