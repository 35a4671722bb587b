"""Three releases that replace a lock of pals with a lock of pgfence.

pip install "pgfence[psycopg]"
export PGHOST=localhost PGUSER=... PGPASSWORD=... PGDATABASE=...
"""

from collections.abc import Callable

from sqlalchemy import create_engine

from pgfence import AdvisoryLock, compat

engine = create_engine("postgresql+psycopg://")  # reads PGHOST, PGDATABASE, ...
OLD = compat.pals_key("myapp", "billing")  # pals.Locker("myapp", ...).lock("billing")


def release_n(work: Callable[[], None]) -> None:
    """Lock the old key with the new library."""
    with AdvisoryLock(engine, OLD).hold(timeout=30):
        work()


def release_n_plus_1(work: Callable[[], None]) -> None:
    """Lock both keys in one round trip."""
    with AdvisoryLock(engine, OLD, "billing").hold(timeout=30):
        work()


def release_n_plus_2(work: Callable[[], None]) -> None:
    """Lock only the name."""
    with AdvisoryLock(engine, "billing").hold(timeout=30):
        work()
