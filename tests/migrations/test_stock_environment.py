"""pgfence in an environment that `alembic init` has created, whose env.py disables the loggers that alembic.ini does not list."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sqlalchemy import make_url

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def alembic(folder: Path, *words: str) -> str:
    """Run `alembic`, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from alembic.config import main; main(sys.argv[1:])", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(EXAMPLES)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def create_environment(folder: Path, own: str, *changed: tuple[str, str]) -> None:
    """Create an environment for the models of a ledger, with these changes of env.py."""
    alembic(folder, "init", "migrations")
    ini, env = folder / "alembic.ini", folder / "migrations" / "env.py"
    url = make_url(own).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    ini.write_text(ini.read_text().replace("driver://user:pass@localhost/dbname", url.replace("%", "%%")))
    text = env.read_text()
    models = "from ledger_models import Base\ntarget_metadata = Base.metadata"
    for old, new in (("target_metadata = None", models), *changed):
        assert old in text
        text = text.replace(old, new)
    env.write_text(text)


def test_a_missing_plugin_is_reported(own: str, tmp_path: Path) -> None:
    """Without the warning, the first revision would lack the fences, and a later one would drop pgfence's tables."""
    create_environment(tmp_path, own)
    output = alembic(tmp_path, "revision", "--autogenerate", "-m", "guarded")
    assert 'add autogenerate_plugins=["alembic.autogenerate.*", "pgfence"]' in output


def test_a_fence_that_is_not_compared_is_reported_under_the_lock(own: str, tmp_path: Path) -> None:
    """The lock's own warnings appear, too."""
    begins = "with connectable.connect() as connection"
    create_environment(
        tmp_path,
        own,
        (
            begins,
            f"import pgfence.migrations._command as c\n    c.NEEDED = (99,)\n    {begins}, migration_lock(connection)",
        ),
        ("from alembic import context", "from alembic import context\nfrom pgfence.migrations import migration_lock"),
    )
    output = alembic(tmp_path, "revision", "--autogenerate", "-m", "guarded")
    assert "fences and version triggers are not compared" in output
