"""`pgfence init`: makes a migration environment whose upgrades run one at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pgfence.cli.codes import Code, CommandExit, MisuseError
from pgfence.cli.report import Console
from pgfence.migrations import _environment as environment


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("init", epilog="Exit codes: 0 made; 64 misuse; 78 Alembic is missing.")(init)


def init(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", show_default=False, help="Of the environment; new, or empty.")
    ] = None,
    template: Annotated[
        str, typer.Option("--template", "-t", help=f"One of {', '.join(environment.list_templates())}.")
    ] = "sync",
    ini: Annotated[Path, typer.Option("--config", "-c", help="The ini file; kept if it is there.")] = Path(
        "alembic.ini"
    ),
    path: Annotated[
        bool, typer.Option("--path", help="Print the template's folder, for `alembic init -t`, and make nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing when all is well.")] = False,
) -> None:
    """Make an Alembic environment in which `alembic upgrade head` may be run by every pod at once. Asks no server."""
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
