"""Several pods migrate one database at the same moment, and some are killed."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psycopg
import pytest

from support.pods import Project
from support.waiting import blocking

if TYPE_CHECKING:
    from pathlib import Path

    from support.pods import Pod

FULL = bool(os.environ.get("PGFENCE_TEST_FAULTS"))
ROUNDS = 20 if FULL else 1
KILLS = 20 if FULL else 2
PODS = 5
LOCK = "with migration_lock(connection, timeout=LOCK_WAIT):"
TOGETHER = ('"transaction_per_migration": True', '"transaction_per_migration": False')
MIGRATING = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query ~ '^(SELECT pg_sleep|CREATE INDEX)'"
)
BUILDING = f"{MIGRATING} AND wait_event_type = 'Lock'"
ALTERING = "SELECT FROM pg_stat_activity WHERE datname = current_database() AND query ~ '^ALTER' AND state = 'active'"
VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = 'item_t'::regclass"

pytestmark = pytest.mark.timeout(600 if FULL else 120)


@pytest.mark.parametrize(
    ("template", "driver", "changed"),
    [
        ("sync", "psycopg", ()),
        ("sync", "psycopg", (TOGETHER,)),
        ("async", "asyncpg", ()),
        ("async", "asyncpg", (TOGETHER,)),
        ("sync", "psycopg2", (TOGETHER,)),
    ],
    ids=lambda value: value if isinstance(value, str) else "together" if value else "per migration",
)
def test_pods_that_migrate_at_once_all_succeed(
    tmp_path: Path, own: str, template: str, driver: str, changed: tuple[tuple[str, str], ...]
) -> None:
    """C048, C049, C050, C051, C052: all exit with 0, each revision is applied once, under the lock, and the index is valid.

    Whoever waits is never idle in a transaction.
    """
    project = Project(tmp_path, template, driver, own, changed=changed)
    with project.watched() as states:
        for _ in range(ROUNDS):
            assert [pod.said for pod in project.round(PODS, SLOW="0.3") if pod.code] == []
            project.expect_head()
            project.clear()
    assert "idle" in states
    assert states <= {"active", "idle"}


def test_without_the_lock_pods_fail(tmp_path: Path, own: str) -> None:
    """C048: the control: the same pods in the same environment without the lock."""
    project = Project(tmp_path, "sync", "psycopg", own, changed=[(LOCK, "if connection:")])
    failed = 0
    for _ in range(20 if FULL else 3):
        failed += any(pod.code for pod in project.round(PODS, SLOW="0.3"))
        project.clear()
        if failed and not FULL:
            return
    assert failed >= 18


def test_after_a_kill_the_next_pod_ends_at_head(tmp_path: Path, own: str) -> None:
    """C056: SIGKILL at any moment, also in the middle of a statement: no manual step is needed."""
    project = Project(tmp_path, "sync", "psycopg", own)
    for number in range(KILLS):
        [killed] = project.together(1, PAUSE="60")
        if number:
            time.sleep(random.uniform(0, 0.5))
        else:
            blocking(lambda: project.query(MIGRATING), 15)
        _kill(project, killed)
        after = project.run()
        assert after.code == 0, after.said
        project.expect_head()
        project.clear()


def test_an_index_that_a_kill_left_invalid_is_built_by_the_next_pod(tmp_path: Path, own: str) -> None:
    """C049, C056: SIGKILL while the build waits for another session's snapshot."""
    project = Project(tmp_path, "sync", "psycopg", own)
    with psycopg.connect(own) as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        other.execute("SELECT 1")
        killed = project.start()
        blocking(lambda: project.query(BUILDING), 15)
        _kill(project, killed)
        assert project.query(VALID) == [(False,)]
    after = project.run()
    assert after.code == 0, after.said
    assert "because its build was interrupted" in after.said
    project.expect_head()


def test_an_index_waits_for_readers_longer_than_other_ddl(tmp_path: Path, own: str) -> None:
    """C049: DDL_WAIT is for what keeps others waiting, which the build does not; afterwards it holds again."""
    changed = [('DDL_WAIT = "5s"', 'DDL_WAIT = "100ms"'), ("DDL_ATTEMPTS = 5", "DDL_ATTEMPTS = 1")]
    project = Project(tmp_path, "sync", "psycopg", own, changed=changed)
    with psycopg.connect(own) as other:
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        other.execute("SELECT 1")
        pod = project.start(DDL="CREATE TABLE limits AS SELECT current_setting('lock_timeout')")
        blocking(lambda: project.query(f"{BUILDING} AND clock_timestamp() > query_start + interval '400 ms'"), 15)
    assert pod.ended().code == 0
    project.expect_head()
    assert project.query("TABLE limits") == [("100ms",)]


