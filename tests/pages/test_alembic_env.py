"""The env.py of the page about migrations, run by Alembic: it takes the old lock, on both engines."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest

from support import pages
from support.servers import database
from support.waiting import blocking

if TYPE_CHECKING:
    from pathlib import Path

OLD = 1346918401
ENV = {
    "sync": "from alembic_env import run_migrations_online\nrun_migrations_online()\n",
    "async": "import asyncio\nfrom alembic_env import run_async_migrations\nasyncio.run(run_async_migrations())\n",
}
REVISION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = "1", None


def upgrade():
    op.create_table("account", sa.Column("id", sa.Integer, primary_key=True), sa.Column("balance", sa.Integer))
    with op.get_context().autocommit_block():
        op.create_index("account_balance", "account", ["balance"], postgresql_concurrently=True)
"""
UPGRADE = "from alembic.config import main; main(['-c', 'alembic.ini', 'upgrade', 'head'])"
HELD = (
    "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = 0 AND objid = 1346918401 AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


@pytest.mark.parametrize("half", ENV)
def test_it_waits_for_older_releases_and_gives_the_lock_back(half: str, dsn: str, tmp_path: Path) -> None:
    """C057: while a session has the old number nothing is migrated; then everything is, and the number is free."""
    (tmp_path / "m" / "versions").mkdir(parents=True)
    (tmp_path / "m" / "env.py").write_text(ENV[half], encoding="utf-8")
    (tmp_path / "m" / "versions" / "1.py").write_text(REVISION, encoding="utf-8")
    (tmp_path / "alembic.ini").write_text(
        "[alembic]\nscript_location = %(here)s/m\npath_separator = os\n", encoding="utf-8"
    )
    with database(dsn, "env") as own, psycopg.connect(own, autocommit=True) as old:
        old.execute("SELECT pg_advisory_lock(%s)", [OLD])
        pod = subprocess.Popen([sys.executable, "-c", UPGRADE], cwd=tmp_path, env=pages.environment(own))
        try:
            waits = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND query ~ 'try_advisory_lock'"
            blocking(lambda: old.execute(f"{waits} AND pid <> pg_backend_pid()".encode()).fetchone(), 40)
            assert old.execute("SELECT to_regclass('alembic_version')").fetchone() == (None,)
            assert old.execute(HELD.encode()).fetchone() == (1,)
            old.execute("SELECT pg_advisory_unlock(%s)", [OLD])
            assert pod.wait(20) == 0
        finally:
            pod.kill()
            pod.wait()
        assert old.execute("SELECT version_num FROM alembic_version").fetchall() == [("1",)]
        assert old.execute(HELD.encode()).fetchone() == (0,)
