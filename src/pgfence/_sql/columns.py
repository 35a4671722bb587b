"""Define the columns of pgfence's tables, version by version, in SQLAlchemy."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.schema import CreateColumn

from pgfence._sql.storage import KEYS, LEASES, LIMITS, NAMES, VERSION, TableNames

if TYPE_CHECKING:
    from sqlalchemy.engine.interfaces import Dialect
    from sqlalchemy.schema import SchemaItem

OWN = "pgfence"
"""The key in the `info` of each of pgfence's tables under which their prefix is stored, so that autogenerate recognizes them."""


def define(metadata: MetaData, place: TableNames, version: int = VERSION) -> tuple[Table, ...]:
    """Add the tables of a version to a MetaData and return them. Tables that the MetaData already has are kept."""
    schema = metadata.schema if place.schema is None else place.schema

    def add_table(name: str, *parts: SchemaItem) -> Table:
        called = place.prefix + name
        known = metadata.tables.get(called if schema is None else f"{schema}.{called}")
        if known is not None:
            return known
        return Table(called, metadata, *parts, schema=schema, info={OWN: place.prefix})

    first = (
        add_table("lease", *_define_lease(place), *_define_lease_since_3(version)),
        add_table("gate", *_define_gate(place)),
        add_table("checkpoint", *_define_checkpoint()),
        add_table("slot", *_define_slot(), *_define_slot_since_3(version)),
        add_table("audit", *_define_audit()),
        add_table("schema_version", *_define_schema_version()),
    )
    if version < KEYS:
        return first
    keys = add_table("idempotency_key", *_define_idempotency_key(place), *_define_idempotency_key_since_3(version))
    if version < LIMITS:
        return *first, keys
    limits = (
        add_table("semaphore", *_define_semaphore()),
        add_table("permit_waiter", *_define_permit_waiter()),
        add_table("rate_limit", *_define_rate_limit()),
        add_table("rate_take", *_define_rate_take()),
        add_table("resign_request", *_define_resign_request()),
        add_table("partition_set", *_define_partition_set()),
        add_table("partition_member", *_define_partition_member()),
    )
    if version < NAMES:
        return *first, keys, *limits
    return *first, keys, *limits, add_table("lock_name", *_define_lock_name())


def _define_time(name: str, **options: Any) -> Column[Any]:
    return Column(name, DateTime(timezone=True), **options)


def _define_json(name: str) -> Column[Any]:
    # The import is here, because it loads the dialects of all drivers.
    from sqlalchemy.dialects.postgresql import JSONB

    return Column(name, JSON().with_variant(JSONB(), "postgresql"))


def _define_token(constraint: str) -> tuple[SchemaItem, ...]:
    return Column("token", BigInteger, nullable=False), CheckConstraint("token > 0", name=f"{constraint}_token_check")


def _define_lease(place: TableNames) -> tuple[SchemaItem, ...]:
    return (
        Column("name", Text, primary_key=True),
        *_define_token(place.prefix + "lease"),
        Column("lease_id", Uuid),
        Column("owner", Text),
        Column("host", Text),
        Column("pid", Integer),
        Column("backend_pid", Integer),
        Column("purpose", Text),
        _define_json("metadata"),
        Column("ttl", Double),
        Column("lock_delay", Double, nullable=False, server_default=text("0")),
        _define_time("acquired_at", nullable=False),
        _define_time("renewed_at", nullable=False),
        _define_time("expires_at", nullable=False),
        _define_time("free_at", nullable=False),
        _define_time("released_at"),
        _define_time("min_until"),
        _define_time("hold_until"),
        Column("evicted", BigInteger, nullable=False, server_default=text("0")),
    )


def _define_lease_since_3(version: int) -> tuple[SchemaItem, ...]:
    if version < LEASES:
        return ()
    return (
        Column("kind", Text),
        Column("lock_key", BigInteger),
        Column("timeline", Integer, nullable=False, server_default=text("1")),
    )


def _define_gate(place: TableNames) -> tuple[SchemaItem, ...]:
    return (
        Column("resource", Text, primary_key=True),
        *_define_token(place.prefix + "gate"),
        _define_time("updated_at", nullable=False),
    )


def _define_checkpoint() -> tuple[SchemaItem, ...]:
    return (
        Column("name", Text, primary_key=True),
        Column("token", BigInteger, nullable=False),
        _define_json("data"),
        _define_time("updated_at", nullable=False),
    )


def _define_slot() -> tuple[SchemaItem, ...]:
    return (
        Column("name", Text, primary_key=True),
        _define_time("done"),
        _define_time("tried"),
        Column("attempt", Integer, nullable=False, server_default=text("0")),
        Column("token", BigInteger),
        _define_time("started_at"),
        _define_time("finished_at"),
    )


def _define_slot_since_3(version: int) -> tuple[SchemaItem, ...]:
    return () if version < LEASES else (Column("done_offset", Integer), Column("tried_offset", Integer))


