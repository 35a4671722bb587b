"""What `pip install pgfence` and each extra bring along. `nox -s plain` installs the package alone and tries it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("alembic", "asyncio", "asyncpg", "cli", "embedded", "fastapi", "otel", "psycopg", "psycopg2")


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def test_the_core_has_three_dependencies() -> None:
    """A library that locks brings no command line, driver or web framework; with SQLAlchemy 2.0 comes greenlet."""
    assert names(PROJECT["dependencies"]) == {"cronsim", "sqlalchemy", "typing-extensions"}


def test_every_extra_installs_something() -> None:
    """The extras are those of the docs, and none is empty."""
    extras = PROJECT["optional-dependencies"]
    assert sorted(extras) == sorted(EXTRAS)
    assert all(extras.values())
    assert "pgfence[cli,psycopg]" in extras["embedded"]


def test_no_extra_of_the_core_brings_pydantic() -> None:
    """The command line is built on Click, because other parsers bring pydantic along."""
    brought = names(
        [each for name, extra in PROJECT["optional-dependencies"].items() if name != "fastapi" for each in extra]
    )
    assert not brought & {"pydantic", "typer"}


def test_pytest_and_alembic_find_their_plugins() -> None:
    """The entry point for pytest is named like its module, so that pytest registers the plugin once however it is loaded."""
    found = PROJECT["entry-points"]
    assert found == {
        "alembic.plugins": {"pgfence": "pgfence_alembic"},
        "pytest11": {"pgfence_pytest": "pgfence_pytest"},
    }


def test_the_console_script_is_outside_the_package() -> None:
    """It switches the garbage collector off before the package, and with it SQLAlchemy, is imported."""
    assert PROJECT["scripts"] == {"pgfence": "pgfence_cli:main"}


def test_each_excluded_version_has_a_reason() -> None:
    """Beside each `!=` of pyproject.toml a comment says what is wrong with that version."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    comment, _, line = text.partition('    "sqlalchemy>=')
    excluded = re.findall(r"!=([\d.]+)", line.split("\n", 1)[0])
    reasons = comment.rpartition("dependencies = [")[2]
    assert excluded
    first, *_, last = excluded
    assert f"{first} to " in reasons
    assert f" to {last}" in reasons
