"""The pages about Flask-Migrate, advanced-alchemy and startup: with the lock taken out of their env.py, and with several databases.

That they run as they stand, with several processes on one empty database, is held by tests/test_docs.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import alembic
import flask_migrate
import psycopg
import pytest

from support import pages
from support.pods import Pod
from support.servers import database

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
ROUNDS = 5
TAKE_OUT = (
    "$ sed -i -e 's/, migration_lock(.*):/:/' -e 's/with migration_lock(.*):/if connection:/' migrations/env.py\n"
)
# Alembic's own transaction lasts long enough for the others to meet it.
LAST_LONGER = """\
$ sed -i 's/^def upgrade() -> None:/&\\n    op.execute("SELECT pg_sleep(5)")/' migrations/script.py.mako
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


MULTIDB = Path("templates") / "flask-multidb" / "env.py"
IMPORTS = "from contextlib import ExitStack\nfrom pgfence.migrations import migration_lock\n"
INI = """
[alembic]
script_location = %(here)s/many
path_separator = os
databases = one, two
[one]
sqlalchemy.url = {one}
[two]
sqlalchemy.url = {two}
[loggers]
keys = root
[handlers]
keys = console
[formatters]
keys =
[logger_root]
level = INFO
handlers = console
[handler_console]
class = StreamHandler
args = (sys.stderr,)
"""
REVISION = """
from alembic import op

revision, down_revision = "1", None


def upgrade(engine_name):
    op.execute("SELECT pg_sleep(0.2)")
    op.execute(f"CREATE TABLE {engine_name} (id int)")
"""


def changes(page: str) -> list[tuple[str, str]]:
    """Return the texts that a page takes out of a file, each with what it puts there."""
    [diff] = re.findall(r"^```diff\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    lines = re.findall(r"(?:^-.*\n)+(?:^\+.*\n)*", diff, re.MULTILINE)
    texts = [["".join(re.findall(rf"^[{sign}](.*\n)", change, re.MULTILINE)) for sign in "-+"] for change in lines]
    return [(old, new) for old, new in texts]


def test_several_databases_are_migrated_under_the_lock_of_each(dsn: str, tmp_path: Path) -> None:
    """C048: what the page changes stands in Flask-Migrate's env.py and in Alembic's, and four pods make each table once."""
    edits = changes((HOW_TO / "migrate-with-flask.md").read_text(encoding="utf-8"))
    flask = (Path(flask_migrate.__file__).parent / MULTIDB).read_text(encoding="utf-8")
    assert [flask.count(old) for old, _ in edits] == [1, 1, 1]
    shutil.copytree(Path(alembic.__file__).parent / "templates" / "multidb", tmp_path / "many")
    env = tmp_path / "many" / "env.py"
    text = env.read_text(encoding="utf-8")
    for old, new in edits:
        there = old.replace("'", '"')
        assert text.count(there) == 1
        text = text.replace(there, new)
    env.write_text(IMPORTS + text, encoding="utf-8")
    (tmp_path / "many" / "versions").mkdir()
    (tmp_path / "many" / "versions" / "1.py").write_text(REVISION, encoding="utf-8")
    with database(dsn, "one") as one, database(dsn, "two") as two:
        urls = {name: f"postgresql+psycopg://{own.split('://', 1)[1]}" for name, own in (("one", one), ("two", two))}
        (tmp_path / "alembic.ini").write_text(INI.format(**urls), encoding="utf-8")
        ini = ("-c", "alembic.ini", "upgrade", "head")
        pods = [Pod(tmp_path, ini, dict(os.environ)) for _ in range(4)]
        assert [pod.said for pod in [each.ended() for each in pods] if pod.code] == []
        for name, own in (("one", one), ("two", two)):
            with psycopg.connect(own) as connection:
                assert connection.execute(f"SELECT count(*) FROM {name}".encode()).fetchone() == (0,)
                assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("1",)]
