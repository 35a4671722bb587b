"""Make a container image of the PostgreSQL binaries at hand: `python tests/support/container_image.py NAME:TAG`.

For machines that have a container engine and no registry. The image holds the programs, the libraries they link and a shell,
each at the path it has here, and an entry point that understands the variables of the official image.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import docker

from pgfence.embedded import _binaries

if TYPE_CHECKING:
    from collections.abc import Iterable

USER = 999
ENTRYPOINT = """#!/bin/sh
set -e
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    printf %s "$POSTGRES_PASSWORD" > /tmp/password
    initdb -D "$PGDATA" -U "$POSTGRES_USER" --pwfile=/tmp/password -A scram-sha-256 -E UTF8 --locale=C --no-sync
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    echo "CREATE DATABASE \\"$POSTGRES_DB\\"" | postgres --single -D "$PGDATA" postgres
fi
[ "$#" -gt 0 ] || set -- postgres
exec "$@" -c "listen_addresses=*"
"""


def build(image: str) -> None:
    """Make the image and give it to the engine."""
    name, _, tag = image.partition(":")
    bindir = _binaries.find()
    changes = [
        'ENTRYPOINT ["/entrypoint.sh"]',
        f"USER {USER}",
        "EXPOSE 5432",
        f"ENV PATH={bindir}:/bin",
        "ENV PGDATA=/data LC_ALL=C POSTGRES_USER=postgres POSTGRES_DB=postgres",
    ]
    with tempfile.NamedTemporaryFile() as archive, closing(docker.from_env()) as client:
        _pack(bindir, archive)
        archive.flush()
        client.api.import_image_from_file(archive.name, repository=name, tag=tag or "latest", changes=changes)


def _pack(bindir: Path, archive: io.BufferedRandom) -> None:
    programs = [bindir / name for name in ("postgres", "initdb", "psql")]
    shared, modules = (_ask(bindir, option) for option in ("--sharedir", "--pkglibdir"))
    shell = Path("/bin/sh").resolve()
    with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
        for path in (*programs, shared, modules, *_libraries([*programs, shell, *modules.glob("*.so")])):
            # The engine takes no path twice, and a library may lie in a folder that is in already.
            tar.add(os.path.normpath(path), filter=lambda entry: None if entry.name in tar.getnames() else entry)
        tar.add(shell, "bin/sh")
        _add(tar, "entrypoint.sh", ENTRYPOINT, 0o755)
        _add(tar, "etc/passwd", f"postgres:x:{USER}:{USER}::/tmp:/bin/sh\n", 0o644)
        for folder, mode, owner in (("data", 0o700, USER), ("tmp", 0o1777, 0)):
            _add(tar, folder, None, mode, owner)


def _ask(bindir: Path, option: str) -> Path:
    answer = subprocess.run([bindir / "pg_config", option], capture_output=True, text=True, check=True)
    return Path(answer.stdout.strip())


def _libraries(programs: Iterable[Path]) -> set[str]:
    """Return the files that the programs link, the loader among them."""
    answer = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False)
    words = {word for line in answer.stdout.splitlines() if line.startswith("\t") for word in line.split()}
    return {word for word in words if word.startswith("/") and Path(word).is_file()}


def _add(tar: tarfile.TarFile, name: str, content: str | None, mode: int, owner: int = 0) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.uid, entry.gid = mode, owner, owner
    if content is None:
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
        return
    entry.size = len(content.encode())
    tar.addfile(entry, io.BytesIO(content.encode()))


if __name__ == "__main__":
    build(sys.argv[1])
