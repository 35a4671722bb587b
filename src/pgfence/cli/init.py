"""`pgfence init`: makes a migration environment whose upgrades run one at a time."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pgfence.cli import options
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.parser import Command, Option
from pgfence.cli.report import Console
from pgfence.migrations import _environment as environment


@click.command(
    "init",
    short_help="Create an Alembic environment for parallel upgrades.",
    cls=Command,
    arguments={"DIR": "Directory of the environment; must be new or empty."},
    codes=[
        ("0", "The environment was created."),
        ("64", "Misuse: no such template, or the directory is not empty."),
        ("78", "Alembic is not installed."),
    ],
)
@click.argument("directory", metavar="DIR", required=False, type=click.Path(path_type=Path))
@click.option(
    "--template",
    "-t",
    cls=Option,
    default="sync",
    metavar="NAME",
    help=f"One of {', '.join(environment.list_templates())}. Default: sync.",
)
@click.option(
    "--config",
    "-c",
    "ini",
    cls=Option,
    type=click.Path(path_type=Path),
    default=Path("alembic.ini"),
    metavar="FILE",
    help="The ini file; an existing one is kept. Default: alembic.ini.",
)
@click.option(
    "--path",
    cls=Option,
    is_flag=True,
    help="Create nothing; print the template's folder, for `alembic init -t`.",
)
@options.quiet
def init(directory: Path | None, template: str, ini: Path, path: bool, quiet: bool) -> None:
    """Create an Alembic environment in which every pod may run `alembic upgrade head` at the same time.

    Use it instead of `alembic init`. No server is contacted.
    """
    if template not in environment.list_templates():
        raise MisuseError(f"--template: there is no {template!r}; there are {', '.join(environment.list_templates())}")
    if path:
        print(environment.TEMPLATES / template)
        return
    if directory is None:
        raise MisuseError("which directory? `pgfence init migrations`, for example")
    if "%" in str(directory):
        raise MisuseError(f"{directory}: a per cent sign begins something else in the ini file: choose another name")
    kept = ini.exists()
    _make(directory, template, ini)
    if kept and (instead := _find_other_environment(ini, directory)):
        Console(quiet=quiet).warn(instead)
        return
    Console(quiet=quiet).tell(
        f"made {directory}{'' if kept else f' and {ini}'}: set target_metadata in {directory / 'env.py'}, the database in"
        " DATABASE_URL, then `alembic revision --autogenerate` and `alembic upgrade head`"
    )


def _find_other_environment(ini: Path, directory: Path) -> str | None:
    """Say that an ini file, which was there, names another environment than this one, if it does."""
    named = environment.find_location(ini)
    if named is not None and Path(named).resolve() == directory.resolve():
        return None
    wanted = os.path.relpath(directory.resolve(), ini.resolve().parent)
    return (
        f"made {directory}, but kept {ini}, whose script_location is {named or 'missing'}: `alembic` goes on without {directory}"
        f" until it says script_location = %(here)s/{wanted}"
    )


def _make(directory: Path, template: str, ini: Path) -> None:
    if ini.exists() and not ini.is_file():
        raise MisuseError(f"{ini} is no file")
    made = directory.resolve()
    if not ini.parent.is_dir() and ini.resolve().parent not in {made, *made.parents}:
        raise MisuseError(f"{ini} cannot be made: there is no directory {ini.parent}")
    try:
        environment.make(directory, template, ini)
    except ImportError as error:  # also where a folder called alembic is all there is of that name
        if error.name != "alembic":
            raise
        Console().warn("Alembic is not installed here: pip install 'pgfence[alembic]'")
        raise CommandExit(Code.REFUSED) from None
    except FileExistsError:
        raise MisuseError(f"{directory} is there already, and not empty") from None
    except OSError as error:
        raise MisuseError(f"{error.filename or directory} cannot be made: {error.strerror}") from None