def _kill(project: Project, pod: Pod) -> None:
    """Kill a pod, and wait until the server has noticed: within a second, and a second for a busy machine."""
    pod.kill()
    blocking(lambda: not project.query(MIGRATING), 2)


def test_a_timed_out_migration_names_the_holder_and_exits_with_75(tmp_path: Path, own: str) -> None:
    """C040, C056: pid and statement of who migrates at this moment; nothing is changed."""
    project = Project(tmp_path, "sync", "psycopg", own, changed=[("LOCK_WAIT = 600", "LOCK_WAIT = 0.5")])
    first = project.start(PAUSE="60")
    try:
        [(pid,)] = blocking(lambda: project.query(MIGRATING), 15)
        second = project.run()
    finally:
        first.kill()
    assert second.code == 75
    assert f"backend {pid}" in second.said
    assert "pg_sleep(60)" in second.said
    assert "Traceback" not in second.said


def test_a_self_upgrading_application_waits_and_reports_it(tmp_path: Path, own: str) -> None:
    """C057: `command.upgrade` takes the same lock; in an application it raises instead of exiting."""
    project = Project(tmp_path, "async", "asyncpg", own, changed=[("LOCK_WAIT = 600", "LOCK_WAIT = 0")])
    program = (
        "import pgfence; from alembic import command; from alembic.config import Config\n"
        "try: command.upgrade(Config('alembic.ini'), 'head')\n"
        "except pgfence.LockTimeoutError as busy: print(busy.names)"
    )
    with psycopg.connect(own, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [_default_key()])
        command, environment = [sys.executable, "-c", program], os.environ | {"MIGRATION_URL": project.url}
        told = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50, check=True
        )
    assert "alembic_version" in told.stdout
    assert project.query("SELECT to_regclass('alembic_version')") == [(None,)]


def test_looking_takes_no_lock_and_makes_no_table(tmp_path: Path, own: str) -> None:
    """C054: `current`, `check` and others return at once, on an empty database while another process has the lock."""
    project = Project(tmp_path, "sync", "psycopg", own, changed=[("LOCK_WAIT = 600", "LOCK_WAIT = 0")])
    with psycopg.connect(own, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [_default_key()])
        looking = [project.start(*words.split()) for words in ["current", "current", "check", "heads", "history -i"]]
        assert [pod.ended().code for pod in (*looking[:2], *looking[3:])] == [0, 0, 0, 0]
        checked = looking[2].ended()
        assert "Target database is not up to date" in checked.said or "No new upgrade" in checked.said
        assert project.query("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace") == []
        assert project.run("upgrade", "head").code == 75


def test_a_check_of_nothing_makes_no_version_table(tmp_path: Path, own: str) -> None:
    """C054: also without any revision, where Alembic itself would create it."""
    metadata = ("target_metadata = None", "from sqlalchemy import MetaData; target_metadata = MetaData()")
    project = Project(tmp_path, "sync", "psycopg", own, changed=[metadata, TOGETHER])
    for script in (tmp_path / "migrations" / "versions").iterdir():
        script.unlink()
    checked = project.run("check")
    assert checked.code == 0, checked.said
    assert project.query("SELECT to_regclass('alembic_version')") == [(None,)]


def test_no_revision_is_recorded_once_the_lock_is_lost(tmp_path: Path, own: str) -> None:
    """A revision that unlocks everything on its way is rolled back, and the one before stays recorded."""
    project = Project(tmp_path, "sync", "psycopg", own)
    lost = project.run(PAUSE="0), pg_advisory_unlock_all(")
    assert lost.code not in (0, 75)
    assert "was lost" in lost.said
    assert project.query("SELECT version_num FROM alembic_version") == [("002",)]
    assert project.query("SELECT count(*) FROM applied") == [(2,)]
    assert project.run().code == 0
    project.expect_head()


def test_an_upgrade_with_nothing_to_apply_is_not_locked(tmp_path: Path, own: str) -> None:
    """A pod with nothing to do does not wait, with `depends_on`, on a branch or for an older revision; `downgrade` waits."""
    project = Project(tmp_path, "sync", "psycopg", own, changed=[("LOCK_WAIT = 600", "LOCK_WAIT = 0")])
    dependent = "revision, down_revision, branch_labels, depends_on = 'q1', None, 'q', '003'\ndef upgrade(): pass\n"
    (tmp_path / "migrations" / "versions" / "q1.py").write_text(dependent, encoding="utf-8")
    assert project.run("upgrade", "heads").code == 0
    assert project.query("SELECT version_num FROM alembic_version") == [("q1",)]
    with psycopg.connect(own, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [_default_key()])
        started = [project.start("upgrade", destination) for destination in ("heads", "q@head", "003", "001")]
        assert [ended.said for pod in started if (ended := pod.ended()).code] == []
        assert project.run("downgrade", "-1").code == 75


