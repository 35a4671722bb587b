"""The problems (RFC 9457) that a client can get. Each has a code for programs, a status, and a text for people."""

from __future__ import annotations

import json
from http import HTTPStatus
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from pgfence.effects._claim import Reply
from pgfence.errors import AttemptLostError, IdempotencyInProgressError

if TYPE_CHECKING:
    from pgfence.errors import PgfenceError

MEDIA_TYPE = "application/problem+json"
SHORT = 1
"""Seconds after which to retry a request if no better time is known."""

_LATER = "Send this request again after the number of seconds in Retry-After."
_INTERNAL = "The service could not handle this request because of an internal error. The cause is in the service's log."


# No problem contains the message of a PgfenceError, which may name keys, holders and tables.
class Problem(NamedTuple):
    """A response that the client gets instead of one from the application."""

    code: str
    status: int
    detail: str

    def document(self, detail: str | None = None) -> dict[str, str | int]:
        """Return the members of the problem as JSON values. If `detail` is given, it replaces the general text."""
        return {
            "title": choose_phrase(self.status),
            "status": self.status,
            "detail": detail or self.detail,
            "code": self.code,
        }

    def reply(self, detail: str | None = None, *headers: tuple[str, str]) -> Reply:
        """Return the response that describes the problem to the client."""
        body = json.dumps(self.document(detail)).encode()
        length = str(len(body))
        return Reply(self.status, (("content-type", MEDIA_TYPE), ("content-length", length), *headers), body)


