"""`pgfence keys` and `pgfence keys free`: what they show, that one asks, and how they end."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pgfence._sql import stuck_keys as statements
from pgfence.cli import keys as command
from pgfence.cli import main
from pgfence.keys import SEPARATOR, qualify_name
from support.rows import every_row

if TYPE_CHECKING:
    import psycopg

pytestmark = pytest.mark.usefixtures("tables")

CLAIM = "11111111-2222-3333-4444-555555555555"
WHY = ("--reason", "hung since 3 a.m.", "--actor", "ann")
_CLAIM = "SELECT attempt FROM pgfence_claim_effect_v1(%s, %s, NULL, %s, %s, 3600, true, 'worker-7', 'host-1', 7)"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    """The test's server in the environment, plain text, and what the parser changes put back."""
    monkeypatch.setenv("DATABASE_URL", dsn)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "path", [*sys.path])


class Terminal(io.StringIO):
    """A standard input that is a terminal."""

    def isatty(self) -> bool:
        return True


def answer(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(line))


def claim(admin: psycopg.Connection[Any], scope: str, key: str = "k", ttl: float = 60) -> int:
    number: int = admin.execute(_CLAIM, [scope, key, CLAIM, ttl]).fetchone()[0]
    admin.execute("SELECT pgfence_save_step_v1(%s, %s, %s, 'charge', '1')", [scope + SEPARATOR + key, CLAIM, number])
    return number


def lose(admin: psycopg.Connection[Any], scope: str) -> None:
    admin.execute("UPDATE pgfence_idempotency_key SET locked_until = now() - interval '1 h' WHERE scope = %s", [scope])


def state(admin: psycopg.Connection[Any], scope: str, key: str = "k") -> tuple[Any, ...]:
    """Status and attempt of a key, and how many lines the audit has about it."""
    return admin.execute(
        "SELECT status, attempt, (SELECT count(*) FROM pgfence_audit WHERE resource = %s)"
        " FROM pgfence_idempotency_key WHERE scope = %s AND key = %s",
        [scope + SEPARATOR + key, scope, key],
    ).fetchone()


