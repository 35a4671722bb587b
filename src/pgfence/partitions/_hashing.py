"""The partition of a key, which is the same in every process, on every platform and in every release."""

from __future__ import annotations

import hashlib
from typing import Literal, TypeAlias

from pgfence._api.inputs import check_choice, check_int, check_text

PartitionHash: TypeAlias = Literal["sha256", "murmur2"]

MOST_PARTITIONS = 1000
_HASHES = ("sha256", "murmur2")
_SIGN = (1 << 63) - 1
_INT32 = 0xFFFFFFFF
_SEED, _FACTOR = 0x9747B28C, 0x5BD1E995
"""The constants of Kafka's murmur2."""


def partition_for(key: str, count: int, *, hash: Literal["sha256", "murmur2"] = "sha256") -> int:  # noqa: A002  # the public name
    """Return the partition of a key, from 0 to `count - 1`, without a request to the server.

    The server computes the same number with `pgfence_partition_for_v1(key, count, hash)`, in SQL.

    Guarantees: the result depends only on the arguments, and no release of pgfence changes it. With "murmur2", it is the
    partition that the default partitioner of Kafka's Java client chooses for the key.

    Limitations: another count moves most keys to another partition.

    Args:
        key: text, which is hashed as UTF-8.
        count: the number of partitions, from 1 to 1,000.
        hash: "sha256" takes the first 8 bytes of the SHA-256, big-endian and without the sign bit, modulo `count`. "murmur2" is
            the hash of Kafka's Java client.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: `count` or `hash` is invalid, or the key contains NUL or a lone surrogate, which PostgreSQL cannot store.
    """
    return compute_partition(check_text(key, "key"), check_count(count), check_hash(hash))


def compute_partition(key: str, count: int, hash_name: PartitionHash) -> int:
    """Return the partition of a key. The caller has checked `count` and the hash."""
    try:
        data = key.encode()
    except UnicodeEncodeError:
        raise ValueError(f"key must be valid Unicode, but contains a lone surrogate: {key!r}") from None
    if hash_name == "murmur2":
        return (compute_murmur2(data) & 0x7FFFFFFF) % count
    return (int.from_bytes(hashlib.sha256(data).digest()[:8], "big") & _SIGN) % count


def compute_murmur2(data: bytes) -> int:
    """Return Kafka's murmur2 hash of the data, as an unsigned 32-bit number."""
    whole = len(data) // 4 * 4
    found = _SEED ^ len(data)
    for at in range(0, whole, 4):
        part = int.from_bytes(data[at : at + 4], "little") * _FACTOR & _INT32
        part = (part ^ part >> 24) * _FACTOR & _INT32
        found = found * _FACTOR & _INT32 ^ part
    if len(data) > whole:
        found = (found ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _INT32
    found = (found ^ found >> 13) * _FACTOR & _INT32
    return found ^ found >> 15


def check_count(value: object) -> int:
    return check_int(value, "count", MOST_PARTITIONS)


def check_hash(value: PartitionHash) -> PartitionHash:
    check_choice("hash", value, _HASHES)
    return value
