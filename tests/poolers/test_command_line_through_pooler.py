"""`pgfence run` behind PgBouncer: the advice is in terms of the command line, and each piece of it works."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.commandline import Cli

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.one_driver, pytest.mark.usefixtures("tables")]


@pytest.mark.parametrize("mode", ["session", "transaction"])
def test_the_advice_behind_a_pooler_works(
    pgbouncer: Callable[..., str], dsn: str, tmp_path: Path, name: str, mode: str
) -> None:
    """An advisory lock exits with 78; --dsn and --lease run the command, --pooler session only in session mode."""
    cli = Cli(pgbouncer(mode), tmp_path)
    rejected = cli.run(name, "--", "echo", "ran")
    assert (rejected.returncode, rejected.stdout) == (78, "")
    assert rejected.stderr.count("\n") == 1
    assert all(advice in rejected.stderr for advice in ("--dsn", "--lease", "pgfence install"))
    assert "configure" not in rejected.stderr
    assert ("--pooler session" in rejected.stderr) is (mode == "session")
    assert cli.run("--dsn", dsn, name, "--", "true").returncode == 0
    assert cli.run("--lease", name, "--", "true").returncode == 0
    if mode == "session":
        assert cli.run("--pooler", "session", name, "--", "true").returncode == 0