def _define_audit() -> tuple[SchemaItem, ...]:
    return (
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("action", Text, nullable=False),
        Column("resource", Text, nullable=False),
        Column("actor", Text),
        Column("reason", Text),
        _define_time("at", nullable=False),
        _define_json("detail"),
    )


def _define_schema_version() -> tuple[SchemaItem, ...]:
    return (
        Column("version", Integer, primary_key=True, autoincrement=False),
        _define_time("installed_at", nullable=False, server_default=text("CURRENT_TIMESTAMP")),
    )


def _define_idempotency_key(place: TableNames) -> tuple[SchemaItem, ...]:
    return (
        Column("scope", Text, primary_key=True),
        Column("key", Text, primary_key=True),
        Column("fingerprint", LargeBinary),
        Column("status", Text, nullable=False),
        Column("attempt", Integer, nullable=False, server_default=text("1")),
        _define_json("step"),
        _define_time("locked_until"),
        Column("claim_id", Uuid),
        Column("owner", Text),
        Column("host", Text),
        Column("pid", Integer),
        _define_json("result"),
        Column("http_status", Integer),
        _define_json("http_headers"),
        Column("http_body", LargeBinary),
        _define_time("created_at", nullable=False),
        _define_time("expires_at", nullable=False),
        Index(place.prefix + "idempotency_key_expiry", "expires_at"),
    )


def _define_idempotency_key_since_3(version: int) -> tuple[SchemaItem, ...]:
    return () if version < LEASES else (_define_time("locked_at"),)


def _define_semaphore() -> tuple[SchemaItem, ...]:
    return (
        Column("name", Text, primary_key=True),
        Column("permits", Integer, nullable=False),
        Column("highest", Integer, nullable=False),
    )


def _define_permit_waiter() -> tuple[SchemaItem, ...]:
    return (
        Column("name", Text, primary_key=True),
        Column("waiter", Uuid, primary_key=True),
        Column("weight", Integer, nullable=False),
        _define_time("arrived_at", nullable=False),
        _define_time("seen_at", nullable=False),
    )


def _define_rate_limit() -> tuple[SchemaItem, ...]:
    return (
        Column("name", Text, primary_key=True),
        Column("max_takes", Integer, nullable=False),
        Column("per", Double, nullable=False),
        Column("taken", BigInteger, nullable=False),
        _define_time("newest", nullable=False),
    )


def _define_rate_take() -> tuple[SchemaItem, ...]:
    return (
        Column("name", Text, primary_key=True),
        Column("slot", Integer, primary_key=True, autoincrement=False),
        _define_time("taken_at", nullable=False),
    )


def _define_resign_request() -> tuple[SchemaItem, ...]:
    # This is a separate table, because a new column of the lease would make the upgrade wait for every transaction inside a gate.
    return (
        Column("name", Text, primary_key=True),
        Column("token", BigInteger, nullable=False),
        _define_time("asked_at", nullable=False),
    )


def _define_partition_set() -> tuple[SchemaItem, ...]:
    return (
        Column("name", Text, primary_key=True),
        Column("partitions", Integer, nullable=False),
        Column("hash", Text, nullable=False),
    )


def _define_partition_member() -> tuple[SchemaItem, ...]:
    return (
        Column("name", Text, primary_key=True),
        Column("member", Uuid, primary_key=True),
        # The column stores the order in which members joined. It is not a time, because the clock may be set back.
        Column("number", BigInteger, Identity(always=True), nullable=False),
        Column("ttl", Double, nullable=False),
        _define_time("seen_at", nullable=False),
    )


def _define_lock_name() -> tuple[SchemaItem, ...]:
    return (
        Column("key", BigInteger, primary_key=True, autoincrement=False),
        Column("name", Text, nullable=False),
        _define_time("seen_at", nullable=False),
    )


def get_dialect() -> Dialect:
    from sqlalchemy.dialects import postgresql

    # The style is "named", because the default style would double a percent sign in a name.
    dialect: Dialect = postgresql.dialect(paramstyle="named")  # type: ignore[no-untyped-call]
    return dialect


@cache
def list_column_types(version: int = VERSION) -> dict[str, dict[str, str]]:
    """Return the columns of each table (its name without the prefix), with their types as the server writes them."""
    types = get_dialect()
    return {
        add_table.name: {column.name: column.type.compile(types).lower() for column in add_table.columns}
        for add_table in define(MetaData(), TableNames(prefix=""), version)
    }


@cache
def list_added_columns(version: int) -> dict[str, tuple[str, ...]]:
    """Return the columns that each table of an older version lacks, in ADD COLUMN syntax.

    The names of the tables have no prefix.
    """
    found: dict[str, tuple[str, ...]] = {}
    for add_table in define(MetaData(), TableNames(prefix=""), version):
        first = next(
            columns for older in range(1, version + 1) if (columns := list_column_types(older).get(add_table.name))
        )
        texts = [
            str(CreateColumn(column).compile(dialect=get_dialect()))
            for column in add_table.columns
            if column.name not in first
        ]
        if texts:
            found[add_table.name] = tuple(texts)
    return found
