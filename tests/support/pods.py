"""Pods that all run `alembic upgrade head` when they start: real processes on an environment made by `pgfence init`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from pgfence.migrations import _environment
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Sequence

REVISIONS = {
    "001": """
    op.execute(f"SELECT pg_sleep({os.environ.get('SLOW', '0')})")
    op.execute("CREATE TABLE applied (revision text)")
    op.execute("CREATE TABLE item AS SELECT g AS id, 'x' AS t FROM generate_series(1, 20000) AS g")
    op.execute("INSERT INTO applied VALUES ('001')")
""",
    "002": """
    with op.get_context().autocommit_block():
        op.create_index("item_t", "item", ["t"], postgresql_concurrently=True)
    op.execute("INSERT INTO applied VALUES ('002')")
""",
    "003": """
    op.execute(f"SELECT pg_sleep({os.environ.get('PAUSE', '0')})")
    op.execute("INSERT INTO applied VALUES ('003')")
""",
}
HEAD = "003"

_REVISION = """
import os

from alembic import op

revision, down_revision = {revision!r}, {before!r}


def upgrade() -> None:{body}

def downgrade() -> None:
    pass
"""
# Pods of a round begin at one moment, whatever it took each to start.
_GATE = """
if "GATE" in os.environ:
    import pathlib
    import time

    gate = pathlib.Path(os.environ["GATE"])
    (gate / f"{os.getpid()}").touch()
    while not (gate / "open").exists():
        time.sleep(0.005)

def url() -> str:"""
_ALEMBIC = [sys.executable, "-c", "from alembic.config import main; main(prog='alembic')"]


class Ended(NamedTuple):
    """How a pod ended."""

    code: int
    said: str


class Project:
    """A migration environment in a folder, and the database that its pods migrate."""

    def __init__(
        self, folder: Path, template: str, driver: str, dsn: str, *, changed: Sequence[tuple[str, str]] = ()
    ) -> None:
        """Make it.

        Args:
            folder: an empty one.
            template: name of the template.
            driver: of the URL.
            dsn: the database, without a driver.
            changed: texts of env.py, and what stands there instead.
        """
        self.folder = folder
        self.dsn = dsn
        self.url = f"postgresql+{driver}://{dsn.split('://', 1)[1]}"
        _environment.make(folder / "migrations", template, folder / "alembic.ini")
        env = folder / "migrations" / "env.py"
        text = env.read_text(encoding="utf-8")
        for old, new in changed:
            assert old in text, old
            text = text.replace(old, new)
        env.write_text(text.replace("def url() -> str:", _GATE), encoding="utf-8")
        before = None
        for revision, body in REVISIONS.items():
            script = _REVISION.format(revision=revision, before=before, body=body)
            (folder / "migrations" / "versions" / f"{revision}.py").write_text(script, encoding="utf-8")
            before = revision

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `alembic` with these words."""
        return subprocess.Popen(
            [*_ALEMBIC, *(words or ("upgrade", "head"))],
            cwd=self.folder,
            env=os.environ | {"MIGRATION_URL": self.url} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *words: str, **environment: str) -> Ended:
        """Run `alembic` with these words to its end."""
        return ended(self.start(*words, **environment))

    def round(self, pods: int, **environment: str) -> list[Ended]:
        """Run some pods, all from one moment on."""
        gate = Path(mkdtemp(dir=self.folder))
        started = [self.start(GATE=str(gate), **environment) for _ in range(pods)]
        blocking(lambda: len(list(gate.iterdir())) == pods, 30)
        (gate / "open").touch()
        return [ended(pod, 15) for pod in started]

    def query(self, sql: str) -> list[Any]:
        """Return rows of the database that is migrated."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            return connection.execute(sql.encode()).fetchall()

    def clear(self) -> None:
        """Make the database empty again."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")

    def expect_head(self) -> None:
        """Assert that each revision was applied, once, and that the index is valid."""
        assert self.query("SELECT version_num FROM alembic_version") == [(HEAD,)]
        assert sorted(self.query("SELECT revision FROM applied")) == [(revision,) for revision in REVISIONS]
        assert self.query("SELECT indisvalid FROM pg_index WHERE indexrelid = 'item_t'::regclass") == [(True,)]


def ended(pod: subprocess.Popen[str], deadline: float = 30) -> Ended:
    """Wait for the end of a pod, and kill it if it does not end."""
    try:
        said, _ = pod.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        pod.kill()
        said, _ = pod.communicate()
        raise AssertionError(f"a pod did not end within {deadline:g} s: {said}") from None
    return Ended(pod.returncode, said)
