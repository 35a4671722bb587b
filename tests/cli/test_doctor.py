"""`pgfence doctor`: its text, its exit codes, and what it reads of this host."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pgfence._admin.doctor.finding import CATALOGUE
from pgfence.cli import main
from support.commandline import SERVER_VARIABLES
from support.healthy import healthy_role

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No server but the one that a test gives, and an empty folder."""
    for variable in (*SERVER_VARIABLES, "COLUMNS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)


def test_a_healthy_installation_is_0(
    admin: psycopg.Connection[Any], role: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """With --strict, too; as text and as one object."""
    login = healthy_role(admin, role)
    assert main(["doctor", "--strict", "--dsn", login]) == 0
    out, err = capfd.readouterr()
    assert (out.splitlines()[-1].startswith("No findings; "), err) == (True, "")
    assert main(["doctor", "--json", "--dsn", login]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["findings"], told["exit_code"], "leaked-locks" in told["checked"]) == ([], 0, True)


def test_warnings_fail_only_if_that_is_wanted(
    admin: psycopg.Connection[Any], role: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    """A warning is 0, with --strict 1. Without a terminal the text fits 80 columns and has no colors."""
    login = healthy_role(admin, role, synchronous_commit="off")
    assert main(["doctor", "--dsn", login]) == 0
    out = capfd.readouterr().out
    assert "WARNING  synchronous-commit\n" in out
    assert "1 warning; " in out
    assert max(map(len, out.splitlines())) <= 80
    assert out.isascii()
    assert "\x1b" not in out
    assert main(["doctor", "--strict", "--json", "--dsn", login]) == 1
    told = json.loads(capfd.readouterr().out)
    assert [(one["code"], one["severity"]) for one in told["findings"]] == [("synchronous-commit", "warning")]
    assert told["exit_code"] == 1


def test_an_error_is_1_and_the_environment_of_alembic_is_found(
    dsn: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """alembic.ini of the current folder is read: that of `pgfence init` has no findings."""
    assert main(["init", "migrations", "--quiet"]) == 0
    assert main(["doctor", "--schema", "no_such_schema", "--json", "--dsn", dsn]) == 1
    told = json.loads(capfd.readouterr().out)
    codes = {one["code"] for one in told["findings"]}
    assert "tables-elsewhere" in codes
    assert "alembic-lock" in told["checked"]
    assert not {"alembic-lock", "alembic-plugin"} & codes
    (tmp_path / "alembic.ini").write_text("[other]\n")
    assert main(["doctor", "--dsn", dsn]) == 64
    assert "alembic.ini' has no script_location" in capfd.readouterr().err
    (tmp_path / "alembic.ini").write_text("script_location = migrations\n")
    assert main(["doctor", "--dsn", dsn]) == 64
    assert "alembic.ini' is not a valid ini file: MissingSectionHeaderError" in capfd.readouterr().err


def test_the_page_lists_every_finding() -> None:
    """With its usual severity and the reason that the command prints."""
    page = Path(__file__).parents[2] / "docs" / "operate" / "check-an-installation.md"
    rows = re.findall(r"^\| `([a-z-]+)` \| (\w+)[^|]* \| (.+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(code, entry.severity, entry.why) for code, entry in CATALOGUE.items()]


def test_no_server_is_69_and_no_postgresql_64(capfd: pytest.CaptureFixture[str]) -> None:
    """One line, without the password."""
    assert main(["doctor", "--dsn", "postgresql://nobody:secret@127.0.0.1:1/nothing"]) == 69
    assert main(["doctor", "--dsn", "sqlite://"]) == 64
    out, err = capfd.readouterr()
    assert (out, "secret" in err, err.count("\n")) == ("", False, 2)


def test_a_clock_that_differs_is_found(dsn: str) -> None:
    """This host's clock an hour behind: the server's is ahead, with the difference."""
    if shutil.which("faketime") is None:
        pytest.skip("faketime is not installed")
    done = subprocess.run(
        ["faketime", "-f", "-1h", sys.executable, "-m", "pgfence", "doctor", "--json", "--dsn", dsn],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"FAKETIME_DONT_FAKE_MONOTONIC": "1"},
    )
    found = {one["code"]: one for one in json.loads(done.stdout)["findings"]}
    told = re.search(r"server's clock is ([\d.]+) s ahead of this host's", found["clock"]["found"])
    assert told is not None
    assert float(told[1]) == pytest.approx(3600, abs=60)
