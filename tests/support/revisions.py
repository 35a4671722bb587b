"""A migration environment of a test: revisions are made and run in this process, on an engine and models of the test."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alembic import command
from alembic.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine, MetaData

    from support.worlds import World

ENV = """
from alembic import context

given = context.config.attributes
options = {"target_metadata": given["metadata"], **given["options"]}
if context.is_offline_mode():
    context.configure(dialect_name="postgresql", literal_binds=True, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    with given["engine"].connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
"""

TEMPLATE = '''"""${message}"""

from alembic import op
import sqlalchemy as sa
import sqlmodel
${imports if imports else ""}

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}


def upgrade():
    ${upgrades if upgrades else "pass"}


def downgrade():
    ${downgrades if downgrades else "pass"}
'''

PLUGINS = ["alembic.autogenerate.*", "pgfence"]


class Project:
    """An environment in a folder, with `alembic upgrade` and the like as methods."""

    def __init__(self, folder: Path, engine: Engine, metadata: MetaData, **options: Any) -> None:
        (folder / "versions").mkdir(parents=True)
        (folder / "env.py").write_text(ENV, encoding="utf-8")
        (folder / "script.py.mako").write_text(TEMPLATE, encoding="utf-8")
        self.out = io.StringIO()
        self._config = Config(stdout=self.out, output_buffer=self.out)
        self._config.set_main_option("script_location", str(folder))
        self._config.set_main_option("path_separator", "os")
        options = {"autogenerate_plugins": PLUGINS} | options
        self._config.attributes |= {"engine": engine, "metadata": metadata, "options": options}
        self.engine = engine

    def options(self, *, drop: tuple[str, ...] = (), **changed: Any) -> None:
        """Go on with other options of `context.configure`."""
        kept = {name: value for name, value in self._config.attributes["options"].items() if name not in drop}
        self._config.attributes["options"] = kept | changed

    def models(self, metadata: MetaData) -> None:
        """Go on with other models."""
        self._config.attributes["metadata"] = metadata

    def generate(self) -> str:
        """Make a revision of what has changed and return its text."""
        script: Any = command.revision(self._config, autogenerate=True)
        return Path(script.path).read_text(encoding="utf-8")

    def write(self, upgrade: str, downgrade: str = "pass") -> str:
        """Write a revision manually and return its text."""
        script: Any = command.revision(self._config)
        path = Path(script.path)
        head = path.read_text(encoding="utf-8").partition("def upgrade")[0]
        body = f"def upgrade():\n    {upgrade}\n\n\ndef downgrade():\n    {downgrade}\n"
        path.write_text(head + body, encoding="utf-8")
        return path.read_text(encoding="utf-8")

    def upgrade(self, to: str = "head") -> None:
        command.upgrade(self._config, to)

    def downgrade(self, to: str = "base") -> None:
        command.downgrade(self._config, to)

    def check(self) -> None:
        """Raise if another revision would have something in it."""
        command.check(self._config)

    def sql(self, what: str = "head") -> str:
        """Return what `alembic upgrade --sql` prints."""
        start = self.out.tell()
        down = ":base" in what
        (command.downgrade if down else command.upgrade)(self._config, what, sql=True)
        return self.out.getvalue()[start:]


async def on_connection(world: World, engine: Any, work: Callable[[Connection], Any]) -> Any:
    """Hand a Connection, or the sync side of an AsyncConnection, to some work; what is not committed there is rolled back."""
    if world.is_async:
        async with engine.connect() as connection:
            return await connection.run_sync(work)

    def body() -> Any:
        with engine.connect() as connection:
            return work(connection)

    return await world.call(body)
