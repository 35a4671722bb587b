"""Determine what the `alembic` command that runs env.py is about to do, as far as it is known before `context.configure()`."""

from __future__ import annotations

import logging
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import column, select
from sqlalchemy import table as as_table
from sqlalchemy.schema import CreateTable

if TYPE_CHECKING:
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory
    from sqlalchemy import Connection

log = logging.getLogger("pgfence.migrations")

TABLE = "alembic_version"
NEEDED = (1, 18, 0)
"""The first version of Alembic that loads plugins, and with them the operations."""

# The names of the functions that commands pass to run_migrations() and that only read. All other functions may write, so their
# commands take the lock.
_LOOKS = {
    "_display_current_history",
    "display_version",
    "edit_current",
    "nothing",
    "retrieve_migrations",
    "show_current",
}


class VersionTable(NamedTuple):
    """The table that contains the current revision."""

    name: str
    schema: str | None


def _find_environment() -> EnvironmentContext | None:
    """Return Alembic's environment, or None if Alembic does not run env.py."""
    found: EnvironmentContext | None = getattr(sys.modules.get("alembic.context"), "_proxy", None)
    return found


def is_read_only() -> bool:
    """Return whether the command, such as `check`, `current` or `revision`, only reads the version."""
    environment = _find_environment()
    if environment is None or (function := _function_of(environment)) not in _LOOKS:
        return False
    if function == "retrieve_migrations" and (reason := find_too_old()):
        log.warning("fences and version triggers are not compared: %s", reason)
    # Alembic itself does this only for `current`, so `check` and `revision` would create the version table.
    environment.context_opts["dont_mutate"] = True
    return True


def find_too_old() -> str | None:
    """Return a message if this version of Alembic is too old to load the operations of plugins, or None."""
    version = getattr(sys.modules.get("alembic"), "__version__", "")
    if not version or tuple(int(digits) for digits in re.findall(r"\d+", version)[:3]) >= NEEDED:
        return None
    needed = ".".join(map(str, NEEDED))
    return (
        f"pgfence's operations need Alembic {needed} or later, but this is {version}: pip install 'alembic>={needed}'"
    )


def explain(error: BaseException) -> None:
    """Add a note to the error if a migration failed because this Alembic is too old to load pgfence's operations."""
    from pgfence_alembic import Directives

    unknown = isinstance(error, AttributeError) and any(f"'{name}'" in str(error) for name in vars(Directives))
    if unknown and (reason := find_too_old()):
        error.add_note(reason)


def expect_one_head() -> None:
    """Reject an upgrade that cannot succeed, before anything is locked.

    An upgrade is rejected if two revisions have the same id, if the revisions form a cycle, or if it leads to `head` and there are
    several heads.
    """
    environment = _find_environment()
    if environment is None or _function_of(environment) != "upgrade":
        return
    from alembic.script.revision import RevisionError

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Revision .* is present more than once")
        try:
            heads = environment.script.get_heads()
        except UserWarning as doubled:
            raise _command_error(
                f"{doubled}: several files have this id, and only one of them would be applied. Give each file an id of its own"
            ) from None
        except RevisionError as broken:
            raise _command_error(str(broken)) from broken
    if _target_of(environment) == "head" and len(heads) > 1:
        raise _command_error(_describe_heads(environment.script, heads))


def _describe_heads(scripts: ScriptDirectory, heads: list[str]) -> str:
    lines = [[each.revision for each in scripts.iterate_revisions(head, "base")] for head in heads]
    common = next((each for each in lines[0] if all(each in line for line in lines)), None)
    files = " and ".join(f"{head} ({scripts.get_revision(head).path})" for head in heads)
    after = f", which diverge after {common}" if common else ""
    return f"Multiple head revisions are present: {files}{after}. Merge them with `alembic merge heads`"


def _command_error(reason: str) -> Exception:
    from alembic.util import CommandError

    return CommandError(f"{reason}. Nothing was locked or changed")


def _function_of(environment: EnvironmentContext) -> str:
    return getattr(environment.context_opts.get("fn"), "__name__", "")


def _target_of(environment: EnvironmentContext) -> Any:
    return environment.context_opts.get("destination_rev") if _function_of(environment) == "upgrade" else None


def find_version_table() -> VersionTable:
    """Return the table that the ini file names (`version_table`, `version_table_schema`), or Alembic's default."""
    environment = _find_environment()
    if environment is None:
        return VersionTable(TABLE, None)
    asked = environment.config.get_main_option
    return VersionTable(asked("version_table") or TABLE, asked("version_table_schema") or None)


def is_at_head(connection: Connection) -> bool:
    """Return whether the command is an upgrade for which Alembic finds nothing to apply.

    Alembic's own traversal decides, because with `depends_on`, or with a destination before the head, an up-to-date version table
    does not contain the heads.
    """
    environment = _find_environment()
    if environment is None or not (destination := _target_of(environment)):
        return False
    table = find_version_table()
    if not connection.dialect.has_table(connection, table.name, table.schema):
        return False
    from alembic.script.revision import RevisionError

    query: Any = select(column("version_num")).select_from(as_table(table.name, schema=table.schema))
    found = tuple(connection.scalars(query))
    try:
        return not list(environment.script.iterate_revisions(destination, found, implicit_base=True))
    except RevisionError:
        # Another process may be about to change what was read. Under the lock, Alembic reads again, and raises its own error.
        return False


def writes_version(statement: Any) -> bool:
    """Return whether a statement records a revision."""
    return getattr(statement, "is_dml", False) and _is_version_table(statement.table)


def makes_version_table(statement: Any) -> bool:
    """Return whether a statement creates the version table."""
    return isinstance(statement, CreateTable) and _is_version_table(statement.element)


def _is_version_table(table: Any) -> bool:
    context = getattr(_find_environment(), "_migration_context", None)
    return context is not None and (table.name, table.schema) == (context.version_table, context.version_table_schema)
