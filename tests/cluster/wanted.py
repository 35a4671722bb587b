"""Which tests on a cluster are wanted. They run only if they are asked for, because they need programs that pip does not install."""

from __future__ import annotations

import os

import pytest

VARIABLE = "PGFENCE_TEST_CLUSTER"
SHORT, ALL = "1", "all"
REASON = f"needs a cluster: run nox -s cluster, or set {VARIABLE}={SHORT}"


def is_wanted() -> bool:
    """Return whether the tests on a cluster run."""
    return os.environ.get(VARIABLE) in {SHORT, ALL}


def is_long() -> bool:
    """Return whether those run, too, that repeat on another cluster what the usual run tests."""
    return os.environ.get(VARIABLE) == ALL


LONG = pytest.mark.skipif(not is_long(), reason=f"runs with {VARIABLE}={ALL}")
"""Marks the tests of which the usual run tests the main case."""
