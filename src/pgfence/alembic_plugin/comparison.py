"""Autogenerate: what the models ask for against what the database has, as operations in an order that can be reversed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from alembic.operations.ops import CreateTableOp, DropTableOp, ModifyTableOps
from alembic.util import PriorityDispatchResult
from sqlalchemy import MetaData

from pgfence._sql import migrating, tables
from pgfence._sql.storage import Place, place_of
from pgfence.alembic_plugin.models import fence_of, place_of_own, resource_from
from pgfence.alembic_plugin.operations import AddFence, CreatePgfence, DropFence
from pgfence.config import config_of
from pgfence.keys import SEPARATOR

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps
    from sqlalchemy import Connection, Table


class _Key(NamedTuple):
    """A table, with None for the default schema."""

    schema: str | None
    table: str


class _Fence(NamedTuple):
    """What a table is fenced by."""

    resource: str
    namespace: str


def compare(context: AutogenContext, ops: UpgradeOps, schemas: set[str | None]) -> PriorityDispatchResult:
    """Add what is missing and drop what nobody asks for; our own tables are neither made nor dropped one by one.

    Fences go at the front and come at the end: they are taken off before their table is dropped, so that the reversed
    migration puts them back after it has made the table again.
    """
    connection = context.connection
    assert connection is not None
    own = {_place(context, place) for table in context.sorted_tables if (place := place_of_own(table)) is not None}
    home = _home(_place(context, place_of(connection)), own)
    _take_over(context, ops, own | {home} | {_place(context, place) for place in migrating.installations(connection)})

    wanted = _wanted(context, config_of(connection).namespace)
    standing = _standing(context, connection, home, ops, schemas)
    missing = {place for place in own | ({home} if wanted else set()) if not tables.installed(connection, place)}
    for place in sorted(missing - _made(ops), key=str):
        ops.ops.append(CreatePgfence(place.schema, place.prefix))
    for key, fence in sorted(standing.items(), key=str):
        if wanted.get(key) != fence:
            ops.ops.insert(0, _operation(DropFence, key, fence, home))
    for key, fence in sorted(wanted.items(), key=str):
        if standing.get(key) != fence:
            ops.ops.append(_operation(AddFence, key, fence, home))
    return PriorityDispatchResult.CONTINUE


def _operation(kind: type[AddFence | DropFence], key: _Key, fence: _Fence, place: Place) -> AddFence | DropFence:
    return kind(
        key.table,
        resource=fence.resource,
        namespace=fence.namespace,
        schema=key.schema,
        pgfence_schema=place.schema,
        prefix=place.prefix,
    )


def _home(configured: Place, own: set[Place]) -> Place:
    """Return the installation that fences belong to: the configured one, or the only one among the models."""
    return next(iter(own)) if configured == Place() and len(own) == 1 else configured


def _place(context: AutogenContext, place: Place) -> Place:
    return Place(None if place.schema == context.dialect.default_schema_name else place.schema, place.prefix)


def _wanted(context: AutogenContext, namespace: str) -> dict[_Key, _Fence]:
    found = {}
    for table in context.sorted_tables:
        resource = fence_of(table)
        if resource is not None and context.run_object_filters(table, table.name, "table", False, None):
            found[_key(context, table.schema, table.name)] = _Fence(resource, namespace)
    return found


def _standing(
    context: AutogenContext, connection: Connection, home: Place, ops: UpgradeOps, schemas: set[str | None]
) -> dict[_Key, _Fence]:
    """Return the fences of tables that the models have, or that this migration drops; others are nobody's business."""
    dropped = {_key(context, op.schema, op.table_name) for op in ops.ops if isinstance(op, DropTableOp)}
    modelled: dict[_Key, Table] = {_key(context, table.schema, table.name): table for table in context.sorted_tables}
    found = {}
    for fence in migrating.standing(connection, tables.settled(connection, home)):
        key = _key(context, fence.schema, fence.table)
        table = modelled.get(key)
        ours = key in dropped if table is None else context.run_object_filters(table, table.name, "table", False, None)
        if ours and key.schema in schemas:
            namespace, separator, rest = fence.parts[0].rpartition(SEPARATOR)
            parts = (rest, *fence.parts[1:]) if separator else fence.parts
            found[key] = _Fence(resource_from(parts), namespace)
    return found


def _take_over(context: AutogenContext, ops: UpgradeOps, places: set[Place]) -> None:
    """Replace the making of our tables by one operation for all of them, and leave those alone that no model has."""
    home = {
        _key(context, place.schema, table.name): place for place in places for table in tables.define(MetaData(), place)
    }
    modelled = {_key(context, table.schema, table.name) for table in context.sorted_tables}
    kept = []
    made = set()
    for op in ops.ops:
        if not isinstance(op, CreateTableOp | DropTableOp | ModifyTableOps):
            kept.append(op)
            continue
        key = _key(context, op.schema, op.table_name)
        place = home.get(key)
        if place is None or (key in modelled and isinstance(op, ModifyTableOps)):
            kept.append(op)
        elif isinstance(op, CreateTableOp) and place not in made:
            made.add(place)
            kept.append(CreatePgfence(place.schema, place.prefix))
    ops.ops[:] = kept


def _made(ops: UpgradeOps) -> set[Place]:
    return {op.place for op in ops.ops if isinstance(op, CreatePgfence)}


def _key(context: AutogenContext, schema: str | None, table: str) -> _Key:
    return _Key(None if schema == context.dialect.default_schema_name else schema, table)
