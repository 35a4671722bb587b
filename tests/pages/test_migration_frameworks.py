"""The pages about Flask-Migrate, advanced-alchemy and startup, run once more with the lock taken out of their env.py.

That they run as they stand, with several processes on one empty database, is held by tests/test_docs.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import pages
from support.servers import database

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
ROUNDS = 5
TAKE_OUT = (
    "$ sed -i -e 's/, migration_lock(.*):/:/' -e 's/with migration_lock(.*):/if connection:/' migrations/env.py\n"
)
# Alembic's own transaction lasts long enough for the others to meet it.
LAST_LONGER = """\
$ sed -i 's/^def upgrade() -> None:/&\\n    op.execute("SELECT pg_sleep(1)")/' migrations/script.py.mako
"""
FIRST_REVISION = {
    "migrate-at-startup": "$ alembic revision",
    "migrate-with-advanced-alchemy": "$ alchemy --config shop.config make-migrations",
    "migrate-with-flask": "$ flask --app shop db migrate",
}


@pytest.mark.skipif(not os.environ.get("PGFENCE_TEST_FAULTS"), reason="the control is asked for by PGFENCE_TEST_FAULTS")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FIRST_REVISION)
def test_without_the_lock_processes_fail(name: str, dsn: str, tmp_path: Path) -> None:
    """C048: the same page without the lock goes wrong, in one of several rounds at the latest."""
    page = tmp_path / f"{name}.md"
    content = (HOW_TO / page.name).read_text(encoding="utf-8")
    assert content.count(FIRST_REVISION[name]) == 1
    page.write_text(
        content.replace(FIRST_REVISION[name], TAKE_OUT + LAST_LONGER + FIRST_REVISION[name]), encoding="utf-8"
    )
    for _ in range(ROUNDS):
        with database(dsn, "control") as own:
            command = [sys.executable, pages.__file__, str(page)]
            done = subprocess.run(command, env=pages.environment(own), capture_output=True, text=True, check=False)
        if done.returncode:
            assert "already exists" in done.stderr or "failed" in done.stderr, done.stderr
            return
    pytest.fail("it never failed")