def choose_phrase(status: int) -> str:
    """Return the reason phrase of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


KEY_MISSING = Problem(
    "idempotency_key_missing",
    400,
    "This request needs an Idempotency-Key. Send that header with a string that is unique for each request, such as a UUID,"
    " and send the same string whenever you send this request again.",
)
KEY_REPEATED = Problem(
    "idempotency_key_repeated",
    400,
    "This request has several Idempotency-Key headers, but only one is allowed. Send the header once.",
)
KEY_INVALID = Problem(
    "idempotency_key_invalid",
    400,
    "The Idempotency-Key is malformed. Send one string of 1 to 255 printable ASCII characters, in double quotes.",
)
PRINCIPAL_MISSING = Problem(
    "principal_missing",
    400,
    "An Idempotency-Key belongs to a client, and this request does not identify its client. Send the request with your"
    " credentials.",
)
PAYLOAD_INVALID = Problem(
    "payload_invalid",
    400,
    "The body of this request contains NaN or an infinity, or is nested too deeply, so it cannot be compared with the body of an"
    " earlier request. Correct the body.",
)
BODY_INCOMPLETE = Problem("body_incomplete", 400, "The body of the request ended before it was complete.")
LENGTH_REQUIRED = Problem(
    "length_required", 411, "A request with an Idempotency-Key and a body needs a Content-Length."
)
BODY_TOO_LARGE = Problem(
    "body_too_large", 413, "The body of a request with an Idempotency-Key must not be longer than the service allows."
)
NAME_INVALID = Problem(
    "lock_name_invalid", 422, "A parameter of the path cannot be part of the name of a lock. Correct the parameter."
)
NOT_RECORDED = Problem(
    "response_not_recorded",
    409,
    "The request was processed, but its response could not be recorded and cannot be sent again. Do not repeat the request.",
)
NOT_CLAIMED = Problem(
    "key_not_claimed",
    503,
    "The database did not accept the Idempotency-Key of this request, so nothing was done. Send the request again later.",
)
OF_REQUESTS = (
    KEY_MISSING,
    KEY_REPEATED,
    KEY_INVALID,
    PRINCIPAL_MISSING,
    PAYLOAD_INVALID,
    BODY_INCOMPLETE,
    LENGTH_REQUIRED,
    BODY_TOO_LARGE,
    NAME_INVALID,
    NOT_RECORDED,
    NOT_CLAIMED,
)

KEY_FAILED = Problem(
    "idempotency_attempt_failed",
    409,
    f"An earlier request with this Idempotency-Key failed, and it is not known what that request did. {_LATER}",
)
OUTCOME_UNKNOWN = Problem(
    "idempotency_outcome_unknown",
    409,
    "An earlier request with this Idempotency-Key was interrupted, and it is not known what that request did. An operator of the"
    " service must find that out before the request can be sent again.",
)
PRECONDITION_FAILED = Problem(
    "precondition_failed",
    412,
    "The data has changed since you read it. Read it again, and apply your change to the new version.",
)
UNREACHABLE_REJECTED = Problem("database_login_rejected", 500, _INTERNAL)

# Keyed by class name, because some of the classes are in modules that are loaded only when they are used.
OF_ERRORS = {
    "IdempotencyInProgressError": Problem(
        "idempotency_in_progress", 409, f"A request with this Idempotency-Key is in progress. {_LATER}"
    ),
    "IdempotencyKeyReusedError": Problem(
        "idempotency_key_reused",
        422,
        "This Idempotency-Key belongs to another request. A new request needs a new key.",
    ),
    "AttemptLostError": Problem(
        "idempotency_attempt_superseded",
        409,
        f"This request took too long and lost its claim on the Idempotency-Key, so its result was not stored. {_LATER}",
    ),
    "LockTimeoutError": Problem(
        "lock_timeout",
        423,
        f"Other requests or processes are using the lock, the permits or the rate limit that this request needs. {_LATER}",
    ),
    "WaitCancelledError": Problem(
        "wait_cancelled",
        503,
        "The service stopped waiting for a lock, because it is shutting down. Send the request again.",
    ),
    "LockLostError": Problem(
        "lock_lost",
        503,
        f"The service lost a lock that this request needs, so it stopped processing the request. {_LATER}",
    ),
    "DeadlockError": Problem("deadlock", 409, f"This request and another one waited for each other. {_LATER}"),
    "StaleFencingTokenError": Problem(
        "stale_fencing_token",
        409,
        "A newer holder has taken over the data that this request changes, so the request was rejected. Read the current state"
        " before you send another request.",
    ),
    "VersionConflictError": Problem(
        "version_conflict", 409, f"Another request or process has changed the same data. {_LATER}"
    ),
    "VersionRequiredError": Problem(
        "version_required",
        428,
        "This request needs the version of the data that it changes: send the version in the If-Match header.",
    ),
    "CommitOutcomeUnknownError": Problem(
        "commit_outcome_unknown",
        503,
        "The connection to the database was lost during the commit, so it is not known whether this request had an effect. Check"
        " that before you send it again; with an Idempotency-Key, you can send it again without a check.",
    ),
    "StandbyError": Problem("database_read_only", 503, f"The database does not accept changes at the moment. {_LATER}"),
    "UnreachableError": Problem("database_unreachable", 503, f"The database cannot be reached at the moment. {_LATER}"),
    "CapacityError": Problem(
        "database_full", 503, f"The database has no room for another lock at the moment. {_LATER}"
    ),
    "SlotOverError": Problem(
        "slot_over",
        423,
        "The job that this request runs is already done for the current time slot, or the slot was missed.",
    ),
    "SlotClockError": Problem("slot_clock", 423, _INTERNAL),
    "SlotZoneError": Problem("slot_zone", 500, _INTERNAL),
    "LockNotHeldError": Problem("lock_not_held", 500, _INTERNAL),
    "SelfDeadlockError": Problem("self_deadlock", 500, _INTERNAL),
    "PoolerError": Problem("pooler", 500, _INTERNAL),
    "UnsupportedServerError": Problem("unsupported_server", 500, _INTERNAL),
    "TransactionStateError": Problem("transaction_state", 500, _INTERNAL),
    "KeyCollisionError": Problem("key_collision", 500, _INTERNAL),
    "SchemaError": Problem("schema", 500, _INTERNAL),
    "FenceRequiredError": Problem("fence_required", 500, _INTERNAL),
    "IdempotencyMisuseError": Problem("idempotency_misuse", 500, _INTERNAL),
    "PgfenceError": Problem("internal_error", 500, _INTERNAL),
}
PROBLEMS = (*OF_REQUESTS, *OF_ERRORS.values(), KEY_FAILED, OUTCOME_UNKNOWN, PRECONDITION_FAILED, UNREACHABLE_REJECTED)


def problem_of(error: PgfenceError) -> Problem:
    """Return the problem for an error. For a class outside pgfence, it is the problem of the nearest base class in pgfence."""
    name = next(kind.__name__ for kind in type(error).__mro__ if kind.__name__ in OF_ERRORS)
    if isinstance(error, IdempotencyInProgressError) and error.ended_with is not None:
        return KEY_FAILED
    if isinstance(error, AttemptLostError) and not _has_lost_claim(error):
        return OUTCOME_UNKNOWN
    if name == "VersionConflictError" and error.http_status == PRECONDITION_FAILED.status:
        return PRECONDITION_FAILED
    if name == "UnreachableError" and not error.retryable:
        return UNREACHABLE_REJECTED
    return OF_ERRORS[name]._replace(status=error.http_status)


def retry_headers(error: PgfenceError) -> dict[str, str]:
    """Return the header that says when to retry, if a retry helps. A response with this header is not recorded under a key."""
    return {"retry-after": str(ceil(error.retry_after or SHORT))} if error.retryable or _has_lost_claim(error) else {}


def _has_lost_claim(error: PgfenceError) -> bool:
    """Return whether an attempt has lost its claim, so that a retry may help.

    If `takeover=False` keeps the key until an operator frees it, a retry does not help.
    """
    return isinstance(error, AttemptLostError) and (error.retry_after is not None or error.newest > error.attempt)
