"""`pgfence init`: create a migration environment whose upgrades run one at a time."""

from __future__ import annotations

import os
from pathlib import Path

import click

from pgfence.cli import options
from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.parser import Command, Option, is_unicode
from pgfence.cli.report import Console
from pgfence.migrations import _environment as environment


@click.command(
    "init",
    short_help="Create an Alembic environment whose upgrades run one at a time.",
    cls=Command,
    arguments={"DIR": "Directory of the environment. It must be new or empty."},
    examples={
        "pgfence init migrations": "Create the directory migrations and the file alembic.ini",
        "pgfence init -t async migrations": "Create an environment for an application with an AsyncEngine",
    },
    codes=[
        ("0", "The environment was created."),
        ("64", "Misuse: there is no such template, the directory is not empty, or a file cannot be created."),
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
    help=f"Template of the environment: {' or '.join(environment.list_templates())}. Default: sync.",
)
@click.option(
    "--config",
    "-c",
    "ini",
    cls=Option,
    type=click.Path(path_type=Path),
    default=Path("alembic.ini"),
    metavar="FILE",
    help="The ini file. An existing file is kept. Default: alembic.ini.",
)
@click.option(
    "--path",
    cls=Option,
    is_flag=True,
    help="Print the template's directory, for `alembic init -t`, and create nothing.",
)
@options.quiet
def init(directory: Path | None, template: str, ini: Path, path: bool, quiet: bool) -> None:
    """Create an Alembic environment in which all pods can start `alembic upgrade head` at the same time.

    One pod migrates, and the others wait.

    Use it instead of `alembic init`. The command does not contact a server.
    """
    if template not in environment.list_templates():
        raise MisuseError(f"--template must be one of {', '.join(environment.list_templates())}, not {template!r}")
    if path:
        print(environment.TEMPLATES / template)
        return
    if directory is None:
        raise MisuseError("DIR is missing: give the directory to create, for example `pgfence init migrations`")
    if not is_unicode(f"{directory}{ini}"):
        raise MisuseError("DIR or --config is not valid Unicode: give another name")
    if "%" in str(directory):
        raise MisuseError(
            f"{str(directory)!r} contains a percent sign, which has a special meaning in the ini file: choose another name for DIR"
        )
    kept = ini.exists()
    _make(directory, template, ini)
    if kept and (instead := _find_other_environment(ini, directory)):
        Console(quiet=quiet).warn(instead)
        return
    Console(quiet=quiet).tell(
        f"created {directory}{'' if kept else f' and {ini}'}. Next: set target_metadata in {directory / 'env.py'} and DATABASE_URL in the"
        " environment, then run `alembic revision --autogenerate` and `alembic upgrade head`"
    )


def _find_other_environment(ini: Path, directory: Path) -> str | None:
    """Return a warning if the existing ini file does not point to `directory`, otherwise None."""
    named = environment.find_location(ini)
    if named is not None and Path(named).resolve() == directory.resolve():
        return None
    wanted = os.path.relpath(directory.resolve(), ini.resolve().parent)
    return (
        f"created {directory}, but kept {ini}, whose script_location is {named or 'missing'}: `alembic` does not use {directory}"
        f" until you set script_location = %(here)s/{wanted}"
    )


def _make(directory: Path, template: str, ini: Path) -> None:
    if ini.exists() and not ini.is_file():
        raise MisuseError(f"{str(ini)!r} is not a file: pass the path of the ini file to --config")
    made = directory.resolve()
    if not ini.parent.is_dir() and ini.resolve().parent not in {made, *made.parents}:
        raise MisuseError(f"cannot create {str(ini)!r}: the directory {str(ini.parent)!r} does not exist")
    try:
        environment.make(directory, template, ini)
    except ImportError as error:  # also raised if a directory named alembic is the only `alembic` that can be imported
        if error.name != "alembic":
            raise
        Console().warn("Alembic is not installed: run pip install 'pgfence[alembic]'")
        raise CommandExit(Code.REFUSED) from None
    except FileExistsError:
        raise MisuseError(
            f"{str(directory)!r} already exists and is not an empty directory: choose another name for DIR"
        ) from None
    except OSError as error:
        raise MisuseError(f"cannot create {str(error.filename or directory)!r}: {error.strerror}") from None
