"""Alembic loads the entry point in every command, half imported, in programs that may not use pgfence: nothing may break."""

from __future__ import annotations

import json
import subprocess
import sys

import pgfence_alembic

DIRECTIVES = [name for name in vars(pgfence_alembic.Directives) if not name.startswith("_")]
FIRST = (
    "alembic",
    "alembic.autogenerate.render",
    "alembic.command",
    "alembic.config",
    "alembic.context",
    "alembic.op",
    "alembic.operations",
    "alembic.runtime.migration",
    "alembic.runtime.plugins",
    "alembic.util",
    "pgfence._alembic.comparison",
    "pgfence_alembic",
)


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_directives_are_there_whatever_is_imported_first() -> None:
    """Alembic's modules import each other in another order each time, and the plugin is complete after all of them.

    Each order in a process of its own, forked from one that has imported nothing of Alembic or pgfence.
    """
    program = f"""
import importlib, json, os, sqlalchemy, sys
for module in {FIRST!r}:
    if not os.fork():
        importlib.import_module(module)
        import alembic.op
        import alembic.runtime.plugins as plugins
        from pgfence._alembic import comparison, implementations, renderers
        there = [name for name in {DIRECTIVES!r} if hasattr(alembic.op, name)]
        print(json.dumps([module, "pgfence" in plugins._all_plugins, there]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, module
    assert "alembic" not in sys.modules and "pgfence" not in sys.modules
"""
    told = [json.loads(line) for line in python(program).splitlines()]
    assert told == [[module, True, DIRECTIVES] for module in FIRST]


def test_a_command_of_alembic_loads_the_entry_point_alone() -> None:
    """With the plugin installed `import alembic` registers the operations and imports no module of pgfence's."""
    program = """
import sys, alembic.op
assert hasattr(alembic.op, "add_fence")
print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("pgfence", "pgfence_alembic")))
"""
    assert python(program) == "pgfence_alembic\n"


def test_the_module_of_operations_is_enough_to_write_them_down() -> None:
    """Whoever imports it for a Rewriter, in an env.py that does not name the plugin, gets scripts that can run."""
    told = python(
        "from pgfence.migrations.operations import CreateIndexSafely\n"
        "from alembic.autogenerate import api, render_op_text\n"
        "from alembic.runtime.migration import MigrationContext\n"
        "context = MigrationContext.configure(dialect_name='postgresql', opts={'alembic_module_prefix': 'op.'})\n"
        "print(render_op_text(api.AutogenContext(context, autogenerate=False), CreateIndexSafely('ix', 't', ['a'])))"
    )
    assert told == "op.create_index_safely('ix', 't', ['a'], unique=False)\n"


def test_a_failure_of_the_entry_point_is_logged_and_alembic_goes_on() -> None:
    """After any failure in the registration, `alembic` works, and the log says that the operations are missing."""
    told = python(
        "import pgfence_alembic; pgfence_alembic._register = None; import alembic.op;"
        "assert hasattr(alembic.op, 'create_table') and not hasattr(alembic.op, 'create_pgfence')"
    )
    assert "pgfence's operations could not be registered" in told


def test_an_alembic_that_iterates_over_the_entry_point_gets_the_plugin() -> None:
    """Alembic 1.18.0 to 1.20.0 takes the entry point for a collection of modules: the operations are registered, silently."""
    program = """
import alembic.op
from importlib import metadata
from alembic.runtime import plugins
plugins._all_plugins.pop("pgfence"), plugins._all_plugins.pop("alembic.autogenerate.pgfence")
del alembic.op.create_pgfence
for entrypoint in metadata.entry_points(group="alembic.plugins", name="pgfence"):
    for module in entrypoint.load():
        plugins.Plugin.setup_plugin_from_module(module, entrypoint.name)
print("pgfence" in plugins._all_plugins, hasattr(alembic.op, "create_pgfence"))
"""
    assert python(program) == "True True\n"
