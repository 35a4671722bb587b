"""Eight processes upgrade an empty database of somebody else's project at once, as it is and with the migration lock.

`nox -s real_projects` installs the projects; `-- --docs` writes what came out into docs/real-projects.md. The files that the
lock is put into are those of the installed project, and are put back afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from contextlib import contextmanager, suppress
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from sqlalchemy import URL, make_url

from pgfence import embedded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROCESSES = 8
NONE = "none"
LIMIT = 240
PAGE = Path(__file__).parents[2] / "docs" / "real-projects.md"
IMPORT = (
    "from alembic import context\n",
    "from alembic import context\nfrom pgfence.migrations import migration_lock\n",
)
AT_THE_CONNECTION = (
    "with engine.connect() as connection:",
    "with engine.connect() as connection, migration_lock(connection, timeout=600):",
)
AROUND = (
    """\
    if mlflow.store.db.utils._is_empty_database(engine):
        mlflow.store.db.utils._initialize_tables(engine)
    else:
        mlflow.store.db.utils._upgrade_db(engine)
""",
    """\
    from pgfence import LockKey
    from pgfence.migrations import migration_lock

    key = LockKey.of("mlflow", namespace="migrations")
    with engine.connect() as connection, migration_lock(connection, timeout=600, key=key):
        if mlflow.store.db.utils._is_empty_database(engine):
            mlflow.store.db.utils._initialize_tables(engine)
        else:
            mlflow.store.db.utils._upgrade_db(engine)
""",
)

Edit = tuple[str, str]


def upgrade_mlflow(url: URL) -> None:
    from mlflow.db import commands

    commands.main(["upgrade", url.render_as_string(hide_password=False)], standalone_mode=False)


def upgrade_fractal(url: URL) -> None:
    from fractal_server.__main__ import set_db

    known = {
        "JWT_SECRET_KEY": "none",
        "POSTGRES_DB": url.database,
        "POSTGRES_HOST": url.host,
        "POSTGRES_PASSWORD": url.password,
        "POSTGRES_PORT": url.port,
        "POSTGRES_USER": url.username,
    }
    os.environ.update({name: str(value) for name, value in known.items()})
    set_db()


class Variant(NamedTuple):
    """Where the lock stands, which file of the project changes for it, and whether it covers all that the command does."""

    lock: str
    file: str = ""
    edits: tuple[Edit, ...] = ()
    whole: bool = True


class Project(NamedTuple):
    """A project that ships its migrations."""

    distribution: str
    module: str
    upgrade: Callable[[URL], None]
    variants: tuple[Variant, ...]


PROJECTS = (
    Project(
        "mlflow",
        "mlflow.db",
        upgrade_mlflow,
        (
            Variant(NONE),
            Variant("in env.py", "store/db_migrations/env.py", (IMPORT, AT_THE_CONNECTION), whole=False),
            Variant("around the command", "db.py", (AROUND,)),
        ),
    ),
    Project(
        "fractal-server",
        "fractal_server.__main__",
        upgrade_fractal,
        (Variant(NONE), Variant("in env.py", "migrations/env.py", (IMPORT, AT_THE_CONNECTION))),
    ),
)


class Result(NamedTuple):
    """What came out of some rounds."""

    project: str
    lock: str
    rounds: int
    failed_rounds: int
    failed_processes: int
    at_head: int
    error: str
    whole: bool

    def expected(self) -> bool:
        """Say whether the lock helped, and was needed."""
        if self.lock == NONE:
            return bool(self.failed_processes)
        return not self.whole or (not self.failed_processes and self.at_head == self.rounds)

    def row(self) -> str:
        failed = f"{self.failed_processes} of {self.rounds * PROCESSES}"
        said = f"`{self.error}`" if self.error else ""
        return f"| {self.project} | {self.lock} | {self.failed_rounds} of {self.rounds} | {failed} | {self.at_head} | {said} |"


@contextmanager
def edited(project: Project, variant: Variant) -> Iterator[None]:
    """Put the lock into the installed project."""
    found = util.find_spec(project.module.partition(".")[0])
    assert found is not None and found.origin is not None
    if not variant.file:
        yield
        return
    file = Path(found.origin).parent / variant.file
    before = text = file.read_text(encoding="utf-8")
    for old, new in variant.edits:
        assert text.count(old) == 1, f"{project.distribution} is not what it was: {file}"
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def at_once(project: Project, url: URL, count: int) -> list[str]:
    """Upgrade in `count` processes that begin at the same moment; return the errors of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, "--child", project.distribution, folder, str(count)]
        environment = os.environ | {"REAL_PROJECT_URL": url.render_as_string(hide_password=False)}
        subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True)
        codes = json.loads(Path(folder, "codes").read_text(encoding="utf-8"))
        failed = (number for number, code in enumerate(codes) if code)
        return [Path(folder, str(number)).read_text(encoding="utf-8") for number in failed]