def test_a_revision_that_alembic_does_not_know_is_its_error(tmp_path: Path, own: str) -> None:
    """The lock is waited for, because its holder may be about to downgrade; then Alembic's message is the only one."""
    project = Project(tmp_path, "sync", "psycopg", own, changed=[("LOCK_WAIT = 600", "LOCK_WAIT = 0")])
    with psycopg.connect(own, autocommit=True) as other:
        other.execute("CREATE TABLE alembic_version (version_num text); INSERT INTO alembic_version VALUES ('newer')")
        unknown = project.run()
        other.execute("SELECT pg_advisory_lock(%s)", [_default_key()])
        assert project.run().code == 75
    assert unknown.code not in (0, 75)
    assert "Can't locate revision identified by 'newer'" in unknown.said
    assert "Traceback" not in unknown.said


@pytest.mark.parametrize(
    ("revision", "before", "told"),
    [
        ("004", "002", r"Multiple head .* 003 \(.*/003.py\) and 004 \(.*/fork.py\), which diverge after 002"),
        ("003", "002", "003 .* more than once"),
        ("004", "004", "Self-loop is detected in revisions .*004"),
    ],
)
def test_branched_revisions_are_rejected_before_anything_is_locked(
    tmp_path: Path, own: str, revision: str, before: str, told: str
) -> None:
    """C055: two heads with their files, one id twice, a cycle: an error while another process has the lock; no table is created."""
    project = Project(tmp_path, "sync", "psycopg", own)
    versions = tmp_path / "migrations" / "versions"
    script = (versions / "003.py").read_text(encoding="utf-8")
    (versions / "fork.py").write_text(script.replace("'003', '002'", f"'{revision}', '{before}'"), encoding="utf-8")
    with psycopg.connect(own, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", [_default_key()])
        refused = project.run()
    assert refused.code not in (0, 75)
    assert re.search(told, refused.said)
    assert "Traceback" not in refused.said
    assert project.query("SELECT to_regclass('alembic_version')") == [(None,)]
    assert project.run("upgrade", "head", "--sql", MIGRATION_URL="postgresql://127.0.0.1:1/nowhere").code


def test_an_alembic_that_is_too_old_is_named(tmp_path: Path, own: str) -> None:
    """A directive raises which Alembic is needed, and a comparison logs what it leaves out."""
    older = (
        "config = context.config\n",
        "config = context.config\nimport alembic; from alembic import op; alembic.__version__ = '1.17.2'; del op.create_pgfence\n",
    )
    project = Project(tmp_path, "sync", "psycopg", own, changed=[older])
    assert project.run().code == 0
    assert "fences and version triggers are not compared" in project.run("check").said
    body = "revision, down_revision = '004', '003'\ndef upgrade():\n    from alembic import op; op.create_pgfence()\n"
    (tmp_path / "migrations" / "versions" / "004.py").write_text(body, encoding="utf-8")
    lacking = project.run()
    assert lacking.code == 1
    assert "need Alembic 1.18.0 or later, but this is 1.17.2" in lacking.said


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "asyncpg"])
def test_tenants_are_migrated_under_one_lock(tmp_path: Path, own: str, driver: str) -> None:
    """Three schemas, three pods: each tenant gets each revision once."""
    project = Project(tmp_path, "multitenant", driver, own)
    tenants = ["tenant_a", "tenant_b", 'tenant_"C']
    with psycopg.connect(own, autocommit=True) as connection:
        for tenant in tenants:
            connection.execute(psycopg.sql.SQL("CREATE SCHEMA {}").format(psycopg.sql.Identifier(tenant)))
    assert [pod.said for pod in project.round(3, SLOW="0.3") if pod.code] == []
    for tenant in tenants:
        quoted = psycopg.sql.Identifier(tenant).as_string()
        assert sorted(project.query(f"SELECT revision FROM {quoted}.applied")) == [("001",), ("002",), ("003",)]
        assert project.query(f"SELECT version_num FROM {quoted}.alembic_version") == [("003",)]
    assert project.query("SELECT to_regclass('public.alembic_version')") == [(None,)]


