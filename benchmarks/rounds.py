"""The method: contestants alternate cycle by cycle, so that disturbances of the machine affect all of them alike.

Where the kernel places a server process changes the figure of its connection by a factor of two, and it drifts. So each *set*
creates every contestant again, in random order, with its own connection. Its cycles alternate in random order. The figure of a
set is the median of a contestant's cycles, and its ratio is the quotient of two medians of the same set. The median of the ratios
over the sets is reported. The null test of a run compares the plain driver with itself and must be about 1.

In a large field, each contestant runs with colder caches and takes longer. Compare within a field, never across.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from benchmarks.place import Place

    Make = Callable[[Place, ExitStack], Callable[[], object]]
    AsyncMake = Callable[[Place, AsyncExitStack], Awaitable[Callable[[], Awaitable[object]]]]

NULL_TEST = (0.95, 1.07)


@dataclass(frozen=True, slots=True)
class Effort:
    """The amount of measuring.

    Attributes:
        sets: how many times everything is created again.
        cycles: the number of cycles of each contestant in a set.
        warm: the number of cycles before that, which do not count.
    """

    sets: int
    cycles: int
    warm: int

    @classmethod
    def of(cls, *, quick: bool) -> Effort:
        return cls(2, 30, 10) if quick else cls(24, 300, 60)


Medians = dict[str, list[float]]
"""The seconds of a cycle: for each contestant, one median per set."""


def alternate(place: Place, field: Mapping[str, Make], effort: Effort) -> Medians:
    """Measure sync contestants in alternation."""
    medians: Medians = {name: [] for name in field}
    for _ in range(effort.sets):
        took: dict[str, list[float]] = {name: [] for name in field}
        with ExitStack() as stack:
            cycles = {name: field[name](place, stack) for name in _shuffled(field)}
            for _ in range(effort.warm + effort.cycles):
                for name in _shuffled(cycles):
                    start = time.perf_counter()
                    cycles[name]()
                    took[name].append(time.perf_counter() - start)
        _note(medians, took, effort)
    return medians


def alternate_async(place: Place, field: Mapping[str, AsyncMake], effort: Effort) -> Medians:
    """Measure async contestants in alternation, on one event loop."""

    async def run() -> Medians:
        medians: Medians = {name: [] for name in field}
        for _ in range(effort.sets):
            took: dict[str, list[float]] = {name: [] for name in field}
            async with AsyncExitStack() as stack:
                cycles = {name: await field[name](place, stack) for name in _shuffled(field)}
                for _ in range(effort.warm + effort.cycles):
                    for name in _shuffled(cycles):
                        start = time.perf_counter()
                        await cycles[name]()
                        took[name].append(time.perf_counter() - start)
            _note(medians, took, effort)
        return medians

    return asyncio.run(run())


def _shuffled(names: Any) -> list[str]:
    return random.sample(list(names), len(names))


def _note(medians: Medians, took: Mapping[str, list[float]], effort: Effort) -> None:
    for name, times in took.items():
        medians[name].append(statistics.median(times[effort.warm :]))


def ratios(medians: Medians, name: str, base: str) -> list[float]:
    """Return the ratio of two contestants in each set."""
    return [mine / other for mine, other in zip(medians[name], medians[base], strict=True)]


def ratio(medians: Medians, name: str, base: str) -> float:
    """Return the ratio of two contestants, as the median over the sets."""
    return statistics.median(ratios(medians, name, base))


def quantile(values: list[float], share: float) -> float:
    """Return the value below which a given share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def spread(medians: Medians, name: str, base: str) -> str:
    """Return the range of the middle half of the sets."""
    found = ratios(medians, name, base)
    return f"{quantile(found, 0.25):.2f} to {quantile(found, 0.75):.2f}"
