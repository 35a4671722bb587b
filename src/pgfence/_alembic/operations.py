"""The operations of a migration. `implementations` executes them, and `renderers` writes them into a migration script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from alembic.operations import MigrateOperation
from alembic.operations.ops import CreateIndexOp, DropIndexOp

from pgfence._ddl.fences import Target, parts_of
from pgfence._sql.storage import VERSION, TableNames
from pgfence.config import expect_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import ColumnElement, TextClause

PREFIX = TableNames().prefix
VERSION_COLUMN = "version"


class PlaceOperation(MigrateOperation):
    """An operation on one installation of pgfence."""

    def __init__(self, schema: str | None = None, prefix: str = PREFIX) -> None:
        expect_place(schema, prefix)
        self.place = TableNames(schema, prefix)


class CreatePgfence(PlaceOperation):
    """Create pgfence's tables and functions."""

    def __init__(self, schema: str | None = None, prefix: str = PREFIX, version: int = VERSION) -> None:
        super().__init__(schema, prefix)
        self.version = check_version(version)

    def reverse(self) -> DropPgfence:
        """Return the reverse operation."""
        return DropPgfence(self.place.schema, self.place.prefix, self.version)

    def to_diff_tuple(self) -> tuple[object, ...]:
        """Return the operation as `alembic check` shows it."""
        return "create_pgfence", self.place.schema, self.place.prefix, self.version


class DropPgfence(PlaceOperation):
    """Drop pgfence's tables and functions."""

    def __init__(self, schema: str | None = None, prefix: str = PREFIX, version: int = VERSION) -> None:
        super().__init__(schema, prefix)
        self.version = check_version(version)

    def reverse(self) -> CreatePgfence:
        """Return the reverse operation, which does not restore rows."""
        return CreatePgfence(self.place.schema, self.place.prefix, self.version)

    def to_diff_tuple(self) -> tuple[object, ...]:
        """Return the operation as `alembic check` shows it."""
        return "drop_pgfence", self.place.schema, self.place.prefix


class UpgradePgfence(PlaceOperation):
    """Upgrade or downgrade pgfence's tables and functions from one version to another."""

    def __init__(self, from_: int, to: int, schema: str | None = None, prefix: str = PREFIX) -> None:
        super().__init__(schema, prefix)
        self.from_ = check_version(from_)
        self.to = check_version(to)

    def reverse(self) -> UpgradePgfence:
        """Return the reverse operation."""
        return UpgradePgfence(self.to, self.from_, self.place.schema, self.place.prefix)

    def to_diff_tuple(self) -> tuple[object, ...]:
        """Return the operation as `alembic check` shows it."""
        return "upgrade_pgfence", self.from_, self.to, self.place.schema, self.place.prefix


def check_version(version: int) -> int:
    """Return `version` if this release can create that version of the tables.

    Raises:
        ValueError: this release cannot create tables of that version.
    """
    if type(version) is not int or version not in range(1, VERSION + 1):
        raise ValueError(
            f"version must be an int from 1 to {VERSION}, the newest version of the tables in this release of pgfence, not {version!r}"
        )
    return version


def _check_name(value: object, what: str, hint: str = "") -> str:
    """Return `value` if it can be used as a name in a statement.

    Raises:
        TypeError: the name is not a str.
        ValueError: the name is empty, or contains NUL.
    """
    if not isinstance(value, str):
        raise TypeError(f"the name of {what} must be a str, not {value!r}{hint}")
    if not value or "\0" in value:
        raise ValueError(f"the name of {what} must not be empty or contain NUL: {value!r}")
    return value


def _check_table(value: object) -> str:
    return _check_name(value, "a table", "; pass its schema as schema=")


class TableOptions(TypedDict, total=False):
    """The keyword arguments that identify the schema of a table and the installation of pgfence."""

    schema: str | None
    pgfence_schema: str | None
    prefix: str


class TableOperation(PlaceOperation):
    """An operation on one table of the application."""

    def __init__(
        self, table: str, *, schema: str | None = None, pgfence_schema: str | None = None, prefix: str = PREFIX
    ) -> None:
        super().__init__(pgfence_schema, prefix)
        expect_place(schema, prefix)
        self.target = Target(_check_table(table), schema)

    @property
    def options(self) -> TableOptions:
        """The arguments that identify the table and the installation."""
        return {"schema": self.target.schema, "pgfence_schema": self.place.schema, "prefix": self.place.prefix}