def child(project: Project, folder: str, count: int) -> None:
    """Import the project once, fork, and let all of them go at the same moment."""
    url = make_url(os.environ["REAL_PROJECT_URL"])
    __import__(project.module)
    reader, writer = os.pipe()
    pids = []
    for number in range(count):
        if not (pid := os.fork()):
            os.close(writer)
            os.read(reader, 1)
            os._exit(forked(project, url, Path(folder, str(number))))
        pids.append(pid)
    os.close(writer)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    Path(folder, "codes").write_text(json.dumps(codes), encoding="utf-8")


def forked(project: Project, url: URL, errors: Path) -> int:
    """Upgrade, and leave the error."""
    errors.write_text(f"still running after {LIMIT} s", encoding="utf-8")
    signal.alarm(LIMIT)
    try:
        project.upgrade(url)
    except BaseException as error:
        told = traceback.format_exception_only(error)[0].splitlines()[0]
        errors.write_text(told, encoding="utf-8")
        return 1
    return 0


@contextmanager
def database(url: URL, name: str) -> Iterator[URL]:
    """Make a database and drop it."""
    own = url.set(database=name)
    with psycopg.connect(url.set(drivername="postgresql").render_as_string(False), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        try:
            yield own
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def version(url: URL) -> list[Any]:
    """Return the revisions that are recorded."""
    with psycopg.connect(url.set(drivername="postgresql").render_as_string(False)) as connection:
        with suppress(psycopg.errors.UndefinedTable):
            return connection.execute("SELECT version_num FROM alembic_version ORDER BY 1").fetchall()
    return []


def measure(project: Project, variant: Variant, url: URL, rounds: int) -> Result:
    """Run the rounds, each on a new database."""
    with database(url, "alone") as own:
        alone = at_once(project, own, 1)
        assert not alone, alone
        head = version(own)
    errors, failed_rounds, at_head = [], 0, 0
    with edited(project, variant):
        for _ in range(rounds):
            with database(url, "together") as own:
                failed = at_once(project, own, PROCESSES)
                at_head += version(own) == head
            errors += failed
            failed_rounds += bool(failed)
    shortest = textwrap.shorten(min(errors, key=len, default=""), 110, placeholder=" ...")
    name = f"{project.distribution} {metadata.version(project.distribution)}"
    return Result(name, variant.lock, rounds, failed_rounds, len(errors), at_head, shortest, variant.whole)


def table(results: list[Result]) -> str:
    """Return the table of the page."""
    head = "| Project | Lock | Rounds that failed | Processes that failed | At head | For example |\n|---|---|---|---|---|---|\n"
    versions = [f"{name} {metadata.version(name)}" for name in ("sqlalchemy", "alembic")]
    told = f"Python {platform.python_version()}, {', '.join(versions)}, {os.cpu_count()} cores."
    return head + "".join(f"{result.row()}\n" for result in results) + f"\n{told}\n"


def measured(url: URL, rounds: int) -> list[Result]:
    """Measure all variants of all projects."""
    results = []
    for project in PROJECTS:
        for variant in project.variants:
            results.append(measure(project, variant, url, rounds))
            print(results[-1].row(), flush=True)
    return results


def main() -> None:
    """Run everything; exit code 1 if the lock where it belongs did not help, or nothing failed without it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--child", nargs=3)
    asked = parser.parse_args()
    if asked.child:
        name, folder, count = asked.child
        child(next(project for project in PROJECTS if project.distribution == name), folder, int(count))
        return
    with embedded.server(fsync=False) as address:
        results = measured(make_url(address).set(drivername="postgresql+psycopg2"), asked.rounds)
    if asked.docs:
        page = PAGE.read_text(encoding="utf-8")
        between = re.compile(r"(?s)(?<=<!-- results -->\n).*?(?=<!-- end -->)")
        PAGE.write_text(between.sub(lambda _: f"\n{table(results)}\n", page), encoding="utf-8")
    sys.exit(not all(result.expected() for result in results))


if __name__ == "__main__":
    main()
