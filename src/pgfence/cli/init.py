"""`pgfence init`: makes a migration environment whose upgrades run one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pgfence.cli.codes import Code, Finish, MisuseError
from pgfence.cli.report import Speaker
from pgfence.migrations import _environment as environment


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("init", epilog="Exit codes: 0 made; 64 misuse; 78 Alembic is missing.")(init)


def init(
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", show_default=False, help="Of the environment; new, or empty.")
    ] = None,
    template: Annotated[
        str, typer.Option("--template", "-t", help=f"One of {', '.join(environment.names())}.")
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
    if template not in environment.names():
        raise MisuseError(f"--template: there is no {template!r}; there are {', '.join(environment.names())}")
    if path:
        print(environment.TEMPLATES / template)
        return
    if directory is None:
        raise MisuseError("which directory? `pgfence init migrations`, for example")
    _make(directory, template, ini)
    Speaker(quiet=quiet).tell(
        f"made {directory} and {ini}: set target_metadata in {directory / 'env.py'}, the database in MIGRATION_URL,"
        " then `alembic revision --autogenerate` and `alembic upgrade head`"
    )


def _make(directory: Path, template: str, ini: Path) -> None:
    try:
        environment.make(directory, template, ini)
    except ImportError as error:  # also where a folder called alembic is all there is of that name
        if error.name != "alembic":
            raise
        Speaker().warn("Alembic is not installed here: pip install 'pgfence[alembic]'")
        raise Finish(Code.REFUSED) from None
    except FileExistsError:
        raise MisuseError(f"{directory} is there already, and not empty") from None
    except OSError as error:
        raise MisuseError(f"{directory} cannot be made: {error.strerror}") from None
