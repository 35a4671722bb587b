"""The pytest plugin in small projects of its own, each run by pytest in a separate process."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest

from pgfence.testing import FaultUnavailableError
from pgfence.testing._clock import find_library

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    Run = Callable[..., pytest.RunResult]

# The fixtures of an application, as the documentation shows them.
CONFTEST = """
    import pytest
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session
    from pgfence import schema

    @pytest.fixture(scope="session")
    def engine(pgfence_server):
        engine = create_engine(pgfence_server)
        schema.create_all(engine)
        yield engine
        engine.dispose()

    @pytest.fixture
    def session(engine):
        with engine.connect() as connection:
            outer = connection.begin()
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                yield session
            outer.rollback()
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function that runs a project: `run(ini, *options, conftest=..., test_a=...)` with the text of its files."""
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "PGFENCE_TEST"))]:
        monkeypatch.delenv(name)
    # The entry points of this environment would take seconds to load.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(ini: str, *options: str, **files: str) -> pytest.RunResult:
        pytester.makeini(f"[pytest]\nfilterwarnings = error\n{ini}")
        pytester.makepyfile(**files)
        return pytester.runpytest_subprocess("-p", "pgfence_pytest", *options)

    return run


def test_a_project_that_uses_no_fixture_imports_nothing(run: Run) -> None:
    """The plugin, by its entry point, imports neither pgfence nor SQLAlchemy."""
    (found,) = [each for each in entry_points(group="pytest11") if each.name == "pgfence_pytest"]
    assert found.value == "pgfence_pytest"
    done = run(
        "",
        conftest="""
            import sys

            def pytest_unconfigure():
                print("imported:", *sorted(each for each in sys.modules if each.startswith(("pgfence", "sqlalchemy"))))
        """,
        test_a="def test_nothing(): pass",
    )
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["imported: pgfence_pytest"])


def test_a_test_that_leaves_a_lock_behind_fails(
    run: Run, dsn: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure names each lock and its holder; locks that a test releases, or a fixture rolls back, are none."""
    monkeypatch.setenv("PGFENCE_TEST_DSN", dsn)
    done = run(
        "usefixtures = pgfence_no_leaks",
        conftest=CONFTEST,
        test_a="""
            import pytest
            from sqlalchemy import text
            from pgfence import AdvisoryLock, Lease, TransactionLock

            kept = []

            @pytest.fixture(scope="module", autouse=True)
            def singleton(engine):
                with AdvisoryLock(engine, "of the module").hold():
                    yield

            def test_releases(engine, session):
                TransactionLock(session, "account:1").acquire()
                session.commit()
                with AdvisoryLock(engine, "report").hold(), Lease(engine, "close", ttl=30).hold():
                    pass

            def test_leaks(engine):
                kept.append(AdvisoryLock(engine, "report").acquire().release)
                kept.append(Lease(engine, "close", ttl=30, owner="me").acquire().release)

            def test_leaks_a_transaction(engine):
                connection = engine.connect()
                kept.append(connection.invalidate)
                connection.execute(text("INSERT INTO pgfence_lock_name VALUES (4711, 'of another process', now())"))
                connection.execute(text("SELECT pg_advisory_lock(4711)"))
                connection.commit()
                TransactionLock(connection, "account:1").acquire()

            def test_afterwards(engine):
                for end in kept:
                    end()
        """,
    )
    done.assert_outcomes(passed=4, errors=2)
    done.stdout.fnmatch_lines(
        [
            "the test left behind:",
            "- advisory lock 'report' (key *), held by *(backend *), since *; the session is idle, and its last statement was: *",
            "- lease 'close', held by me*, since *, process *",
            "the test left behind:",
            "- advisory lock 'of another process' (key 4711), held by *",
            "- advisory lock 'account:1' (key *), held by *; the session is idle in transaction, *",
        ]
    )
    assert "of the module" not in done.stdout.str()
    left = admin.execute("SELECT datname FROM pg_database WHERE datname LIKE 'pgfence_test_%_main'").fetchall()
    assert [name for (name,) in left if name not in dsn] == []


def test_the_clock_of_the_temporary_server_moves(run: Run) -> None:
    """`skew` moves the clock of `pgfence_server`, which decides the slot of a job and when a lease expires, and moves it back."""
    try:
        find_library()
    except FaultUnavailableError as error:
        pytest.skip(str(error))
    done = run(
        "pgfence_skew = true",
        conftest=CONFTEST,
        test_a="""
            from datetime import UTC, datetime, timedelta
            import pytest
            from sqlalchemy import text
            from pgfence import Lease, LockLostError, Once

            def ahead(engine):
                with engine.connect() as connection:
                    return connection.scalar(text("SELECT clock_timestamp()")) - datetime.now(UTC)

            def test_skew(engine, pgfence_faults):
                job = Once(engine, "job", cron="0 3 * * *", tz="UTC")
                with job.hold(timeout=0) as slot:
                    today = slot.slot
                assert job.try_acquire() is None
                lease = Lease(engine, "lease", ttl=30).acquire()
                with pgfence_faults.skew(timedelta(days=1)):
                    with job.hold(timeout=0) as slot:
                        assert slot.slot == today + timedelta(days=1)
                    with pytest.raises(LockLostError):
                        lease.renew()
                    with pgfence_faults.skew(-3600):
                        assert timedelta(hours=22) < ahead(engine) < timedelta(hours=24)
                assert abs(ahead(engine)) < timedelta(minutes=5)
        """,
    )
    done.assert_outcomes(passed=1)
