"""What a call of acquire for a lease logs while it waits."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pgfence._holds.queue import Contender, LocalQueue
from pgfence._leases.acquisition import HoldersSeen, LeaseAcquisition
from pgfence._leases.request import LeaseRequest
from pgfence._leases.terms import LeaseTerms
from pgfence._sql.storage import TableNames
from pgfence.config import Config

if TYPE_CHECKING:
    import pytest


def test_a_long_wait_is_logged_once_for_any_holder(caplog: pytest.LogCaptureFixture) -> None:
    """First behind a contender of this process, then behind another process: one warning, which names the lease."""
    request = LeaseRequest(stored="n", place=TableNames(), terms=LeaseTerms(30))
    call = LeaseAcquisition(LocalQueue(), Config(), HoldersSeen(), request, Contender("thread"), 60.0)
    with caplog.at_level(logging.WARNING, "pgfence"):
        call.log_wait(logging.WARNING, 30.0, [])
        call.log_wait(logging.WARNING, 45.0, [])
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for lease 'n' for 30.0 s, held by an unknown holder"
    ]