def test_tenants_share_revisions_generated_from_the_models(tmp_path: Path, own: str) -> None:
    """A revision that compares one tenant fits all: `check` is quiet, and no version table is dropped."""
    models = (
        "from sqlalchemy import Column, Integer, MetaData, Table; target_metadata = MetaData();"
        ' Table("entry", target_metadata, Column("id", Integer, primary_key=True), info={"pgfence_fence": "books"})'
    )
    project = Project(tmp_path, "multitenant", "psycopg", own, changed=[("target_metadata = None", models)])
    for script in (tmp_path / "migrations" / "versions").iterdir():
        script.unlink()
    with psycopg.connect(own, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA tenant_a; CREATE SCHEMA tenant_b")
    for words in ("-x tenants=tenant_a revision --autogenerate", "upgrade head", "check", "downgrade base"):
        ended = project.run(*words.split())
        assert ended.code == 0, ended.said
    tables = (
        "SELECT nspname, relname FROM pg_class JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname ~ '^(ten|pub)'"
    )
    assert sorted(project.query(f"{tables} AND relkind = 'r'")) == [
        ("tenant_a", "alembic_version"),
        ("tenant_b", "alembic_version"),
    ]


@pytest.mark.parametrize(
    ("template", "driver"), [("sync", "psycopg"), ("async", "asyncpg"), ("multitenant", "psycopg2")]
)
def test_a_script_needs_no_server_and_takes_no_lock(tmp_path: Path, own: str, template: str, driver: str) -> None:
    """The output of `--sql` is created without a connection, and has the effect of the upgrade when it is run."""
    project = Project(tmp_path, template, driver, own)
    nowhere = f"postgresql+{driver}://127.0.0.1:1/nowhere"
    script = project.run("upgrade", "head", "--sql", MIGRATION_URL=nowhere)
    assert script.code == 0
    assert "try_advisory" not in script.said
    lines = [line for line in script.said.splitlines() if not line.startswith(("INFO ", "-- "))]
    with psycopg.connect(own, autocommit=True) as psql:
        for statement in "\n".join(lines).split("\n\n"):
            psql.execute(statement.encode())
    assert project.query("SELECT version_num FROM alembic_version") == [("003",)]
    assert project.query("SELECT count FROM inside") == [(0,)]
    assert project.query(VALID) == [(True,)]


@pytest.mark.parametrize(
    ("template", "driver"),
    [("sync", "psycopg2"), ("async", "asyncpg"), ("multitenant", "psycopg"), ("multitenant", "asyncpg")],
)
def test_a_table_in_use_is_tried_again(tmp_path: Path, own: str, template: str, driver: str) -> None:
    """DDL gives way to other sessions after DDL_WAIT, and committed steps are not repeated."""
    changed = [('DDL_WAIT = "5s"', 'DDL_WAIT = "200ms"'), ("sleep(attempt)", "sleep(0.1)")]
    project = Project(tmp_path, template, driver, own, changed=changed)
    with psycopg.connect(own) as user:
        user.execute("CREATE SCHEMA tenant_a")
        user.execute("CREATE TABLE public.used (x int)")
        user.commit()
        user.execute("SELECT * FROM public.used")
        pod = project.start(DDL="ALTER TABLE public.used ADD COLUMN y int")
        blocking(lambda: project.query(ALTERING), 15)
        blocking(lambda: not project.query(ALTERING), 5)
    assert pod.ended().code == 0
    schema = "tenant_a" if template == "multitenant" else "public"
    assert sorted(project.query(f"SELECT revision FROM {schema}.applied")) == [("001",), ("002",), ("003",)]
    assert project.query("SELECT count(*) FROM pg_attribute WHERE attrelid = 'used'::regclass AND attname = 'y'") == [
        (1,)
    ]


def test_a_table_in_use_for_too_long_ends_the_migration(tmp_path: Path, own: str) -> None:
    """After DDL_ATTEMPTS with the server's own error; what was committed before is recorded."""
    changed = [('DDL_WAIT = "5s"', 'DDL_WAIT = "100ms"'), ("DDL_ATTEMPTS = 5", "DDL_ATTEMPTS = 1")]
    project = Project(tmp_path, "sync", "psycopg", own, changed=changed)
    with psycopg.connect(own) as user:
        user.execute("CREATE TABLE used (x int)")
        user.commit()
        user.execute("SELECT * FROM used")
        ended = project.run(DDL="ALTER TABLE used ADD COLUMN y int")
    assert ended.code not in (0, 75)
    assert "lock timeout" in ended.said
    assert project.query("SELECT version_num FROM alembic_version") == [("002",)]


def _default_key() -> int:
    from pgfence.migrations._lock import _default_key as default

    return default().value
