"""Responses that pgfence creates instead of the application: problems (RFC 9457) and replays."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pgfence._http.problems import NOT_CLAIMED, NOT_RECORDED, problem_of, retry_headers
from pgfence._sql.sqlstate import sqlstate_of
from pgfence.errors import IdempotencyMisuseError, PgfenceError

if TYPE_CHECKING:
    from pgfence._http.problems import Problem
    from pgfence.effects._claim import Reply, StoredResult

log = logging.getLogger("pgfence.http")

REPLAYED = ("idempotent-replayed", "true")


class ProblemResponse(Exception):
    """An error whose response is sent for a request that is not passed to the application."""

    def __init__(self, problem: Problem, detail: str | None = None) -> None:
        super().__init__(detail or problem.detail)
        self.reply = problem.reply(detail)


UNRECORDABLE = NOT_RECORDED.reply()
"""The response that is stored instead of one that cannot be stored."""


def build_refusal(error: PgfenceError, request: str) -> Reply:
    """Return the response for a pgfence error, and log its message, which may contain data that the client must not see."""
    status = error.http_status
    level, trace = (logging.ERROR, error) if status >= 500 else (logging.INFO, None)
    log.log(level, "%s: %s", request, error, exc_info=trace)
    return problem_of(error).reply(None, *retry_headers(error).items())


def find_claim_problem(error: Exception, request: str) -> ProblemResponse | None:
    """Return the response for an error of the database server during a claim, such as a full disk, or None for other errors."""
    if isinstance(error, PgfenceError) or sqlstate_of(error) is None:
        return None
    log.error("%s: the idempotency key could not be claimed", request, exc_info=error)
    return ProblemResponse(NOT_CLAIMED)


def log_lapse(request: object, description: str) -> None:
    """Log the `description`, which says what happens to the key of a failed request."""
    log.warning("%s: %s", request, description)


def build_replay(stored: StoredResult) -> Reply:
    """Return a stored response, marked as a replay.

    Raises:
        IdempotencyMisuseError: the stored value is not a response.
    """
    if stored.reply is None:
        raise IdempotencyMisuseError(
            "the idempotency key of this request was already used outside HTTP, so the result that is stored under it is not an"
            " HTTP response"
        )
    return stored.reply._replace(headers=(*stored.reply.headers, REPLAYED))
