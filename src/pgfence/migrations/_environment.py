"""Let Alembic create a new migration environment from one of pgfence's templates."""

from __future__ import annotations

import configparser
import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, ClassVar

TEMPLATES = Path(__file__).with_name("templates")


def list_templates() -> list[str]:
    """Return the names of the templates."""
    return sorted(folder.name for folder in TEMPLATES.iterdir() if folder.is_dir())


def make(directory: Path, template: str, ini: Path) -> None:
    """Create an environment, and the ini file unless it exists.

    Raises:
        ImportError: Alembic is not installed.
        FileExistsError: the path is a file, or a directory that is not empty.
    """
    from alembic import command
    from alembic.config import Config

    class Ours(Config):
        messaging_opts: ClassVar[Any] = {"quiet": True}

        def get_template_directory(self) -> str:
            return str(TEMPLATES)

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(directory)
    with redirect_stdout(io.StringIO()):  # Alembic prints each file name, whatever messaging_opts is
        command.init(Ours(ini), str(directory), template=template)


def find_location(ini: Path) -> str | None:
    """Return the location of the environment in an ini file, None if the file has none, or a note that it is unreadable."""
    from alembic.config import Config

    try:
        return Config(ini).get_main_option("script_location")
    except (configparser.Error, UnicodeDecodeError) as error:
        return f"unreadable ({type(error).__name__})"
