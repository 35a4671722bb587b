"""Pods that all run `alembic upgrade head` when they start: real processes on an environment made by `pgfence init`."""

from __future__ import annotations

import multiprocessing
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp, mkstemp
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from alembic.config import main

from pgfence import LockKey
from pgfence.migrations import _environment
from pgfence.migrations._lock import _default_key
from support.waiting import blocking

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The lock of the migrations alone, because a pod that connects holds another advisory lock for a moment.
_HELD = (
    "FROM pg_locks WHERE locktype = 'advisory' AND granted"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND (classid::bigint << 32 | objid::bigint) = {key}"
)
# Each says that it was applied if the lock is held at that moment.
_APPLIED = f"INSERT INTO applied SELECT '{{}}' {_HELD}"
_INSIDE = f"CREATE TABLE IF NOT EXISTS inside AS SELECT count(*) {_HELD}"
REVISIONS = {
    "001": """
    op.execute(f"SELECT pg_sleep({os.environ.get('SLOW', '0')})")
    op.execute("CREATE TABLE applied (revision text)")
    op.execute("CREATE TABLE item AS SELECT g AS id, 'x' AS t FROM generate_series(1, 20000) AS g")
    op.execute(APPLIED)
""",
    "002": """
    with op.get_context().autocommit_block():
        op.create_index_safely("item_t", "item", ["t"])
        op.execute(INSIDE)
    op.execute(APPLIED)
""",
    "003": """
    op.execute(f"SELECT pg_sleep({os.environ.get('PAUSE', '0')})")
    op.execute(os.environ.get("DDL", "SELECT 1"))
    op.execute(APPLIED)
""",
}
HEAD = "003"
TENANTS = LockKey.of("tenants", namespace="migrations")
"""The key in the multitenant template."""

_REVISION = """
import os

from alembic import op

revision, down_revision = {revision!r}, {before!r}
APPLIED, INSIDE = {applied!r}, {inside!r}


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

def url() -> URL:"""
_WAITING = """
    SELECT state FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
    AND query LIKE '%try_advisory_lock%'
"""
# A pod is a process of its own, forked from one that has imported what each of them would import for most of a second.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "alembic.command",
        "alembic.config",
        "asyncpg",
        "pgfence._alembic.implementations",
        "pgfence.migrations",
        "psycopg",
        "psycopg2",
        "sqlalchemy.dialects.postgresql",
        "sqlalchemy.ext.asyncio",
    ]
)


class Ended(NamedTuple):
    """How a pod ended."""

    code: int
    said: str


class Pod:
    """A process that runs `alembic`."""

    def __init__(self, folder: Path, words: Sequence[str], environment: dict[str, str]) -> None:
        descriptor, name = mkstemp(dir=folder)
        os.close(descriptor)
        self._output = Path(name)
        self._process = _FORKS.Process(target=_alembic, args=(folder, self._output, words, environment), daemon=True)
        self._process.start()

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self._process.kill()
        self._process.join()

    def ended(self, deadline: float = 30) -> Ended:
        """Wait for its end, and kill it if it does not end.

        Args:
            deadline: seconds.
        """
        self._process.join(deadline)
        said = self._output.read_text(encoding="utf-8")
        if self._process.exitcode is None:
            self.kill()
            raise AssertionError(f"a pod did not end within {deadline:g} s: {said}")
        return Ended(self._process.exitcode, said)


def _alembic(folder: Path, output: Path, words: Sequence[str], environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with output.open("w", encoding="utf-8") as written:
        for standard in (1, 2):
            os.dup2(written.fileno(), standard)
    main(words, prog="alembic")


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
        before_gate = _GATE.rpartition("\n")[2]
        assert before_gate in text, before_gate
        env.write_text(text.replace(before_gate, _GATE), encoding="utf-8")
        key = (TENANTS if template == "multitenant" else _default_key()).value
        before = None
        for revision, body in REVISIONS.items():
            script = _REVISION.format(
                revision=revision,
                before=before,
                body=body,
                applied=_APPLIED.format(revision, key=key),
                inside=_INSIDE.format(key=key),
            )
            (folder / "migrations" / "versions" / f"{revision}.py").write_text(script, encoding="utf-8")
            before = revision

    def start(self, *words: str, **environment: str) -> Pod:
        """Start `alembic` with these words."""
        given = os.environ | {"MIGRATION_URL": self.url} | environment
        return Pod(self.folder, words or ("upgrade", "head"), given)

    def run(self, *words: str, **environment: str) -> Ended:
        """Run `alembic` with these words to its end."""
        return self.start(*words, **environment).ended()

    def together(self, pods: int, **environment: str) -> list[Pod]:
        """Start some pods, all of which begin at this moment."""
        gate = Path(mkdtemp(dir=self.folder))
        started = [self.start(GATE=str(gate), **environment) for _ in range(pods)]
        blocking(lambda: len(list(gate.iterdir())) == pods, 30)
        (gate / "open").touch()
        return started

    def round(self, pods: int, **environment: str) -> list[Ended]:
        """Run some pods, all from one moment on, to the end of each."""
        return [pod.ended(15) for pod in self.together(pods, **environment)]

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        """Yield the states that sessions are seen in, all the time, after they have asked for the migration lock."""
        states: set[str] = set()
        ends = threading.Event()

        def watch() -> None:
            with psycopg.connect(self.dsn, autocommit=True) as connection:
                while not ends.wait(0.005):
                    states.update(row[0] for row in connection.execute(_WAITING))

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            yield states
        finally:
            ends.set()
            watching.join()

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
        """Assert that each revision was applied, once, under the lock, and that the index is valid."""
        assert self.query("SELECT version_num FROM alembic_version") == [(HEAD,)]
        assert sorted(self.query("SELECT revision FROM applied")) == [(revision,) for revision in REVISIONS]
        assert self.query("SELECT count FROM inside") == [(1,)]
        assert self.query("SELECT indisvalid FROM pg_index WHERE indexrelid = 'item_t'::regclass") == [(True,)]
