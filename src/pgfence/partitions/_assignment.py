"""How many partitions a member owns, and which ones it takes and gives up. Pure functions, without I/O or clocks.

Each member decides alone, from how many members are alive and how many of them joined earlier. The quotas of all members add up to
the number of partitions, so a member that owns less than its quota finds free ones. A quota never grows when a member joins and never
shrinks when one leaves: nothing moves except to the new member, or from the old one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

OwnedT = TypeVar("OwnedT")


def compute_quota(count: int, members: int, rank: int) -> int:
    """Return how many of `count` partitions a member owns.

    Args:
        count: the number of partitions.
        members: how many members are alive.
        rank: how many of them joined before this one.
    """
    return (count + members - 1 - rank) // members


def choose_surplus(owned: Sequence[OwnedT], quota: int) -> Sequence[OwnedT]:
    """Return what a member gives up, of what it owns in the order in which it took it."""
    # The newest: what the work has cached for the oldest is worth most.
    return owned[quota:]


def rotate_free(free: Sequence[int], members: int, rank: int) -> list[int]:
    """Return free partitions in the order in which a member tries them."""
    # Members that look at the same time begin at different places, so that they rarely try the same partition.
    start = len(free) * rank // max(members, 1)
    return [*free[start:], *free[:start]]
