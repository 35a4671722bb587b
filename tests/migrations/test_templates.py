"""What the templates do with an empty database, behind a pooler, and with tenants that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import psycopg
import pytest

from support.pods import Project
from support.poolers import pgbouncer

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATES = [("sync", "psycopg"), ("async", "asyncpg"), ("multitenant", "psycopg2")]
VERSIONS = "SELECT count(*) FROM pg_class WHERE relname = 'alembic_version'"
SETTINGS = "SELECT current_setting('lock_timeout') AS lock_timeout, current_setting('search_path') AS search_path"
CONFIGURES = "logging.basicConfig(level=logging.INFO, format='ours: %(message)s')"
UPGRADES = "from alembic import command, config; command.upgrade(config.Config('alembic.ini'), 'head')"
WRITE = '            connection.exec_driver_sql("CREATE TABLE lost (x int)")\n'


def without_revisions(project: Project) -> Project:
    """Take the revisions out of an environment."""
    for script in (project.folder / "migrations" / "versions").iterdir():
        script.unlink()
    return project


def with_tenants(own: str, *schemas: str) -> None:
    """Make schemas."""
    with psycopg.connect(own, autocommit=True) as connection:
        for schema in schemas:
            connection.execute(f"CREATE SCHEMA {schema}".encode())


@pytest.mark.parametrize(("template", "driver"), TEMPLATES)
def test_an_empty_database_without_revisions_is_not_an_error(
    tmp_path: Path, own: str, template: str, driver: str
) -> None:
    """As with Alembic alone; the table for the versions, which it makes, is committed, in each tenant's schema."""
    with_tenants(own, "tenant_a", "tenant_b")
    project = without_revisions(Project(tmp_path, template, driver, own))
    for words in ("upgrade head", "downgrade base", "stamp base", "ensure_version"):
        ended = project.run(*words.split())
        assert ended.code == 0, ended.said
        schemas = ("tenant_a", "tenant_b") if template == "multitenant" else ("public",)
        assert project.query(VERSIONS) == [(len(schemas),)]
        for schema in schemas:
            with psycopg.connect(own) as connection:
                connection.execute(f"DROP TABLE {schema}.alembic_version".encode())


@pytest.mark.parametrize(("template", "driver"), TEMPLATES)
def test_the_database_is_that_of_database_url(tmp_path: Path, own: str, template: str, driver: str) -> None:
    """As of all commands, with the driver of the ini file where it names none; MIGRATION_URL goes before it."""
    project = without_revisions(Project(tmp_path, template, driver, own))
    nowhere = "postgres://127.0.0.1:1/nowhere"
    ended = project.run("current", MIGRATION_URL="", DATABASE_URL=own)
    assert ended.code == 0, ended.said
    assert project.run("current", MIGRATION_URL=own, DATABASE_URL=nowhere).code == 0
    assert project.run("current", MIGRATION_URL="", DATABASE_URL=nowhere).code == 1


@pytest.mark.parametrize(("template", "driver"), TEMPLATES)
def test_an_upgrade_from_python_keeps_the_logging_of_the_application(
    tmp_path: Path, own: str, template: str, driver: str
) -> None:
    """fileConfig() would replace the handlers and the level of the root logger. Without a configuration, it is used."""
    with_tenants(own, "tenant_a")
    project = without_revisions(Project(tmp_path, template, driver, own))
    for first, seen in ((CONFIGURES, True), ("pass", False)):
        script = f"import logging; {first}; {UPGRADES}; logging.getLogger('shop').info('still logged')"
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env=os.environ | {"MIGRATION_URL": project.url},
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("ours: still logged" in done.stderr) == seen, done.stderr
        assert ("INFO  [alembic.runtime.migration]" in done.stderr) != seen, done.stderr


def test_a_write_around_the_version_table_is_reported(tmp_path: Path, own: str) -> None:
    """What env.py itself has written and not committed would be lost, whether Alembic has written before or not."""
    run = "            context.run_migrations()\n"
    for number, changed in enumerate((run + WRITE, WRITE + run)):
        folder = tmp_path / str(number)
        folder.mkdir()
        project = Project(folder, "sync", "psycopg", own, changed=[(run, changed)])
        ended = without_revisions(project).run()
        assert ended.code == 1
        assert "which was rolled back" in ended.said
        assert project.query("SELECT to_regclass('lost'), to_regclass('alembic_version')") == [(None, None)]


@pytest.mark.parametrize("template", ["sync", "multitenant"])
def test_nothing_stays_set_on_the_sessions_of_a_pooler(tmp_path: Path, own: str, template: str) -> None:
    """An upgrade with nothing to do, `current`, and one that is refused leave the application's next session as it was."""
    with_tenants(own, "tenant_a", "tenant_b")
    project = Project(tmp_path, template, "psycopg", own)
    assert project.run().code == 0
    with pgbouncer(own, "transaction") as through:
        pooled = through.replace("postgresql://", "postgresql+psycopg://", 1)
        codes = [
            project.run(*words.split(), MIGRATION_URL=pooled).code
            for words in ("upgrade head", "current", "downgrade -1")
        ]
        with psycopg.connect(through, autocommit=True, prepare_threshold=None) as application:
            assert application.execute(SETTINGS).fetchall() == [("0", '"$user", public')]
    assert codes == [int(template == "multitenant"), 0, 1]


@pytest.mark.parametrize(("template", "driver"), TEMPLATES)
def test_limit_and_schema_hold_outside_of_a_transaction_too(
    tmp_path: Path, own: str, template: str, driver: str
) -> None:
    """Each tenant's in `autocommit_block()`, and in the transaction after it."""
    with_tenants(own, "tenant_a", "tenant_b")
    project = without_revisions(Project(tmp_path, template, driver, own))
    script = (
        "from alembic import op\n"
        "revision, down_revision = '001', None\n"
        f"READ = {SETTINGS!r}\n"
        "def upgrade():\n"
        "    op.execute('CREATE TABLE outside AS ' + READ)\n"
        "    with op.get_context().autocommit_block(): op.execute('INSERT INTO outside ' + READ)\n"
        "    op.execute('INSERT INTO outside ' + READ)\n"
    )
    (tmp_path / "migrations" / "versions" / "001.py").write_text(script, encoding="utf-8")
    ended = project.run()
    assert ended.code == 0, ended.said
    for schema in ("tenant_a", "tenant_b") if template == "multitenant" else ("public",):
        path = schema if template == "multitenant" else '"$user", public'
        assert project.query(f"TABLE {schema}.outside") == [("5s", path)] * 3


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("upgrade head", 0, "there are no tenants"),
        ("-x tenants= upgrade head", 255, "there is no schema ''"),
        ("-x tenants=a,nope upgrade head", 255, "there is no schema 'nope'"),
        ("-x tenant=a upgrade head", 255, "this env.py supports only -x tenants=a,b"),
    ],
)
def test_missing_tenants_are_reported(tmp_path: Path, own: str, words: str, code: int, told: str) -> None:
    """Nothing is migrated, and the output says so; without any tenant it is not an error, because the first may come later."""
    with_tenants(own, "a")
    project = Project(tmp_path, "multitenant", "psycopg", own)
    ended = project.run(*words.split())
    assert ended.code == code
    assert told in ended.said
    assert "Traceback" not in ended.said
    assert project.query(VERSIONS) == [(0,)]
