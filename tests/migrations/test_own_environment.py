"""The project's own environment: created from the template, and what its revisions install."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import psycopg
from sqlalchemy import create_engine

from pgfence import Lease, schema
from pgfence.migrations import _environment
from support.pods import Pod

OURS = Path(__file__).parents[2] / "alembic"


def alembic(folder: Path, own: str, *words: str) -> str:
    """Run Alembic on our environment, and return what it says."""
    url = f"postgresql+psycopg://{own.split('://', 1)[1]}"
    ended = Pod(folder, ["-c", str(OURS / "alembic.ini"), *words], os.environ | {"MIGRATION_URL": url}).ended()
    assert ended.code == 0, ended.said
    return ended.said


def objects(own: str) -> set[str]:
    """Return the tables and functions of the database, without Alembic's."""
    query = (
        "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'"
        " UNION ALL SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
    )
    with psycopg.connect(own) as connection:
        return {row[0] for row in connection.execute(query)} - {"alembic_version"}


def test_it_differs_from_the_template_in_its_metadata_alone() -> None:
    """What is tested with it is what `pgfence init` makes."""
    template = (_environment.TEMPLATES / "sync" / "env.py").read_text(encoding="utf-8").splitlines()
    ours = (OURS / "env.py").read_text(encoding="utf-8").splitlines()
    added = [line for line in difflib.ndiff(template, ours) if line.startswith("+ ")]
    assert added == [
        "+ # ruff: noqa: D103, I002, T201",
        "+ from sqlalchemy import URL, Connection, MetaData, create_engine, event, make_url, pool",
        "+ from pgfence import LockTimeoutError, schema",
        "+ target_metadata = MetaData()",
        "+ schema.tables(target_metadata)",
    ]


def run(own: str, script: str) -> None:
    """Execute what Alembic prints with --sql."""
    with psycopg.connect(own, autocommit=True) as connection:
        connection.execute("\n".join(line for line in script.splitlines() if not line.startswith("INFO")).encode())


def test_a_lease_is_held_across_upgrades_and_downgrades(own: str, tmp_path: Path) -> None:
    """Downgraded to version 2 and upgraded again by `--sql`, then installed by the script of `pgfence install`."""
    alembic(tmp_path, own, "upgrade", "head")
    engine = create_engine(f"postgresql+psycopg://{own.split('://', 1)[1]}")
    lease = Lease(engine, "nightly", ttl=30)
    with lease.hold() as held:
        run(own, alembic(tmp_path, own, "downgrade", "0004:0002", "--sql"))
        held.renew()
        run(own, alembic(tmp_path, own, "upgrade", "0002:0004", "--sql"))
        held.renew()
        run(own, alembic(tmp_path, own, "downgrade", "0004:0002", "--sql"))
        run(own, schema.sql())
        held.renew()
        assert held.state == "held"
        assert Lease(engine, "nightly", ttl=30).holders()[0].token == 1
    with lease.hold() as held:
        assert held.token == 2
    engine.dispose()


def test_its_revisions_install_what_is_needed_and_leave_nothing(own: str, tmp_path: Path) -> None:
    """Up, quiet in `check`, leases work; down to nothing; and up again by a script without a server."""
    alembic(tmp_path, own, "upgrade", "head")
    installed = objects(own)
    assert "No new upgrade operations detected" in alembic(tmp_path, own, "check")
    engine = create_engine(f"postgresql+psycopg://{own.split('://', 1)[1]}")
    with Lease(engine, "nightly", ttl=30).hold() as lease:
        assert lease.token == 1
    engine.dispose()
    alembic(tmp_path, own, "downgrade", "base")
    assert objects(own) == set()
    script = alembic(tmp_path, own, "upgrade", "head", "--sql")
    run(own, "DROP TABLE alembic_version")
    run(own, script)
    assert objects(own) == installed
