"""The partition of a key, and how members divide partitions among themselves."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pgfence import partition_for
from pgfence.partitions._assignment import choose_surplus, compute_quota, rotate_free
from pgfence.partitions._hashing import compute_murmur2
from support.rows import every_row

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "partition_vectors.json").read_text(encoding="ascii"))
KAFKA = {
    "21": -973932308,
    "foobar": -790332482,
    "a-little-bit-long-string": -985981536,
    "a-little-bit-longer-string": -1486304829,
    "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    "abc": 479470107,
}
"""The hashes that Kafka's own tests expect."""


@every_row("vector", VECTORS["vectors"])
def test_the_partition_of_a_key_never_changes(vector: Any) -> None:
    """Both hashes give the frozen numbers, with every count of partitions."""
    key = vector["key"]
    assert compute_murmur2(key.encode()) == vector["murmur2"] % (1 << 32)
    for count, expected in vector["partitions"].items():
        found = {one: partition_for(key, int(count), hash=one) for one in ("sha256", "murmur2")}
        assert found == expected
        assert int(vector["sha256"]) % int(count) == found["sha256"]
    assert partition_for(key, 64) == vector["partitions"]["64"]["sha256"]


def test_murmur2_is_that_of_kafka() -> None:
    """The vectors contain the hashes that Kafka's tests list, and equal them."""
    found = {vector["key"]: vector["murmur2"] for vector in VECTORS["vectors"]}
    assert {key: found[key] for key in KAFKA} == KAFKA


@every_row(
    ("key", "count", "hash_name", "error", "message"),
    [
        ("a", 0, "sha256", ValueError, "count must be from 1 to 1000, not 0"),
        ("a", 1.0, "sha256", TypeError, "count must be an int"),
        ("a", 4, "crc32", ValueError, "hash must be one of 'sha256', 'murmur2', not 'crc32'"),
        (7, 4, "sha256", TypeError, "key must be a str"),
        ("a\0b", 4, "sha256", ValueError, "key must not contain NUL"),
        ("\udcff", 4, "murmur2", ValueError, "lone surrogate"),
    ],
)
def test_wrong_arguments_of_partition_for(key: Any, count: Any, hash_name: Any, error: Any, message: str) -> None:
    """A key that the server could not hash the same way is rejected, and so are a wrong count and an unknown hash."""
    with pytest.raises(error, match=message):
        partition_for(key, count, hash=hash_name)


def test_quotas_add_up_and_differ_by_at_most_one() -> None:
    """Whatever the numbers, all partitions have an owner, and no member owns two more than another."""
    for count in range(1, 70):
        for members in range(1, 75):
            quotas = [compute_quota(count, members, rank) for rank in range(members)]
            assert sum(quotas) == count
            assert max(quotas) - min(quotas) <= 1


def test_only_the_partitions_that_must_move_do() -> None:
    """After a join the new member gets its quota and nothing else moves; after a leave only what the old one owned."""
    choice = random.Random(7)
    for count in (1, 5, 16, 64):
        owned: dict[int, list[int]] = {}
        for number in range(60):
            if owned and choice.random() < 0.45:
                moving = set(owned.pop(choice.choice(list(owned))))
                expected = len(moving)
            else:
                owned[number], moving = [], set()
                expected = count // len(owned)
            if owned:
                moved = settle(owned, count)
                assert len(moved) == expected
                assert moving <= moved


def settle(owned: dict[int, list[int]], count: int) -> set[int]:
    """Let members, in the order in which they joined, give up and take partitions; return those that were taken."""
    quotas = {one: compute_quota(count, len(owned), rank) for rank, one in enumerate(owned)}
    for one, kept in owned.items():
        for number in list(choose_surplus(kept, quotas[one])):
            kept.remove(number)
    free = sorted(set(range(count)) - {number for kept in owned.values() for number in kept})
    moved = set(free)
    for rank, (one, kept) in enumerate(owned.items()):
        taken = rotate_free(free, len(owned), rank)[: quotas[one] - len(kept)]
        kept.extend(taken)
        free = [number for number in free if number not in taken]
    assert free == []
    return moved


def test_members_try_free_partitions_in_different_orders() -> None:
    """Each member begins with a different partition, and tries all of them."""
    assert [rotate_free([0, 1, 2, 3, 4, 5], 3, rank) for rank in range(3)] == [
        [0, 1, 2, 3, 4, 5],
        [2, 3, 4, 5, 0, 1],
        [4, 5, 0, 1, 2, 3],
    ]
    assert rotate_free([], 3, 1) == []