class AddFence(TableOperation):
    """Make a table reject every write outside the gate of its resource."""

    def __init__(self, table: str, *, resource: str, namespace: str = "", **options: Unpack[TableOptions]) -> None:
        super().__init__(table, **options)
        self.parts = parts_of(resource, namespace)
        self.resource = resource
        self.namespace = namespace

    @property
    def definition(self) -> object:
        """The properties in which two fences of one table may differ."""
        return self.parts, self.place

    def reverse(self) -> DropFence:
        """Return the reverse operation."""
        return DropFence(self.target.name, resource=self.resource, namespace=self.namespace, **self.options)

    def to_diff_tuple(self) -> tuple[object, ...]:
        """Return the operation as `alembic check` shows it."""
        return "add_fence", self.target.schema, self.target.name, self.resource


class DropFence(TableOperation):
    """Remove the fence from a table."""

    def __init__(
        self, table: str, *, resource: str | None = None, namespace: str = "", **options: Unpack[TableOptions]
    ) -> None:
        super().__init__(table, **options)
        if resource is not None:
            parts_of(resource, namespace)
        self.resource = resource
        self.namespace = namespace

    def reverse(self) -> AddFence:
        """Return the reverse operation.

        Raises:
            ValueError: the resource of the fence is not known.
        """
        if self.resource is None:
            raise ValueError(
                f"drop_fence({self.target.name!r}) can be reversed only if the resource of the fence is passed as resource="
            )
        return AddFence(self.target.name, resource=self.resource, namespace=self.namespace, **self.options)

    def to_diff_tuple(self) -> tuple[object, ...]:
        """Return the operation as `alembic check` shows it."""
        return "drop_fence", self.target.schema, self.target.name, self.resource


class AddVersionTrigger(TableOperation):
    """Add the trigger that increments the version of each row of a table."""

    def __init__(self, table: str, *, column: str = VERSION_COLUMN, **options: Unpack[TableOptions]) -> None:
        super().__init__(table, **options)
        self.column = _check_name(column, "a column")

    @property
    def definition(self) -> object:
        """The property in which two triggers of one table may differ."""
        return self.column

    def reverse(self) -> DropVersionTrigger:
        """Return the reverse operation."""
        return DropVersionTrigger(self.target.name, column=self.column, **self.options)

    def to_diff_tuple(self) -> tuple[object, ...]:
        """Return the operation as `alembic check` shows it."""
        return "add_version_trigger", self.target.schema, self.target.name, self.column


class DropVersionTrigger(TableOperation):
    """Remove the version trigger from a table."""

    def __init__(self, table: str, *, column: str = VERSION_COLUMN, **options: Unpack[TableOptions]) -> None:
        super().__init__(table, **options)
        self.column = _check_name(column, "a column")

    def reverse(self) -> AddVersionTrigger:
        """Return the reverse operation."""
        return AddVersionTrigger(self.target.name, column=self.column, **self.options)

    def to_diff_tuple(self) -> tuple[object, ...]:
        """Return the operation as `alembic check` shows it."""
        return "drop_version_trigger", self.target.schema, self.target.name


class CreateIndexSafely(CreateIndexOp):
    """Build an index concurrently, after dropping what an interrupted build left behind."""

    def __init__(
        self,
        index_name: str,
        table_name: str,
        columns: Sequence[str | TextClause | ColumnElement[Any]],
        **options: Any,
    ) -> None:
        expect_place(options.get("schema"), PREFIX)
        if not columns:
            raise ValueError("an index needs at least one column")
        options["postgresql_concurrently"] = True
        super().__init__(index_name, _check_table(table_name), columns, **options)

    def reverse(self) -> DropIndexSafely:
        """Return the reverse operation."""
        assert self.index_name is not None
        return DropIndexSafely(self.index_name, self.table_name, schema=self.schema, _reverse=self)


class DropIndexSafely(DropIndexOp):
    """Drop an index concurrently. A missing index is not an error."""

    def __init__(self, index_name: str, table_name: str | None = None, **options: Any) -> None:
        expect_place(options.get("schema"), PREFIX)
        options |= {"postgresql_concurrently": True, "if_exists": True}
        super().__init__(_check_name(index_name, "an index"), table_name, **options)

    def reverse(self) -> CreateIndexOp:
        """Return the reverse operation.

        Raises:
            ValueError: the definition of the index is not known.
        """
        if self._reverse is None:
            raise ValueError(
                f"drop_index_safely({self.index_name!r}) cannot be reversed, because the columns of the index are not known:"
                " write the downgrade with create_index_safely"
            )
        return self._reverse
