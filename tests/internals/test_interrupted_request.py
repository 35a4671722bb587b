"""A request for a lock on the caller's Connection is interrupted before the connection is watched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgfence import AdvisoryLock
from pgfence._connections.caller_connection import CallerConnection

if TYPE_CHECKING:
    from support.worlds import World


@pytest.mark.sync_only
async def test_an_interrupted_request_does_not_break_the_return(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt propagates out of the block of the Connection, which goes back to its pool."""
    engine = world.engine(pool_size=1, max_overflow=0)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    def request() -> None:
        with engine.connect() as connection:
            AdvisoryLock(connection, name).acquire()

    with monkeypatch.context() as patch:
        patch.setattr(CallerConnection, "watch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            request()
    assert engine.pool.checkedout() == 0
