"""What the `alembic` command that runs env.py is about to do, as far as it can be known before `context.configure()`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import column, select
from sqlalchemy import table as as_table

if TYPE_CHECKING:
    from sqlalchemy import Connection

TABLE = "alembic_version"

# By the function that a command hands to run_migrations(). Whatever is not among them may write, and is locked.
_LOOKS = {
    "_display_current_history",
    "display_version",
    "edit_current",
    "nothing",
    "retrieve_migrations",
    "show_current",
}


class VersionTable(NamedTuple):
    """Where the version is kept."""

    name: str
    schema: str | None


def _environment() -> Any:
    """Return Alembic's environment; None where env.py is not run by Alembic."""
    return getattr(sys.modules.get("alembic.context"), "_proxy", None)


def only_looks() -> bool:
    """Whether the command reads the version and changes nothing: `current`, `check`, `history`, `revision`, `show`."""
    environment = _environment()
    if environment is None or _function(environment) not in _LOOKS:
        return False
    # Alembic itself spares `current` alone: `check` and `revision` would make the version table.
    environment.context_opts["dont_mutate"] = True
    return True


def expect_one_head() -> None:
    """Have Alembic refuse an upgrade to `head` where there are several, before anything is locked."""
    environment = _environment()
    if environment is not None and _upgrades_to(environment) == "head":
        environment.script.as_revision_number("head")


def _function(environment: Any) -> str:
    return getattr(environment.context_opts.get("fn"), "__name__", "")


def _upgrades_to(environment: Any) -> Any:
    return environment.context_opts.get("destination_rev") if _function(environment) == "upgrade" else None


def version_table() -> VersionTable:
    """Return the table that the ini file names (`version_table`, `version_table_schema`), or Alembic's default."""
    environment = _environment()
    if environment is None:
        return VersionTable(TABLE, None)
    asked = environment.config.get_main_option
    return VersionTable(asked("version_table") or TABLE, asked("version_table_schema") or None)


def at_head(connection: Connection) -> bool:
    """Whether the command is an upgrade to the newest revision, and the database is there already."""
    environment = _environment()
    if environment is None or _upgrades_to(environment) not in ("head", "heads"):
        return False
    table = version_table()
    if not connection.dialect.has_table(connection, table.name, table.schema):
        return False
    query: Any = select(column("version_num")).select_from(as_table(table.name, schema=table.schema))
    found = connection.scalars(query).all()
    return bool(found) and set(found) == set(environment.script.get_heads())


def writes_version(statement: Any) -> bool:
    """Whether a statement records a revision."""
    environment = _environment()
    context = getattr(environment, "_migration_context", None)
    if context is None or not getattr(statement, "is_dml", False):
        return False
    return (statement.table.name, statement.table.schema) == (context.version_table, context.version_table_schema)
