"""Errors as values: one tree, picklable, their data as attributes."""

from __future__ import annotations

import copy
import inspect
import pickle
from datetime import UTC, datetime

import pytest

from pgfence import errors, once
from pgfence.errors import (
    AttemptLostError,
    CapacityError,
    CommitOutcomeUnknownError,
    DeadlockError,
    FenceRequiredError,
    IdempotencyInProgressError,
    IdempotencyKeyReusedError,
    IdempotencyMisuseError,
    KeyCollisionError,
    LockLostError,
    LockNotHeldError,
    LockTimeoutError,
    PgfenceError,
    PoolerError,
    SchemaError,
    SelfDeadlockError,
    StaleFencingTokenError,
    StandbyError,
    TransactionStateError,
    UnreachableError,
    UnsupportedServerError,
    VersionConflict,
    VersionConflictError,
    VersionRequiredError,
    WaitCancelledError,
)
from pgfence.keys import LockKey
from pgfence.types import Holder

HOLDER = Holder(
    name="a",
    key=LockKey.of("a"),
    kind="advisory",
    mode="exclusive",
    owner=None,
    host="10.0.0.7",
    pid=None,
    backend_pid=4711,
    application_name="worker",
    purpose="",
    token=None,
    since=datetime(2026, 4, 1, 12, 30, tzinfo=UTC),
    expires_at=None,
)

# One of each class with all its data set, what the web answers, and whether the same call may be made again.
SAMPLES: list[tuple[PgfenceError, int, bool]] = [
    (PgfenceError("m", sqlstate="XX000"), 500, False),
    (
        LockTimeoutError(
            "busy",
            names=["a"],
            keys=[LockKey.of("a"), LockKey.pair(1, -2)],
            timeout=2.5,
            holders=[HOLDER],
            held_here=["b"],
        ),
        423,
        True,
    ),
    (WaitCancelledError("cancelled", names=["a"]), 503, False),
    (LockLostError("lost", names=["a"], reason="cut off", token=7), 503, True),
    (LockNotHeldError("twice", names=["a"]), 500, False),
    (SelfDeadlockError("self", names=["a", "b"]), 500, False),
    (DeadlockError("victim", sqlstate="40P01"), 409, True),
    (PoolerError("pooler", mode="transaction"), 500, False),
    (StandbyError("standby"), 503, True),
    (UnsupportedServerError("other"), 500, False),
    (UnreachableError("gone", sqlstate="57P01"), 503, True),
    (UnreachableError("bad password", sqlstate="28P01", retryable=False), 500, False),
    (TransactionStateError("autocommit"), 500, False),
    (CapacityError("full", used=95, limit=100, sqlstate="53200"), 503, True),
    (KeyCollisionError("same key", names=["a", "b"]), 500, False),
    (SchemaError("old", found=0, needed=1, command="pgfence install", sqlstate="42P01"), 500, False),
    (StaleFencingTokenError("stale", resource="a", token=7, newest=8), 409, False),
    (VersionConflictError("old", items=[VersionConflict(int, (1,), 2, 3)]), 409, True),
    (VersionConflictError("gone", items=[VersionConflict(int, (1, "a"), 2, None)], precondition=True), 412, False),
    (VersionRequiredError("no If-Match"), 428, False),
    (CommitOutcomeUnknownError("cut", sqlstate="08006"), 503, False),
    (FenceRequiredError("no token", resource="a", sqlstate="PF002"), 500, False),
    (IdempotencyKeyReusedError("other payload", scope="s", key="k"), 422, False),
    (IdempotencyInProgressError("at work", scope="s", key="k", sqlstate="40001"), 409, True),
    (IdempotencyMisuseError("forgot"), 500, False),
    (AttemptLostError("taken over", scope="s", key="k", attempt=1, newest=2), 409, False),
]
each = pytest.mark.parametrize(("error", "http_status", "retryable"), SAMPLES, ids=[str(e) for e, _, _ in SAMPLES])


def test_every_class_has_a_sample() -> None:
    """Each error class is in the table of this file, so a new class must be added there."""
    classes = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)}
    assert classes == {type(error) for error, _, _ in SAMPLES}


@each
def test_an_error_survives_pickle_and_copy_with_its_data(
    error: PgfenceError, http_status: int, retryable: bool
) -> None:
    """Every pickle protocol, copy and deepcopy keep class, message, attributes and notes."""
    again = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for twin in (*again, copy.copy(error), copy.deepcopy(error)):
        assert type(twin) is type(error)
        assert (str(twin), twin.args) == (str(error), error.args)
        assert vars(twin) == vars(error)
        assert (twin.http_status, twin.retryable) == (http_status, retryable)
        assert (twin.retry_after, twin.sqlstate) == (error.retry_after, error.sqlstate)


@each
def test_an_error_tells_the_web_and_a_retry_loop_what_to_do(
    error: PgfenceError, http_status: int, retryable: bool
) -> None:
    """Every error is a PgfenceError with an HTTP status, and a pause only where a retry makes sense."""
    assert isinstance(error, PgfenceError)
    assert error.http_status == http_status
    assert error.retryable is retryable
    assert error.retry_after is None or error.retryable


def test_every_error_is_pickled_under_a_public_module() -> None:
    """A later release can rename its private modules, and still load an error that this release has pickled."""
    kinds: list[type[Exception]] = [errors.PgfenceError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert once.SlotZoneError in kinds
    private = {kind.__module__ for kind in kinds if kind.__module__.startswith("pgfence.") and "._" in kind.__module__}
    assert private == set()


def test_a_note_is_pickled_too() -> None:
    """Notes attached with add_note() survive pickling."""
    error = LockLostError("lost")
    error.add_note("the release failed as well")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["the release failed as well"]


def test_a_changed_attribute_is_pickled_too() -> None:
    """An attribute set on one error after it was created belongs to it, and is pickled."""
    error = LockTimeoutError("busy")
    error.retry_after = 12.0
    assert pickle.loads(pickle.dumps(error)).retry_after == 12.0
    assert LockTimeoutError("busy").retry_after == 1.0


class OrderBusyError(LockTimeoutError):
    """An application's own error, with its own constructor."""

    def __init__(self, order: int) -> None:
        super().__init__(f"order {order} is busy", names=[f"order:{order}"])
        self.order = order


def test_a_users_subclass_is_pickled_without_running_its_constructor() -> None:
    """A subclass with other arguments survives pickling."""
    twin = pickle.loads(pickle.dumps(OrderBusyError(7)))
    assert (type(twin), str(twin), twin.order, twin.names) == (OrderBusyError, "order 7 is busy", 7, ("order:7",))


def test_a_lock_timeout_is_a_timeout_error() -> None:
    """`except TimeoutError` catches a lock timeout, which carries names, keys, timeout and holders as tuples."""
    error = SAMPLES[1][0]
    assert isinstance(error, TimeoutError)
    assert isinstance(error, LockTimeoutError)
    assert error.names == ("a",)
    assert error.keys == (LockKey.of("a"), LockKey.pair(1, -2))
    assert error.timeout == 2.5
    assert error.holders == (HOLDER,)
    assert error.held_here == ("b",)


def test_an_error_copies_its_sequences() -> None:
    """Changing a list after it was passed does not change the error."""
    names = ["a"]
    error = LockTimeoutError("busy", names=names)
    names.append("b")
    assert error.names == ("a",)


def test_a_holder_reads_as_a_person_would_say_it() -> None:
    """The text of a holder says who, where, which backend and since when, and leaves out what is not known."""
    assert str(HOLDER) == "worker on 10.0.0.7 (backend 4711), since 2026-04-01T12:30:00+00:00"
