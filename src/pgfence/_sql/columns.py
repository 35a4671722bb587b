"""The columns of our tables, version by version, as SQLAlchemy knows them."""

from __future__ import annotations

from functools import cache
from typing import Any

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

from pgfence._sql.storage import KEYS, LEASES, VERSION, TableNames

OWN = "pgfence"
"""In the `info` of our tables: the prefix of their names, for migrations that compare a MetaData with the database."""


def define(metadata: MetaData, place: TableNames, version: int = VERSION) -> tuple[Table, ...]:
    """Add our tables of a version to a MetaData and return them; those that it has already are taken as they are."""
    schema = metadata.schema if place.schema is None else place.schema

    def table(name: str, *parts: Any) -> Table:
        called = place.prefix + name
        known = metadata.tables.get(called if schema is None else f"{schema}.{called}")
        if known is not None:
            return known
        return Table(called, metadata, *parts, schema=schema, info={OWN: place.prefix})

    first = (
        table("lease", *_lease(place), *_lease_since_3(version)),
        table("gate", *_gate(place)),
        table("checkpoint", *_checkpoint()),
        table("slot", *_slot(), *_slot_since_3(version)),
        table("audit", *_audit()),
        table("schema_version", *_schema_version()),
    )
    if version < KEYS:
        return first
    return *first, table("idempotency_key", *_idempotency_key(place), *_idempotency_key_since_3(version))


def _at(name: str, **options: Any) -> Column[Any]:
    return Column(name, DateTime(timezone=True), **options)


def _json(name: str) -> Column[Any]:
    # Here, since it brings the dialect of every driver along.
    from sqlalchemy.dialects.postgresql import JSONB

    return Column(name, JSON().with_variant(JSONB(), "postgresql"))


def _token(constraint: str) -> tuple[Any, ...]:
    return Column("token", BigInteger, nullable=False), CheckConstraint("token > 0", name=f"{constraint}_token_check")


def _lease(place: TableNames) -> tuple[Any, ...]:
    return (
        Column("name", Text, primary_key=True),
        *_token(place.prefix + "lease"),
        Column("lease_id", Uuid),
        Column("owner", Text),
        Column("host", Text),
        Column("pid", Integer),
        Column("backend_pid", Integer),
        Column("purpose", Text),
        _json("metadata"),
        Column("ttl", Double),
        Column("lock_delay", Double, nullable=False, server_default=text("0")),
        _at("acquired_at", nullable=False),
        _at("renewed_at", nullable=False),
        _at("expires_at", nullable=False),
        _at("free_at", nullable=False),
        _at("released_at"),
        _at("min_until"),
        _at("hold_until"),
        Column("evicted", BigInteger, nullable=False, server_default=text("0")),
    )


def _lease_since_3(version: int) -> tuple[Any, ...]:
    if version < LEASES:
        return ()
    return (
        Column("kind", Text),
        Column("lock_key", BigInteger),
        Column("timeline", Integer, nullable=False, server_default=text("1")),
    )


def _gate(place: TableNames) -> tuple[Any, ...]:
    return Column("resource", Text, primary_key=True), *_token(place.prefix + "gate"), _at("updated_at", nullable=False)


def _checkpoint() -> tuple[Any, ...]:
    return (
        Column("name", Text, primary_key=True),
        Column("token", BigInteger, nullable=False),
        _json("data"),
        _at("updated_at", nullable=False),
    )


def _slot() -> tuple[Any, ...]:
    return (
        Column("name", Text, primary_key=True),
        _at("done"),
        _at("tried"),
        Column("attempt", Integer, nullable=False, server_default=text("0")),
        Column("token", BigInteger),
        _at("started_at"),
        _at("finished_at"),
    )


def _slot_since_3(version: int) -> tuple[Any, ...]:
    return () if version < LEASES else (Column("done_offset", Integer), Column("tried_offset", Integer))


def _audit() -> tuple[Any, ...]:
    return (
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("action", Text, nullable=False),
        Column("resource", Text, nullable=False),
        Column("actor", Text),
        Column("reason", Text),
        _at("at", nullable=False),
        _json("detail"),
    )


def _schema_version() -> tuple[Any, ...]:
    return (
        Column("version", Integer, primary_key=True, autoincrement=False),
        _at("installed_at", nullable=False, server_default=text("CURRENT_TIMESTAMP")),
    )


def _idempotency_key(place: TableNames) -> tuple[Any, ...]:
    return (
        Column("scope", Text, primary_key=True),
        Column("key", Text, primary_key=True),
        Column("fingerprint", LargeBinary),
        Column("status", Text, nullable=False),
        Column("attempt", Integer, nullable=False, server_default=text("1")),
        _json("step"),
        _at("locked_until"),
        Column("claim_id", Uuid),
        Column("owner", Text),
        Column("host", Text),
        Column("pid", Integer),
        _json("result"),
        Column("http_status", Integer),
        _json("http_headers"),
        Column("http_body", LargeBinary),
        _at("created_at", nullable=False),
        _at("expires_at", nullable=False),
        Index(place.prefix + "idempotency_key_expiry", "expires_at"),
    )


def _idempotency_key_since_3(version: int) -> tuple[Any, ...]:
    return () if version < LEASES else (_at("locked_at"),)


def dialect() -> Any:
    from sqlalchemy.dialects import postgresql

    # Of another style than the default, in which a per cent sign in a name would be written twice.
    return postgresql.dialect(paramstyle="named")  # type: ignore[no-untyped-call]


@cache
def column_types(version: int = VERSION) -> dict[str, dict[str, str]]:
    """Return what we made: each column with its type as the server writes it, by table without the prefix."""
    types = dialect()
    return {
        table.name: {column.name: column.type.compile(types).lower() for column in table.columns}
        for table in define(MetaData(), TableNames(prefix=""), version)
    }


@cache
def added_columns(version: int) -> dict[str, tuple[str, ...]]:
    """Return the columns that tables of an older version lack, by table without the prefix, as ALTER TABLE adds them."""
    found: dict[str, tuple[str, ...]] = {}
    for table in define(MetaData(), TableNames(prefix=""), version):
        first = next(columns for older in range(1, version + 1) if (columns := column_types(older).get(table.name)))
        texts = [
            str(CreateColumn(column).compile(dialect=dialect())) for column in table.columns if column.name not in first
        ]
        if texts:
            found[table.name] = tuple(texts)
    return found
