"""Render the operations as the Python code of a migration script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from alembic.autogenerate.render import renderers
from alembic.operations.ops import CreateIndexOp, DropIndexOp

from pgfence._alembic.operations import (
    PREFIX,
    VERSION_COLUMN,
    AddFence,
    AddVersionTrigger,
    CreateIndexSafely,
    CreatePgfence,
    DropFence,
    DropIndexSafely,
    DropPgfence,
    DropVersionTrigger,
    TableOperation,
    UpgradePgfence,
)

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext

    from pgfence._sql.storage import TableNames


@renderers.dispatch_for(CreatePgfence)
def _render_create(context: AutogenContext, operation: CreatePgfence) -> str:
    return _render_call(context, "create_pgfence", *_render_place(operation.place), f"version={operation.version!r}")


@renderers.dispatch_for(DropPgfence)
def _render_drop(context: AutogenContext, operation: DropPgfence) -> str:
    return _render_call(context, "drop_pgfence", *_render_place(operation.place))


@renderers.dispatch_for(UpgradePgfence)
def _render_upgrade(context: AutogenContext, operation: UpgradePgfence) -> str:
    return _render_call(
        context, "upgrade_pgfence", repr(operation.from_), repr(operation.to), *_render_place(operation.place)
    )


@renderers.dispatch_for(AddFence)
def _add_fence(context: AutogenContext, operation: AddFence) -> str:
    return _on_table(
        context, "add_fence", operation, _render_options(resource=operation.resource, namespace=operation.namespace)
    )


@renderers.dispatch_for(DropFence)
def _drop_fence(context: AutogenContext, operation: DropFence) -> str:
    return _on_table(context, "drop_fence", operation, [])


@renderers.dispatch_for(AddVersionTrigger)
def _add_version_trigger(context: AutogenContext, operation: AddVersionTrigger) -> str:
    return _on_table(context, "add_version_trigger", operation, _render_column(operation.column))


@renderers.dispatch_for(DropVersionTrigger)
def _drop_version_trigger(context: AutogenContext, operation: DropVersionTrigger) -> str:
    return _on_table(context, "drop_version_trigger", operation, _render_column(operation.column))


@renderers.dispatch_for(CreateIndexSafely)
def _create_index(context: AutogenContext, operation: CreateIndexSafely) -> str:
    whole = renderers.dispatch(CreateIndexOp)(context, operation)
    return _render_safely(whole, "create_index", ", postgresql_concurrently=True")


@renderers.dispatch_for(DropIndexSafely)
def _drop_index(context: AutogenContext, operation: DropIndexSafely) -> str:
    whole = renderers.dispatch(DropIndexOp)(context, operation)
    return _render_safely(whole, "drop_index", ", postgresql_concurrently=True", ", if_exists=True")


def _render_safely(whole: str, name: str, *implied: str) -> str:
    for argument in implied:
        whole = whole.replace(argument, "")
    return whole.replace(f"{name}(", f"{name}_safely(", 1)


def _on_table(context: AutogenContext, name: str, operation: TableOperation, arguments: list[str]) -> str:
    target, place = operation.target, operation.place
    return _render_call(
        context,
        name,
        repr(target.name),
        *arguments,
        *_render_options(schema=target.schema, pgfence_schema=place.schema),
        *([] if place.prefix == PREFIX else _render_options(prefix=place.prefix)),
    )


def _render_column(column: str) -> list[str]:
    return [] if column == VERSION_COLUMN else _render_options(column=column)


def _render_place(place: TableNames) -> list[str]:
    return [
        *_render_options(schema=place.schema),
        *([] if place.prefix == PREFIX else _render_options(prefix=place.prefix)),
    ]


def _render_options(**arguments: object) -> list[str]:
    """Return the arguments that differ from their defaults."""
    return [f"{name}={value!r}" for name, value in arguments.items() if value or name in {"resource", "prefix"}]


def _render_call(context: AutogenContext, name: str, *arguments: str) -> str:
    return f"{context.opts['alembic_module_prefix']}{name}({', '.join(arguments)})"
