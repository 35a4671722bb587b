"""Fixtures of the tests on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cluster import wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.cluster import Cluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder unless they are wanted, and give them the time that they need."""
    for item in items:
        if item.path.is_relative_to(HERE) and {"make_cluster", "cluster"} & set(getattr(item, "fixturenames", ())):
            if not wanted.is_wanted():
                item.add_marker(pytest.mark.skip(reason=wanted.REASON))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """A function that starts a cluster, which is stopped after the test: `make_cluster(synchronous=True, block=1)`."""
    from contextlib import ExitStack

    from cluster.cluster import Cluster, make_folder

    with ExitStack() as stack:
        yield lambda **kwargs: stack.enter_context(Cluster(make_folder(), **kwargs))
