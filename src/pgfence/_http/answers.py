"""Answers that are not the application's own: refusals as problems (RFC 9457), replays, and what of an answer is kept."""

from __future__ import annotations

import json
import logging
from http import HTTPStatus
from math import ceil
from typing import TYPE_CHECKING

from pgfence._sql.sqlstate import sqlstate
from pgfence.effects._wanted import Reply
from pgfence.errors import (
    AttemptLostError,
    IdempotencyInProgressError,
    IdempotencyKeyReusedError,
    IdempotencyMisuseError,
    PgfenceError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pgfence.effects._wanted import Stored

    Headers = tuple[tuple[str, str], ...]

log = logging.getLogger("pgfence.http")

REPLAYED = ("idempotent-replayed", "true")
SHORT = 1
"""Seconds after which to ask again for an attempt that is at work."""

# What belongs to a connection and not to an answer (RFC 9110, 7.6.1), what the server says of itself and of the time, and
# cookies: they may be a session, and a replay may go to whoever has the key.
_DROPPED = frozenset(
    (
        "connection",
        "date",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authentication-info",
        "proxy-authorization",
        "proxy-connection",
        "server",
        "set-cookie",
        "set-cookie2",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


class Refusal(Exception):
    """A request that does not get to the application."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.reply = problem(status, detail)


def phrase(status: int) -> str:
    """Return the words that go with a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def problem(status: int, detail: str, *headers: tuple[str, str]) -> Reply:
    """Return an answer that says what is wrong, for programs and people."""
    told = {"title": phrase(status), "status": status, "detail": detail}
    body = json.dumps(told).encode()
    return Reply(
        status, (("content-type", "application/problem+json"), ("content-length", str(len(body))), *headers), body
    )


UNKEPT = problem(409, "The request was processed. Its answer could not be kept, and cannot be given again.")
"""What is recorded in the place of an answer that cannot be."""


def refused(error: PgfenceError, request: str, ttl: float) -> Reply:
    """Return the answer for an error of pgfence. What it says goes to the log: it may name what a client must not know.

    Args:
        error: in the claim, or at its end.
        request: for the log.
        ttl: seconds that a claim stands without being renewed.
    """
    status = error.http_status
    level, trace = (logging.ERROR, error) if status >= 500 else (logging.INFO, None)
    log.log(level, "%s: %s", request, error, exc_info=trace)
    match error:
        case IdempotencyInProgressError():
            left = error.retry_after or SHORT
            # A claim is renewed each third of its time: with less than half of it left, its process is gone or hangs.
            return _later(
                status, "A request with this Idempotency-Key is in progress.", left if left < ttl / 2 else SHORT
            )
        case IdempotencyKeyReusedError():
            return problem(status, "This Idempotency-Key belongs to another request. A new request needs a new key.")
        case AttemptLostError():
            return _later(
                status, "This request took too long, and another one with its Idempotency-Key came first.", SHORT
            )
        case _:
            return problem(status, type(error).__name__)


def unclaimed(error: Exception, request: str) -> Refusal | None:
    """Return the refusal where the server has refused a claim by an error of its own, a full disk for one; None: another error.

    Args:
        error: in the claim.
        request: for the log.
    """
    if isinstance(error, PgfenceError) or sqlstate(error) is None:
        return None
    log.error("%s: the key is not claimed", request, exc_info=error)
    return Refusal(503, "The database did not take the Idempotency-Key of this request.")


def _later(status: int, detail: str, wait: float) -> Reply:
    return problem(status, detail, ("retry-after", str(ceil(wait))))


def replay(stored: Stored) -> Reply:
    """Return a recorded answer, marked as one.

    Raises:
        IdempotencyMisuseError: something else is recorded.
    """
    if stored.reply is None:
        raise IdempotencyMisuseError("the key of a request was used for something that is no answer of HTTP")
    return stored.reply._replace(headers=(*stored.reply.headers, REPLAYED))


def kept(headers: Sequence[tuple[str, str]]) -> Headers:
    """Return the headers that a replay has: all but those of the connection, `Set-Cookie`, `Date` and `Server`."""
    named = {
        name.strip().lower() for header, value in headers if header.lower() == "connection" for name in value.split(",")
    }
    return tuple(pair for pair in headers if pair[0].lower() not in _DROPPED | named)
