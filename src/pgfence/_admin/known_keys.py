"""Recognize keys that are not computed from a name of the application: those of migration tools, and of pgfence itself."""

from __future__ import annotations

import zlib
from functools import lru_cache

from pgfence.keys import LockKey

_RAILS_SALT = 2053462845
_GOLANG_MIGRATE_SALT = 1486364155
_FLYWAY = int.from_bytes(b"Flyway", "big")
_PRISMA = 72707369
MIGRATION = "migration"


@lru_cache(maxsize=16)
def list_known_keys(database: str) -> tuple[tuple[LockKey, str, str | None], ...]:
    """Return known keys, each with a name and a kind; without a kind, it is that of the session or transaction.

    Args:
        database: the name of the database, from which some programs compute their key.
    """
    return (
        (LockKey.of("alembic_version", namespace="pgfence migrations"), "Alembic migration", MIGRATION),
        (LockKey.of("schema", namespace="pgfence"), "pgfence install", MIGRATION),
        (LockKey.of("version trigger", namespace="pgfence"), "pgfence version trigger", MIGRATION),
        # ActiveRecord::Migrator.generate_migrator_advisory_lock_id
        (LockKey.raw(_RAILS_SALT * zlib.crc32(database.encode())), "Rails migration", MIGRATION),
        # database.GenerateAdvisoryLockId, with the default schema and table, and as older releases had it
        (_compute_golang_migrate_key("public", "schema_migrations", database), "golang-migrate migration", MIGRATION),
        (_compute_golang_migrate_key(database), "golang-migrate migration", MIGRATION),
        # PostgreSQLAdvisoryLockTemplate, with the default schema and table
        (LockKey.raw(_FLYWAY + _hash_like_java('"public"."flyway_schema_history"')), "Flyway migration", MIGRATION),
        (LockKey.raw(_PRISMA), "Prisma migration", MIGRATION),
    )


def recognize_key(key: LockKey, database: str) -> str | None:
    """Return what a key of another program is for; None if it is not known."""
    for known, name, _ in list_known_keys(database):
        if known == key:
            return name
    # The number of a Flyway lock is a constant and the 32-bit hash of the history table's name.
    if key.space == "bigint" and abs(key.value - _FLYWAY) <= 1 << 31:
        return "Flyway migration"
    return None


def _compute_golang_migrate_key(*parts: str) -> LockKey:
    return LockKey.raw(zlib.crc32("\0".join(parts).encode()) * _GOLANG_MIGRATE_SALT & 0xFFFFFFFF)


def _hash_like_java(text: str) -> int:
    """Return the value of Java's String.hashCode."""
    value = 0
    for letter in text:
        value = value * 31 + ord(letter) & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
