"""Compute how many partitions a live worker should own, which ones it gives up, and in which order it tries free ones, without I/O.

Each worker, here called a member, decides alone. It needs to know only how many members are alive and how many of them joined
earlier. The quotas of all members add up to the number of partitions, so a member that owns fewer partitions than its quota finds
free ones as soon as the others have given up their surplus. A quota never grows when a member joins and never shrinks when a
member leaves, so partitions move only to the new member, or from the member that leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

OwnedT = TypeVar("OwnedT")


def compute_quota(count: int, members: int, rank: int) -> int:
    """Return how many of `count` partitions a member should own, if `rank` of the `members` live ones joined before it."""
    return (count + members - 1 - rank) // members


def choose_surplus(owned: Sequence[OwnedT], quota: int) -> Sequence[OwnedT]:
    """Return the partitions that a member gives up, given those that it owns in the order in which it took them."""
    # The newest partitions are given up, because the data that the application has cached for the oldest ones is worth most.
    return owned[quota:]


def rotate_free(free: Sequence[int], members: int, rank: int) -> list[int]:
    """Return free partitions in the order in which a member tries them."""
    # Members that try at the same time begin at different places, so they rarely try the same partition.
    start = len(free) * rank // max(members, 1)
    return [*free[start:], *free[:start]]