def test_the_table_has_a_line_for_each_key(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """State, attempt, times, who, names of steps, and scope and key in full; exit code 0."""
    claim(admin, name, "x" * 255)
    lose(admin, name)
    claim(admin, f"{name}:other")
    assert main(["keys", "--scope", name]) == 0
    titles, *lines = capfd.readouterr().out.splitlines()
    assert titles.split() == ["STATE", "ATTEMPT", "BEGUN", "LOCKED", "UNTIL", "OWNER", "STEPS", "DONE", "SCOPE", "KEY"]
    lost, running = (line.split() for line in lines)
    assert (lost[:2], lost[4:]) == (["lost", "1"], ["worker-7@host-1:7", "charge", name, "x" * 255])
    assert (running[0], running[-2:]) == ("running", [f"{name}:other", "k"])


def test_for_programs_there_is_one_object(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """--json has the same keys, with times in ISO 8601 and a zone; in a namespace the scope is the application's."""
    claim(admin, qualify_name(name, "shop"))
    assert main(["keys", "--scope", name, "--namespace", "shop", "--json"]) == 0
    (found,) = json.loads(capfd.readouterr().out)["keys"]
    assert all("+" in found.pop(at) for at in ("since", "locked_until", "expires_at"))
    attempt = {"state": "running", "attempt": 1, "steps": ["charge"], "owner": "worker-7", "host": "host-1", "pid": 7}
    assert found == {"scope": name, "key": "k"} | attempt


def test_without_stuck_keys_the_output_says_so(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0: there is nothing to do; too young a key is none either. Of keys not asked for it says nothing."""
    claim(admin, name)
    for options, said in (
        ((), f"No unfinished keys without a namespace among those whose scope begins with '{name}:none'."),
        (("--older-than", "3600"), f" with '{name}:none' and that were first claimed at least 3600 s ago."),
        (
            ("--namespace", "shop"),
            f"No unfinished keys in the namespace 'shop' among those whose scope begins with '{name}:none'.",
        ),
    ):
        assert main(["keys", "--scope", f"{name}:none", *options]) == 0
        out = capfd.readouterr().out
        assert said in out and "Other keys were not searched." in out
    assert main(["keys", "--namespace", name]) == 0
    assert capfd.readouterr().out == f"No unfinished keys in the namespace '{name}'.\n"
    assert main(["keys", "--scope", name, "--older-than", "3600", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"keys": []}


def test_with_yes_it_frees_and_says_what(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0, the attempt on stdout, one line in the audit."""
    claim(admin, name)
    assert main(["keys", "free", name, "k", *WHY, "--yes"]) == 0
    out = capfd.readouterr().out
    assert "attempt 1 of worker-7 on host-1 (pid 7), running" in out
    assert "The next caller runs attempt 2" in out
    assert state(admin, name) == ("free", 1, 1)
    told = admin.execute("SELECT actor, reason FROM pgfence_audit WHERE resource = %s", [name + SEPARATOR + "k"])
    assert told.fetchone() == ("ann", "hung since 3 a.m.")


def test_a_dry_run_only_shows(name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """--dry-run needs no confirmation, shows the attempt, ends with 0 and changes nothing."""
    claim(admin, name)
    lose(admin, name)
    assert main(["keys", "free", name, "k", *WHY, "--dry-run", "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert (shown["outcome"], shown["exit_code"], shown["found"]["state"]) == ("seen", 0, "lost")
    assert "Nothing was done" in shown["message"]
    assert state(admin, name) == ("in_progress", 1, 0)


@pytest.mark.parametrize(
    ("line", "code", "status"), [("y\n", 0, "free"), ("n\n", 77, "in_progress"), ("", 77, "in_progress")]
)
def test_at_a_terminal_it_asks(
    name: str,
    admin: psycopg.Connection[Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    code: int,
    status: str,
) -> None:
    """The attempt and the question go to stderr; only a yes frees, and the end of the input is a no."""
    claim(admin, name)
    answer(monkeypatch, line)
    assert main(["keys", "free", name, "k", *WHY]) == code
    assert "done: charge" in capfd.readouterr().err
    assert state(admin, name)[0] == status


def test_an_attempt_that_began_meanwhile_was_not_meant(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the yes another attempt took over: exit code 75, it is shown, and it works on."""
    claim(admin, name)

    def find(connection: Any, order: Any) -> Any:
        found = look(connection, order)
        lose(admin, name)
        admin.execute(_CLAIM, [name, "k", CLAIM.replace("1", "9"), 60])
        return found

    look = statements.find
    monkeypatch.setattr(command.statements, "find", find)
    assert main(["keys", "free", name, "k", *WHY, "--yes"]) == 75
    assert "attempt 2 of worker-7" in capfd.readouterr().err
    assert state(admin, name) == ("in_progress", 2, 0)


def test_a_key_under_which_nothing_is_stuck(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A mistyped key ends with 67, with and without --dry-run, before any question."""
    assert main(["keys", "free", name, "k", *WHY, "--dry-run"]) == 67
    assert main(["keys", "free", name, "k", *WHY, "--yes"]) == 67
    assert "Nothing is stuck under" in capfd.readouterr().out


@every_row(
    ("words", "said"),
    [
        (["--older-than", "-1"], "--older-than"),
        (["--json", "free", "s", "k", *WHY], "write --json after `free`"),
        (["--scope", "s", "free", "s", "k", *WHY], "`pgfence keys free` has no option --scope: omit it"),
        (["--older-than", "9", "free", "s", "k", *WHY], "`pgfence keys free` has no option --older-than: omit it"),
        (["free", "s", "k", *WHY], "--yes"),
        (["free", "s", "k", "--reason", " ", "--yes"], "reason"),
        (["free", "s", "", *WHY, "--yes"], "the key must not be empty"),
        (["free", "s", "k"], "--reason"),
        (["--prefix", "x" * 60], "--prefix"),
    ],
)
def test_misuse_is_rejected_before_anything_is_done(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 64, and what to change; also for options that precede the command they are meant for."""
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert main(["keys", *words]) == 64
    assert said in capfd.readouterr().err


def test_servers_that_cannot_be_used_have_codes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """No response is 69, missing tables are 78 and the command that creates them; for programs too."""
    for words in (["keys"], ["keys", "free", "s", "k", *WHY, "--yes"]):
        assert main([*words, "--prefix", "no_such_"]) == 78
        assert "pgfence install --prefix no_such_" in capfd.readouterr().err
        assert main([*words, "--dsn", "postgresql://nobody@127.0.0.1:1/nothing"]) == 69
        assert "127.0.0.1:1" in capfd.readouterr().err
