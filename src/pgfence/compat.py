"""Keys of other libraries, so that old and new code exclude each other while a roll-out lasts.

Each function gives the key that the other library would lock for the same name, as a `LockKey` to be used alone or beside
a name: `AdvisoryLock(engine, pals_key("myapp", "billing"), "billing")`. They are for the roll-out only. New code uses
names: these keys are shorter, without a namespace or bound to one kind of machine.

pals and sqlalchemy-dlock take the byte order of the host. The keys here are those of little-endian machines, which x86 and
ARM are; on a big-endian one, such as s390x, old code locks other keys.

A name is taken as the other library takes it, unchecked where that one does not check: NUL or an empty name may well be in
use there.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import TYPE_CHECKING, overload

from sqlalchemy import Connection, Text, cast, func, literal, select

from pgfence._sql.encoding import translate_text_errors
from pgfence.keys import LockKey

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = ["dlock_key", "hashtext_key", "pals_key", "pglock_key", "sha256_hex15_key", "with_advisory_lock_key"]


def pals_key(app_name: str, name: str) -> LockKey:
    """Return the key of `pals.Locker(app_name, ...).lock(name)`.

    Raises:
        TypeError: one of them is no str.
        ValueError: one of them holds a lone surrogate.
    """
    text = _encode_utf8(app_name, "app_name") + b"." + _encode_utf8(name)
    return _read_little_endian(hashlib.sha1(text, usedforsecurity=False).digest())


def dlock_key(name: str | bytes | int) -> LockKey:
    """Return the key of `sqlalchemy_dlock.create_sadlock(connection, name)`: an int is the key itself.

    Raises:
        TypeError: it is neither str, bytes nor int (a bool is none of them).
        ValueError: an int that does not fit into 64 bits, signed, or a str with a lone surrogate.
    """
    if isinstance(name, int):
        return LockKey.raw(name)
    text = name if isinstance(name, bytes) else _encode_utf8(name, "name", "a str, bytes or an int")
    return _read_little_endian(hashlib.blake2b(text, digest_size=8).digest())


def pglock_key(name: str) -> LockKey:
    """Return the key of `pglock.advisory(name)`; its integer ids are `LockKey.raw(id)`.

    A function decorated without a name has the name `module.function` there.

    Raises:
        TypeError: it is no str.
        ValueError: it is empty, which django-pglock refuses too, or holds a lone surrogate.
    """
    text = _encode_utf8(name)
    if not text:
        raise ValueError("name must not be empty")
    return _read_little_endian(hashlib.sha256(text).digest())


def with_advisory_lock_key(name: str) -> LockKey:
    """Return the key of `Model.with_advisory_lock(name)` in Rails: a pair, (31 bits of CRC-32, 0).

    It is the key without `WITH_ADVISORY_LOCK_PREFIX`. That setting only ever gives its leading digits as second half; then
    take `LockKey.pair(with_advisory_lock_key(name).value >> 32, digits)`. 31 bits are few: unrelated names share a key
    about as soon as there are 50,000 of them.

    Raises:
        TypeError: it is no str. A number as a name stands for itself there: `LockKey.pair(number, 0)`.
        ValueError: it holds a lone surrogate.
    """
    return LockKey.pair(zlib.crc32(_encode_utf8(name)) & 0x7FFFFFFF, 0)


def sha256_hex15_key(name: str) -> LockKey:
    """Return the key of the hand-written `int(hashlib.sha256(name.encode()).hexdigest()[:15], 16)`.

    Raises:
        TypeError: it is no str.
        ValueError: it holds a lone surrogate.
    """
    return LockKey.raw(int(hashlib.sha256(_encode_utf8(name)).hexdigest()[:15], 16))


@overload
async def hashtext_key(connection: AsyncConnection, name: str) -> LockKey: ...
@overload
def hashtext_key(connection: Connection, name: str) -> LockKey: ...
def hashtext_key(connection: Connection | AsyncConnection, name: str) -> object:
    """Return the key of `pg_advisory_lock(hashtext(name))`, as this server computes it: one round trip.

    Only a server knows: PostgreSQL promises nothing about `hashtext` across its releases, so ask the one that the lock is
    on and keep the answer nowhere. Outside a transaction the connection is left outside one; a running one goes on.
    The key is that of the form with one argument; `hashtext(a), hashtext(b)` is a `LockKey.pair` of both values.

    Raises:
        TypeError: `connection` is neither a Connection nor an AsyncConnection, or `name` is no str.
        ValueError: `name` holds NUL, which PostgreSQL has no text for, or a lone surrogate.
    """
    if b"\0" in _encode_utf8(name):
        raise ValueError(f"name must not contain NUL: {name!r}")
    if isinstance(connection, Connection):
        return _ask_hashtext(connection, name)
    if hasattr(connection, "sync_connection"):
        return connection.run_sync(_ask_hashtext, name)
    raise TypeError(f"a Connection or AsyncConnection is needed, not {type(connection).__name__}")


def _ask_hashtext(connection: Connection, name: str) -> LockKey:
    ours = not connection.in_transaction()
    try:
        with translate_text_errors(connection, name):
            asked = select(func.pg_catalog.hashtext(cast(literal(name), Text)))
            return LockKey.raw(connection.execute(asked).scalar_one())
    finally:
        if ours:
            connection.rollback()


def _encode_utf8(value: object, what: str = "name", wanted: str = "a str") -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be {wanted}, not {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be valid Unicode, it holds a lone surrogate: {value!r}") from None


def _read_little_endian(digest: bytes) -> LockKey:
    return LockKey.raw(int.from_bytes(digest[:8], "little", signed=True))
