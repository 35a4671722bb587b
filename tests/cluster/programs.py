"""Find the programs of the cluster. Run as a script, without any package: check those that pip does not install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PATRONI = "PGFENCE_TEST_PATRONI"
"""The variable that names the program `patroni`. The default is the one beside the interpreter, and then the one on the PATH."""
_SYSTEM = {"etcd": "etcd-server", "haproxy": "haproxy", "pgbouncer": "pgbouncer"}
"""Programs that pip does not install, and their packages in Debian and Ubuntu."""
_MINIMUM = (4, 1)


class ProgramsMissingError(RuntimeError):
    """Programs are not installed. The message lists all of them and how to install them."""


@dataclass(frozen=True, slots=True)
class Programs:
    """The paths of the programs of the cluster, and their versions for the record of a run."""

    etcd: Path
    haproxy: Path
    pgbouncer: Path
    patroni: Path
    postgresql: Path
    versions: dict[str, str]


def find_programs() -> Programs:
    """Return the programs of the cluster, after each of them has run.

    Raises:
        ProgramsMissingError: some are not installed, do not run as the user of the servers, or are too old.
    """
    from pgfence.embedded import _binaries
    from pgfence.errors import UnreachableError

    found = {name: _find(name) for name in _SYSTEM}
    faults = describe_missing()
    patroni = _find_patroni()
    bindir = None
    try:
        bindir = _binaries.find()
    except UnreachableError as error:
        faults.append(f"PostgreSQL: {error}")
    if patroni is None:
        faults.append(f"patroni: pip install 'patroni[etcd3,psycopg3]>=4.1', or set {PATRONI} to the program")
    if bindir is not None and not (bindir / "pg_rewind").exists():
        faults.append(
            f"pg_rewind: not in {bindir}; set {_binaries.VARIABLE} to the directory of a complete installation"
        )
    if faults or patroni is None or bindir is None:
        raise ProgramsMissingError(_join(faults))
    programs = {name: path for name, path in found.items() if path is not None}
    answers = _read_versions({**programs, "patroni": patroni, "postgresql": bindir / "postgres"})
    return Programs(**programs, patroni=patroni, postgresql=bindir, versions=answers)


def describe_missing() -> list[str]:
    """Return one line for each program that is missing and that pip does not install."""
    return [
        f"{name}: on Debian and Ubuntu, apt-get install --no-install-recommends {package}"
        for name, package in _SYSTEM.items()
        if _find(name) is None
    ]


def _find(name: str) -> Path | None:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    return Path(path) if path else None


def _find_patroni() -> Path | None:
    if chosen := os.environ.get(PATRONI):
        return Path(chosen)
    beside = Path(sys.executable).with_name("patroni")
    return beside if beside.exists() else _find("patroni")


def _read_versions(programs: dict[str, Path]) -> dict[str, str]:
    from pgfence.embedded import _process

    faults, versions = [], {}
    user = other.pw_name if (other := _process.find_other_user()) else "this user"
    for name, path in programs.items():
        option = "-v" if name == "haproxy" else "--version"
        words, options = _process.build_command([path, option])
        try:
            answer = subprocess.run(words, capture_output=True, text=True, check=False, **options)
        except OSError as error:
            faults.append(
                f"{name}: {path} does not run as {user}: {error}. That user must be able to read it and its interpreter"
            )
            continue
        if answer.returncode:
            faults.append(f"{name}: {path} does not run as {user}: {answer.stderr.strip()[-300:]}")
        versions[name] = answer.stdout.splitlines()[0] if answer.stdout else ""
    if not faults and is_too_old(versions["patroni"]):
        # Before 3.0.3 a leader that is continued after a pause takes the leadership back, and commits are lost.
        faults.append(f"patroni: {programs['patroni']} is {versions['patroni']}, and the cluster needs 4.1 or later")
    if faults:
        raise ProgramsMissingError(_join(faults))
    return versions


def is_too_old(version: str) -> bool:
    """Return whether a version, as `patroni --version` prints it, is not supported."""
    return tuple(int(part) for part in version.split()[-1].split(".")[:2]) < _MINIMUM


def _join(faults: list[str]) -> str:
    return "the cluster needs programs that are missing:\n" + "\n".join(f"  {fault}" for fault in faults)


if __name__ == "__main__":
    if lines := describe_missing():
        sys.exit(_join(lines))
