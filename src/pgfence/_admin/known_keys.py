"""Recognize the keys of migration tools and of pgfence itself, and those that libraries compute from a name."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

from pgfence import compat
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from collections.abc import Iterator

_RAILS_SALT = 2053462845
_GOLANG_MIGRATE_SALT = 1486364155
_FLYWAY = int.from_bytes(b"Flyway", "big")
_PRISMA = 72707369
MIGRATION = "migration"


@lru_cache(maxsize=16)
def list_known_keys(database: str) -> tuple[tuple[LockKey, str, str | None], ...]:
    """Return the known keys, each with a name and a kind. Some programs compute their key from the name of the database."""
    return (
        (LockKey.of("alembic_version", namespace="pgfence migrations"), "Alembic migration", MIGRATION),
        (LockKey.of("schema", namespace="pgfence"), "pgfence install", MIGRATION),
        (LockKey.of("version trigger", namespace="pgfence"), "pgfence version trigger", MIGRATION),
        # ActiveRecord::Migrator.generate_migrator_advisory_lock_id
        (LockKey.raw(_RAILS_SALT * zlib.crc32(database.encode())), "Rails migration", MIGRATION),
        # database.GenerateAdvisoryLockId, with the default schema and table, and as in older releases
        (_compute_golang_migrate_key("public", "schema_migrations", database), "golang-migrate migration", MIGRATION),
        (_compute_golang_migrate_key(database), "golang-migrate migration", MIGRATION),
        # PostgreSQLAdvisoryLockTemplate, with the default schema and table
        (LockKey.raw(_FLYWAY + _hash_like_java('"public"."flyway_schema_history"')), "Flyway migration", MIGRATION),
        (LockKey.raw(_PRISMA), "Prisma migration", MIGRATION),
    )


def recognize_key(key: LockKey, database: str) -> str | None:
    """Return the name of the lock that a known key belongs to, or None if the key is not known."""
    for known, name, _ in list_known_keys(database):
        if known == key:
            return name
    # The number of a Flyway lock is the sum of a constant and the 32-bit hash of the history table's name.
    if key.space == "bigint" and abs(key.value - _FLYWAY) <= 1 << 31:
        return "Flyway migration"
    return None


def list_keys_of_libraries(name: str) -> Iterator[tuple[LockKey, str]]:
    """Yield the keys that libraries compute from a name, each with a description of the lock.

    `NAMESPACE:NAME` is also tried as a name in a namespace, and `APP.NAME` as the name of a pals lock.
    """
    yield LockKey.of(name), f"pgfence lock {name!r}"
    namespace, colon, rest = name.partition(":")
    if colon and rest:
        yield LockKey.of(rest, namespace=namespace), f"pgfence lock {rest!r} in the namespace {namespace!r}"
    app, dot, lock = name.partition(".")
    if dot:
        yield compat.pals_key(app, lock), f"pals lock {lock!r} of the application {app!r}"
    yield compat.dlock_key(name), f"sqlalchemy-dlock lock {name!r}"
    yield compat.pglock_key(name), f"django-pglock lock {name!r}"
    yield compat.with_advisory_lock_key(name), f"with_advisory_lock (Rails) lock {name!r}"
    yield compat.sha256_hex15_key(name), f"first 15 hexadecimal digits of SHA-256 of {name!r}"
    # for Alembic version tables with another name or in another schema
    yield LockKey.of(name, namespace="pgfence migrations"), f"Alembic migration (pgfence), version table {name!r}"
    # Rails and golang-migrate compute the key from the name of the database.
    yield LockKey.raw(_RAILS_SALT * zlib.crc32(name.encode())), f"Rails migration of the database {name!r}"
    yield (
        _compute_golang_migrate_key("public", "schema_migrations", name),
        f"golang-migrate migration of the database {name!r}",
    )
    yield LockKey.raw(_FLYWAY + _hash_like_java(name)), f"Flyway migration, history table {name}"


def _compute_golang_migrate_key(*parts: str) -> LockKey:
    return LockKey.raw(zlib.crc32("\0".join(parts).encode()) * _GOLANG_MIGRATE_SALT & 0xFFFFFFFF)


def _hash_like_java(text: str) -> int:
    """Return the value of Java's String.hashCode."""
    value = 0
    for letter in text:
        value = value * 31 + ord(letter) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
