"""The tests on a cluster run only if they are asked for, because they need programs that pip does not install."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.cluster import Cluster

WANTED = "PGFENCE_TEST_CLUSTER"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder unless they are wanted, and give them the time that they need."""
    for item in items:
        if item.path.is_relative_to(HERE) and {"make_cluster", "cluster"} & set(getattr(item, "fixturenames", ())):
            if os.environ.get(WANTED) != "1":
                item.add_marker(pytest.mark.skip(reason=f"needs a cluster: run nox -s cluster, or set {WANTED}=1"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """A function that starts a cluster, which is stopped after the test: `make_cluster(synchronous=True, block=1)`."""
    from contextlib import ExitStack

    from cluster.cluster import Cluster, make_folder

    with ExitStack() as stack:
        yield lambda **kwargs: stack.enter_context(Cluster(make_folder(), **kwargs))
