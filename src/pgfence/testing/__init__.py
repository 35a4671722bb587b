"""Fixtures and faults for the tests of code that uses pgfence.

Installing pgfence adds its plugin to pytest. The plugin does nothing until a test uses one of its fixtures:

- `pgfence_server`: the URL of a database for this run, on a temporary PostgreSQL server or on that of `PGFENCE_TEST_DSN`.
- `pgfence_namespace`: a namespace that no other test uses.
- `pgfence_holds`: holds a lock as another contender.
- `pgfence_no_leaks`: fails a test that leaves a lock behind.
- `pgfence_faults`: makes locks busy, lost or stale, ends connections and processes, and moves the server's clock.
- `pgfence_history`: records which holders were inside a critical section, and checks the record.

This module contains the types of these fixtures, and does not need pytest.
"""

from __future__ import annotations

from pgfence.testing._elsewhere import PgfenceHolds
from pgfence.testing._errors import FaultUnavailableError
from pgfence.testing._faults import PgfenceFaults
from pgfence.testing._history import PgfenceHistory

__all__ = ["FaultUnavailableError", "PgfenceFaults", "PgfenceHistory", "PgfenceHolds"]
