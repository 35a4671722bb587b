"""The problems that a client can get: one for each error, and one table of them in the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pgfence.once  # the errors of slots
from pgfence._http import problems
from pgfence._http.problems import OF_ERRORS, OF_REQUESTS, PROBLEMS

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "http.md"
SPECIAL = {
    problems.KEY_FAILED: "IdempotencyInProgressError",
    problems.OUTCOME_UNKNOWN: "AttemptLostError",
    problems.PRECONDITION_FAILED: "VersionConflictError",
    problems.UNREACHABLE_REJECTED: "UnreachableError",
}


def own(kind: type[Exception]) -> Iterator[str]:
    """Yield the names of pgfence's error classes."""
    if kind.__module__.startswith("pgfence."):
        yield kind.__name__
    for one in kind.__subclasses__():
        yield from own(one)


def test_each_error_has_a_problem_with_its_own_code() -> None:
    """A new class of error needs a code, a status that is its own, and a sentence that says what to do."""
    assert set(own(pgfence.PgfenceError)) == OF_ERRORS.keys()
    assert len({one.code for one in PROBLEMS}) == len(PROBLEMS)
    for name, problem in OF_ERRORS.items():
        kind = getattr(pgfence, name, None) or getattr(pgfence.once, name)
        if name not in ("VersionConflictError", "UnreachableError"):  # their instances have one of two
            assert kind.http_status == problem.status, name


def test_the_table_of_the_reference_has_each_code() -> None:
    """Code, status, what it is for, and the sentence, as the client gets them."""
    rows = [(one, "a request") for one in OF_REQUESTS]
    rows += [(one, f"`{name}`") for name, one in OF_ERRORS.items()]
    rows += [(one, f"`{name}`") for one, name in SPECIAL.items()]
    rows.sort(key=lambda row: (row[0].status, row[0].code))
    table = "".join(f"| `{one.code}` | {one.status} | {what} | {one.detail} |\n" for one, what in rows)
    assert table in PAGE.read_text(), table
