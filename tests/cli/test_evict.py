"""`pgfence evict`: shows, asks, evicts; and what each way of not doing it becomes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import create_engine

from pgfence import Election
from pgfence.cli import main
from pgfence.keys import LockKey, qualify_name
from support.locking import elsewhere, is_free
from support.rows import every_row
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgfence import Term

pytestmark = pytest.mark.usefixtures("tables")

LEASE = "11111111-2222-3333-4444-555555555555"
WHY = ("--reason", "hung since 3 a.m.", "--actor", "ann")


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


def lease(admin: psycopg.Connection[Any], name: str, prefix: str = "pgfence_") -> int:
    granted, token = admin.execute(
        f"SELECT granted, token FROM {prefix}acquire_lease_v1(%s, %s, 60, 0, 0, NULL, 'worker-7', 'host-1', 7, 'close', NULL)",
        [name, LEASE],
    ).fetchone()
    assert granted
    return token


def audited(admin: psycopg.Connection[Any], name: str, prefix: str = "pgfence_") -> list[tuple[Any, ...]]:
    return admin.execute(f"SELECT actor, reason FROM {prefix}audit WHERE resource = %s", [name]).fetchall()


def newest(admin: psycopg.Connection[Any], name: str) -> int:
    return admin.execute("SELECT token FROM pgfence_lease WHERE name = %s", [name]).fetchone()[0]


def test_with_yes_it_evicts_and_says_whom(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0, the holder and the tokens on stdout, one line in the audit."""
    token = lease(admin, name)
    assert main(["evict", name, *WHY, "--yes"]) == 0
    out = capfd.readouterr().out
    assert "worker-7 on host-1" in out
    assert f"From now on, token {token} is rejected; the newest token is {token + 1}." in out
    assert audited(admin, name) == [("ann", "hung since 3 a.m.")]
    assert newest(admin, name) == token + 1


