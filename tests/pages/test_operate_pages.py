"""The pages for operators agree with the code: error classes, loss reasons, SQLSTATEs and versions."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import pgfence
from pgfence import errors, once
from pgfence._sql import storage
from pgfence.errors import LossReason, PgfenceError

OPERATE = Path(__file__).parents[2] / "docs" / "operate"
SOURCE = Path(pgfence.__file__).parent
INTERNAL = {"PF000", "PF008", "PF009"}
"""Raised and caught inside one function."""


def read_page(name: str) -> str:
    return (OPERATE / f"{name}.md").read_text(encoding="utf-8")


def list_error_classes() -> dict[str, type[PgfenceError]]:
    """Return the public error classes by name."""
    return {
        name: found
        for module in (errors, once, pgfence)
        for name in dir(module)
        if isinstance(found := getattr(module, name), type) and issubclass(found, PgfenceError)
    }


ERRORS = list_error_classes()
ENTRIES = dict(
    re.findall(r"^### (\w+Error)\n\n(.*?)(?=\n\n|\n?\Z)", read_page("troubleshooting"), re.MULTILINE | re.DOTALL)
)


def test_troubleshooting_has_an_entry_for_each_error_class() -> None:
    """Each public error class has one entry, and no entry is of a class that does not exist."""
    assert sorted(ENTRIES) == sorted(ERRORS)


@pytest.mark.parametrize("name", sorted(ERRORS.keys() - {"PgfenceError"}))
def test_an_entry_agrees_with_its_class(name: str) -> None:
    """The word after "Retry:" is `retryable` of the class, and the entry has the HTTP status unless that is 500."""
    error, entry = ERRORS[name], ENTRIES[name]
    retry = re.search(r"Retry: (\w+)", entry)
    assert retry is not None
    depends_on_instance = name in {"AttemptLostError", "UnreachableError", "VersionConflictError"}
    assert depends_on_instance or retry[1] == ("yes" if error.retryable else "no")
    assert error.http_status == 500 or str(error.http_status) in entry or issubclass(error, once.SlotOverError)


def test_troubleshooting_lists_each_loss_reason() -> None:
    """The table of reasons has a row for each value of `LockLostError.reason`."""
    page = read_page("troubleshooting")
    section = page[page.index("### LockLostError") : page.index("### LockNotHeldError")]
    assert sorted(re.findall(r"^\| `([a-z ]+)` \|", section, re.MULTILINE)) == sorted(get_args(LossReason))


def test_upgrading_lists_each_version_of_the_tables() -> None:
    """The table of versions ends with the newest one."""
    listed = re.findall(r"^\| (\d+) \|", read_page("upgrading"), re.MULTILINE)
    assert listed == [str(version) for version in range(1, storage.VERSION + 1)]


@pytest.mark.parametrize("page", ["upgrading", "it-is-stuck"])
def test_a_page_lists_each_sqlstate(page: str) -> None:
    """The page names the SQLSTATEs that reach a client, and no other."""
    used = {
        state
        for file in (SOURCE / "_sql").rglob("*")
        if file.suffix in {".py", ".sql"}
        for state in re.findall(r"PF\d{3}", file.read_text(encoding="utf-8"))
    }
    assert set(re.findall(r"PF\d{3}", read_page(page))) == used - INTERNAL


def test_logging_lists_each_logger() -> None:
    """The page has a row for each logger of the package, and none for others."""
    used = {
        name
        for file in SOURCE.rglob("*.py")
        for name in re.findall(r'getLogger\("(pgfence\.\w+)"\)', file.read_text(encoding="utf-8"))
    }
    assert set(re.findall(r"^\| `(pgfence\.\w+)` \|", read_page("logging-and-metrics"), re.MULTILINE)) == used


def test_logging_lists_each_field_of_an_event() -> None:
    """The page describes the fields of `Event` and `TransactionAttempt`."""
    page = read_page("logging-and-metrics")
    for field in dataclasses.fields(pgfence.TransactionAttempt):
        assert f"`{field.name}`" in page


PROJECT = tomllib.loads((OPERATE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_installation_lists_each_extra_with_its_requirements() -> None:
    """The table of extras is that of pyproject.toml."""
    rows = re.findall(r"^\| `(\w+)` \| (`[^|]+) \|", read_page("installation"), re.MULTILINE)
    listed = {extra: re.findall(r"`([^`]+)`", needed) for extra, needed in rows}
    assert listed == PROJECT["optional-dependencies"]


def test_installation_lists_the_dependencies_and_supported_versions() -> None:
    """The packages of a plain installation, Python, and SQLAlchemy with the excluded releases are those of pyproject.toml."""
    page = read_page("installation")
    packages = [re.split(r"[<>=!]", line)[0] for line in PROJECT["dependencies"]]
    assert set(re.findall(r"`([a-z-]+)`", re.search(r"installs three packages: (.*?)\n\n", page, re.DOTALL)[1])) == set(
        packages
    )  # type: ignore[index]
    pythons = [line.split(" :: ")[-1] for line in PROJECT["classifiers"] if " Python :: 3." in line]
    assert f"| Python | {pythons[0]} to {pythons[-1]} |" in page
    (sqlalchemy,) = (line for line in PROJECT["dependencies"] if line.startswith("sqlalchemy"))
    excluded = re.findall(r"!=(2\.1\.\d)", sqlalchemy)
    assert excluded == [f"2.1.{patch}" for patch in range(7)]
    assert "2.0.40 and later, 2.1.7 and later" in page
    assert ">=2.0.40,<2.2" in sqlalchemy
