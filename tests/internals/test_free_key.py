"""`monitoring.free_key` frees the attempt that the operator has seen, and no later one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine

from pgfence._admin import requests, stuck_keys
from pgfence._sql import stuck_keys as statements
from support.attempts import OTHER, Attempts

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from sqlalchemy import Engine


pytestmark = pytest.mark.usefixtures("tables")


@pytest.fixture
def attempts(name: str, admin: psycopg.Connection[Any]) -> Attempts:
    """Attempts under keys of a scope that no other test has."""
    return Attempts(admin, name)


@pytest.fixture
def engine(dsn: str) -> Iterator[Engine]:
    """An engine of psycopg, where the driver does not matter."""
    engine = create_engine(f"postgresql+psycopg://{dsn.split('://', 1)[1]}")
    yield engine
    engine.dispose()


def test_another_attempt_than_the_one_that_was_seen_is_left_alone(engine: Engine, attempts: Attempts) -> None:
    """With `only`, an attempt that came in the meantime is returned, and continues."""
    attempts.claim("k")
    order = stuck_keys.build_free_key_request(engine, attempts.scope, "k", reason="hung", actor="ann")
    seen = requests.perform(engine, statements.find, order)
    attempts.lapse("k")
    attempts.claim("k", OTHER)
    found = requests.perform(engine, statements.free, replace(order, only=seen))
    assert found is not None and (found.attempt, str(found.claim_id)) == (2, OTHER)
    assert attempts.row("k") == ("in_progress", 2, None)
    assert attempts.audit("k") == []
    assert requests.perform(engine, statements.free, replace(order, only=found)) is not None
    assert attempts.row("k") == ("free", 2, None)