def test_a_dry_run_only_shows(name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]) -> None:
    """--dry-run needs no confirmation, names the holder, ends with 0 and changes nothing."""
    token = lease(admin, name)
    assert main(["evict", name, *WHY, "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert "worker-7 on host-1" in out
    assert "Nothing was done" in out
    assert (audited(admin, name), newest(admin, name)) == ([], token)
    admin.execute("SELECT pgfence_release_lease_v1(%s, %s, %s)", [name, LEASE, token])
    assert main(["evict", name, *WHY, "--dry-run"]) == 0
    assert f"would increment the token, so that PostgreSQL rejects token {token}." in capfd.readouterr().out


def test_answering_yes_evicts(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal it shows the holder and asks; the question goes to stderr."""
    lease(admin, name)
    answer(monkeypatch, "y\n")
    assert main(["evict", name, *WHY]) == 0
    assert "worker-7" in capfd.readouterr().err
    assert len(audited(admin, name)) == 1


@pytest.mark.parametrize("line", ["n\n", "\n", ""])
def test_any_other_answer_does_nothing(
    name: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """C021: without confirmation nothing is freed, and the exit code says so; the end of the input is a no."""
    token = lease(admin, name)
    answer(monkeypatch, line)
    assert main(["evict", name, *WHY]) == 77
    assert (audited(admin, name), newest(admin, name)) == ([], token)


def test_without_a_terminal_it_does_not_ask(name: str, dsn: str, admin: psycopg.Connection[Any]) -> None:
    """C021: in a script without --yes it is a misuse that names the two ways out, and nothing is done."""
    token = lease(admin, name)
    done = subprocess.run(
        [sys.executable, "-m", "pgfence", "evict", name, *WHY, "--dsn", dsn],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 64
    assert "--yes" in done.stderr
    assert "--dry-run" in done.stderr
    assert (audited(admin, name), newest(admin, name)) == ([], token)


def test_a_session_lock_is_freed(
    name: str, dsn: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """C021: the holder is shown with its application and backend, its session is ended, the lock is free."""
    with elsewhere(dsn, name, label="other-deploy") as session:
        pid = session.info.backend_pid
        assert main(["evict", name, *WHY, "--yes"]) == 0
        assert f"other-deploy on 127.0.0.1 (backend {pid})" in capfd.readouterr().out
        assert is_free(admin, name)
    assert len(audited(admin, name)) == 1


def test_a_name_without_a_holder(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A mistyped name ends with 67, with and without --dry-run, before any question."""
    assert main(["evict", name, *WHY, "--dry-run"]) == 67
    assert main(["evict", name, *WHY, "--yes"]) == 67
    assert "nothing to evict" in capfd.readouterr().out


def test_a_released_lease_is_fenced_off(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Evicting a free lease still raises its token, so its last holder is rejected from now on."""
    token = lease(admin, name)
    admin.execute("SELECT pgfence_release_lease_v1(%s, %s, %s)", [name, LEASE, token])
    assert main(["evict", name, *WHY, "--yes"]) == 0
    out = capfd.readouterr().out
    assert f"No lease and no session holds {name!r} at this moment; the last token of this name is {token}." in out
    assert newest(admin, name) == token + 1


def test_a_writer_that_stays_inside_is_busy(
    name: str, dsn: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """75 after 2 s, with the server process that is inside; nothing is done."""
    token = lease(admin, name)
    with psycopg.connect(dsn, application_name="hung-worker") as writer:
        writer.execute("SELECT pgfence_enter_gates_v1(ARRAY[%s], ARRAY[%s::bigint])", [name, token])
        assert main(["evict", name, *WHY, "--yes"]) == 75
        assert "hung-worker" in capfd.readouterr().err
        assert (audited(admin, name), newest(admin, name)) == ([], token)


def test_a_holder_that_came_after_the_confirmation_is_not_evicted(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the operator thinks, the holder leaves and another one comes: that one stays, and the exit code is 75."""
    token = lease(admin, name)

    def change() -> str:
        admin.execute("SELECT pgfence_release_lease_v1(%s, %s, %s)", [name, LEASE, token])
        lease(admin, name)
        return "y\n"

    terminal = Terminal()
    monkeypatch.setattr(terminal, "readline", lambda *_: change())
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["evict", name, *WHY]) == 75
    assert f"the holder of {name!r} has changed" in capfd.readouterr().err
    assert (audited(admin, name), newest(admin, name)) == ([], token + 1)


def test_json_output_is_complete(
    name: str, dsn: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """--json is one object on stdout, in every outcome."""
    assert main(["evict", name, *WHY, "--yes", "--json"]) == 67
    told = json.loads(capfd.readouterr().out)
    assert (told["outcome"], told["exit_code"], told["holders"], told["token"]) == ("nobody", 67, [], None)
    token = lease(admin, name)
    with elsewhere(dsn, name, label="other-deploy"):
        assert main(["evict", name, *WHY, "--yes", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["outcome"], told["name"], told["token"], told["newest"]) == ("evicted", name, token, token + 1)
    assert [holder["kind"] for holder in told["holders"]] == ["lease", "advisory"]
    assert told["holders"][0]["owner"] == "worker-7"
    assert told["holders"][0]["token"] == token
    assert told["holders"][1]["application_name"] == "other-deploy"


def test_namespace_schema_and_prefix_find_the_row(
    name: str, dsn: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """The three options name the application's tables and names, as its configure() does."""
    where = ["--schema", "evict_cli", "--prefix", "my_"]
    assert main(["install", *where]) == 0
    whole = qualify_name(name, "shop")
    lease(admin, whole, "evict_cli.my_")
    assert main(["evict", name, *WHY, "--yes", *where]) == 67
    assert main(["evict", name, *WHY, "--yes", *where, "--namespace", "shop"]) == 0
    assert f"'{name}' is held by a lease of worker-7" in capfd.readouterr().out
    assert audited(admin, whole, "evict_cli.my_") == [("ann", "hung since 3 a.m.")]
    with elsewhere(dsn, LockKey.of(name, namespace="shop")):
        assert main(["evict", name, *WHY, "--dry-run", *where, "--namespace", "shop"]) == 0
    assert "(backend" in capfd.readouterr().out


def test_an_application_that_configured_something_else_is_a_misuse(
    name: str, dsn: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """--engine with options that its configure() contradicts is 64, not an eviction somewhere else."""
    (tmp_path / "evict_app.py").write_text(
        "from sqlalchemy import create_engine\nimport pgfence\n"
        f"engine = create_engine({dsn.replace('postgresql:', 'postgresql+psycopg:')!r})\n"
        "pgfence.configure(engine, namespace='shop')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["evict", name, *WHY, "--dry-run", "--engine", "evict_app:engine", "--prefix", "other_"]) == 64
    assert main(["evict", name, *WHY, "--dry-run", "--engine", "evict_app:engine"]) == 67
    assert "--prefix" in capfd.readouterr().err
    sys.modules.pop("evict_app")


def test_the_name_of_a_semaphore_is_a_misuse(
    name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """Its permits have names of their own, which the message gives."""
    lease(admin, f"{name}#1")
    admin.execute("UPDATE pgfence_lease SET kind = 'permit' WHERE name = %s", [f"{name}#1"])
    assert main(["evict", name, *WHY, "--yes"]) == 64
    assert f"'{name}#1'" in capfd.readouterr().err


@every_row(
    "words",
    [
        ["evict"],
        ["evict", "any"],
        ["evict", "any", "--reason", " ", "--yes"],
        ["evict", "any", "--reason", "hung", "--actor", "", "--yes"],
        ["evict", "", "--reason", "hung", "--yes"],
        ["evict", "x" * 256, "--reason", "hung", "--yes"],
        ["evict", "any", "--reason", "hung", "--yes", "--dsn", "sqlite://"],
    ],
)
def test_misuse_is_64_and_one_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """A missing reason, an unusable name and similar mistakes are reported on stderr."""
    assert main(words) == 64
    assert capfd.readouterr().err


def test_missing_tables_and_rights_are_reported(
    name: str, role: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """78, with the command that makes the tables or the GRANT; no password in it."""
    assert main(["evict", name, *WHY, "--yes", "--prefix", "absent_"]) == 78
    assert "pgfence install --prefix absent_" in capfd.readouterr().err
    login = role()
    assert main(["evict", name, *WHY, "--yes", "--dsn", login]) == 78
    err = capfd.readouterr().err
    assert "GRANT" in err
    assert login.split("@")[0].rsplit(":", 1)[1] not in err


def test_no_server_is_69(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A server that does not respond is never reported as a free name; the message has no password."""
    words = ["evict", name, *WHY, "--yes", "--dsn", "postgresql://nobody:secret@127.0.0.1:1/nothing"]
    assert main(words) == 69
    assert "secret" not in capfd.readouterr().err


@pytest.fixture
def leader(name: str, dsn: str) -> Iterator[Term]:
    """The leader of an election, whose owner is pod-1."""
    engine = create_engine(dsn.replace("postgresql://", "postgresql+psycopg://"))
    with Election(engine, name, ttl=60).lead(owner="pod-1", on_loss="flag") as term:
        yield term
    engine.dispose()


def test_asking_shows_whom_it_asked(
    leader: Term, name: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """--ask ends with 0, shows the leader and records the request; the leader resigns, and its token stays valid."""
    assert main(["evict", name, "--ask", *WHY, "--yes"]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"{name!r} is held by a term of pod-1 ")
    assert out.endswith("The leader was asked to resign. The request is recorded in the audit table.\n")
    eventually(lambda: leader.lost)
    assert leader.loss_reason == "resigned"
    assert audited(admin, name) == [("ann", "hung since 3 a.m.")]
    assert newest(admin, name) == leader.token


def test_asking_with_json_is_one_object(leader: Term, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The object has the fields of an eviction; no newer token is granted."""
    assert main(["evict", name, "--ask", *WHY, "--yes", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["outcome"], told["exit_code"], told["token"], told["newest"]) == ("asked", 0, leader.token, None)
    assert [(holder["kind"], holder["owner"]) for holder in told["holders"]] == [("term", "pod-1")]


def test_asking_can_be_tried_or_declined(
    leader: Term,
    name: str,
    admin: psycopg.Connection[Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """--dry-run shows the leader, a "no" ends with 77; neither asks the leader."""
    assert main(["evict", name, "--ask", *WHY, "--dry-run"]) == 0
    assert "pod-1" in capfd.readouterr().out
    answer(monkeypatch, "n\n")
    assert main(["evict", name, "--ask", *WHY]) == 77
    assert "Ask it to resign?" in capfd.readouterr().err
    assert audited(admin, name) == []
    leader.check()


@pytest.mark.parametrize("how", ["--yes", "--dry-run"])
def test_asking_without_a_leader(
    name: str, how: str, admin: psycopg.Connection[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    """67 if nothing is held; one line and 64 if the holder is not a leader, whose lease is left alone."""
    assert main(["evict", name, "--ask", *WHY, how]) == 67
    assert capfd.readouterr().out == f"No process leads the election {name!r}, so there is no leader to ask.\n"
    token = lease(admin, name)
    assert main(["evict", name, "--ask", *WHY, how]) == 64
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert f"{name!r} is held by a lease, not by the leader of an election: omit --ask" in err
    assert (audited(admin, name), newest(admin, name)) == ([], token)


def test_asking_the_holder_of_an_advisory_lock_is_a_misuse(
    name: str, dsn: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The message names the kind of lock with its article."""
    with elsewhere(dsn, name):
        assert main(["evict", name, "--ask", *WHY, "--yes"]) == 64
    assert (
        f"{name!r} is held by an advisory lock, not by the leader of an election: omit --ask" in capfd.readouterr().err
    )
