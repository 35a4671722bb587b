"""The rules of a retry, without a server: pauses, and what may be tried again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.exc import DBAPIError, IntegrityError, PendingRollbackError

from pgfence._sql.errors import is_commit_unanswered
from pgfence.errors import (
    DeadlockError,
    IdempotencyInProgressError,
    LockLostError,
    UnreachableError,
    VersionConflictError,
)
from pgfence.retrying._rules import is_curable, is_snapshot_error, pick_pause
from support.rows import every_row


class DriverError(Exception):
    """As drivers raise it: with the SQLSTATE where the server spoke."""

    def __init__(self, sqlstate: str | None) -> None:
        super().__init__(sqlstate)
        self.sqlstate = sqlstate


def refused(sqlstate: str | None, *, lost: bool = False) -> DBAPIError:
    return DBAPIError("COMMIT", None, DriverError(sqlstate), connection_invalidated=lost)


@given(st.integers(1, 10**6))
def test_a_pause_lies_between_nothing_and_a_bound_that_doubles(attempt: int) -> None:
    """Full jitter: from 0 to 5 ms after the first attempt, to 10 ms after the second, never over 500 ms."""
    assert 0 <= pick_pause(attempt) <= min(0.5, 0.005 * 2 ** min(attempt - 1, 20))


@every_row(("attempt", "bound"), [(1, 0.005), (2, 0.010), (20, 0.5)])
def test_pauses_are_spread_over_the_whole_span(attempt: int, bound: float) -> None:
    """Transactions that conflicted on one row do not retry at the same moment."""
    pauses = sorted(pick_pause(attempt) for _ in range(2000))
    assert pauses[100] < bound / 10
    assert pauses[-100] > bound * 9 / 10


@every_row("state", ["40001", "40P01"])
def test_two_sqlstates_are_curable_wherever_they_stand(state: str) -> None:
    """In SQLAlchemy's error, or in the driver's own if the work bypasses SQLAlchemy."""
    for error in (refused(state), DriverError(state)):
        assert is_curable(error)
        assert is_snapshot_error(error)


def test_errors_of_pgfence_are_judged_by_their_class() -> None:
    """Of all retryable errors only conflicts and deadlocks are retried; the end of a wait is not."""
    assert is_curable(VersionConflictError("x", items=[]))
    assert not is_snapshot_error(VersionConflictError("x", items=[]))
    assert not is_curable(VersionConflictError("x", items=[], precondition=True))
    assert is_curable(DeadlockError("x"))
    assert is_curable(IdempotencyInProgressError("x", scope="s", key="k", sqlstate="40001"))
    assert not is_curable(IdempotencyInProgressError("x", scope="s", key="k"))
    assert is_snapshot_error(DeadlockError("x"))
    for error in (LockLostError("x"), UnreachableError("x"), UnreachableError("x", sqlstate="40001")):
        assert not is_curable(error)


def test_other_errors_are_not_curable() -> None:
    """Neither a constraint nor a lost connection, and no error of the caller, whatever its cause."""
    mine = LookupError()
    mine.__cause__ = refused("40001")
    for error in (mine, refused("23505"), refused(None, lost=True), IntegrityError("x", {}, DriverError("23505"))):
        assert not is_curable(error)


@every_row("state", ["40001", "40P01", "23505", "23503", "PF001", "P0001", "57014"])
def test_a_rejection_of_a_commit_is_a_response(state: str) -> None:
    """The server rejected it: nothing is committed."""
    assert not is_commit_unanswered(refused(state))


@every_row(
    "error",
    [
        refused("23505", lost=True),
        refused(None),
        refused("57P01"),
        refused("57P02"),
        refused("08006"),
        refused("08007"),
        refused("40003"),
        ConnectionResetError(),
        TimeoutError(),
    ],
)
def test_a_commit_without_a_response_has_an_unknown_outcome(error: Exception) -> None:
    """The connection went, or the time was over: the server may have committed."""
    assert is_commit_unanswered(error)


@every_row("error", [ZeroDivisionError(), PendingRollbackError("x")])
def test_a_commit_that_was_not_sent_has_a_known_outcome(error: Exception) -> None:
    """The caller's hook raised an exception, or the connection was lost before the COMMIT."""
    assert not is_commit_unanswered(error)
