"""Checks of an Alembic environment. They read env.py and do not run it."""

from __future__ import annotations

import ast
import configparser
from pathlib import Path
from typing import TYPE_CHECKING

from pgfence._admin.doctor.finding import build_finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgfence._admin.doctor.finding import Finding

_PLUGIN = "pgfence"
_LOCK = "migration_lock"


def check_environment(ini: Path) -> Iterator[Finding]:
    """Yield a finding for each setting that the environment of an ini file lacks.

    Raises:
        ValueError: the file or its env.py cannot be read.
    """
    script = find_script(ini)
    names, texts = _read_words(script)
    if _LOCK not in names:
        yield build_finding(
            "alembic-lock",
            f"'{script}' does not use pgfence's migration_lock.",
            "Import it from pgfence.migrations, and call context.begin_transaction() inside this block:"
            " with migration_lock(connection, timeout=600): ...",
        )
    if "autogenerate_plugins" not in names | texts or not any(_is_plugin(text) for text in texts):
        yield build_finding(
            "alembic-plugin",
            f"'{script}' does not select pgfence's plugin for autogenerate.",
            'Add it to the call: context.configure(..., autogenerate_plugins=["alembic.autogenerate.*", "pgfence"])',
        )


def find_script(ini: Path) -> Path:
    """Return the env.py of an Alembic ini file.

    Raises:
        ValueError: the file cannot be read or has no script_location.
    """
    parser = configparser.ConfigParser({"here": str(ini.resolve().parent)})
    try:
        with ini.open(encoding="utf-8") as lines:
            parser.read_file(lines)
        location = parser.get("alembic", "script_location")
    except OSError as error:
        raise ValueError(f"cannot read '{ini}': {error.strerror}") from error
    except (configparser.NoSectionError, configparser.NoOptionError) as error:
        raise ValueError(f"'{ini}' has no script_location in a section [alembic]") from error
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ValueError(f"'{ini}' is not a valid ini file: {type(error).__name__}") from error
    if ":" in location and not Path(location).is_absolute():
        raise ValueError(f"the script_location of '{ini}' is in a package ({location}), which pgfence does not import")
    return ini.parent / location / "env.py"


def _read_words(script: Path) -> tuple[set[str], set[str]]:
    """Return the names and the string literals in a Python file."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read '{script}': {error.strerror}") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"'{script}' is not a Python program: {error}") from error
    names: set[str] = set()
    texts: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    return names, texts


def _is_plugin(text: str) -> bool:
    return text == _PLUGIN or text.startswith(f"{_PLUGIN}.")
