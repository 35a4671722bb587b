"""The rules of both middlewares: which requests have a key, who sent them, which are equal, and what is stored."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from urllib.parse import quote

from pgfence._api.inputs import LONGEST_KEY, check_keep, check_key
from pgfence._http.answers import UNRECORDABLE, ProblemResponse
from pgfence._http.problems import BODY_TOO_LARGE, KEY_INVALID, KEY_MISSING, KEY_REPEATED, PRINCIPAL_MISSING
from pgfence._http.routes import compile_routes, matches
from pgfence._leases.terms import ttl_of
from pgfence.effects._claim import EffectKey, Reply

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, MutableMapping, Sequence

    from pgfence._http.problems import Problem
    from pgfence._process.clock import Seconds

OnFailure: TypeAlias = Literal["free", "lapse"]
Environ: TypeAlias = "MutableMapping[str, Any]"
"""The scope of an ASGI request, or the environment of a WSGI request."""
Principal: TypeAlias = "Callable[[Any], str | None]"

WHY = "a key is claimed in a separate transaction before the request is handled"
MEBIBYTE = 1_048_576
SHOWN = 60
"""The number of characters of a path that an operator sees in a scope."""

_SAFE = ("GET", "HEAD", "OPTIONS", "TRACE", "CONNECT")
# Requests with these statuses (unauthorized, timed out, too early, too many) were not processed, and may succeed later.
_AGAIN = (401, 408, 425, 429)
# A row can contain a line feed, but no server sends one: a stored response with a line feed could never be replayed.
_STORABLE = re.compile(r"[^\0\r\n\u0100-\U0010ffff]*")
# Headers of the connection (RFC 9110, 7.6.1), the server's name and clock, and cookies: a cookie may identify a session, and a
# replay may go to another client that knows the key.
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
_DIGITS = 19
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')
# Visible ASCII without the characters of lists, parameters and quoting: servers join repeated headers with a comma.
_BARE = re.compile(r"[!#-+\--:<-\[\]-~]+")
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


class UnusableKeyError(ValueError):
    """Raised if a request has no usable key. The message is for the client."""

    def __init__(self, problem: Problem, detail: str | None = None) -> None:
        super().__init__(detail or problem.detail)
        self.problem = problem


def parse_key(values: Sequence[str]) -> str:
    """Return the key from the values of a request's `Idempotency-Key` headers.

    `"k1"` with quotes and `k1` without them are the same key.

    Raises:
        UnusableKeyError: the key is missing, repeated or malformed.
    """
    if len(values) != 1:
        raise UnusableKeyError(KEY_REPEATED if values else KEY_MISSING)
    value = values[0].strip(" \t")
    if len(value) > 2 * LONGEST_KEY + 2:
        raise UnusableKeyError(KEY_INVALID, f"The Idempotency-Key must not be longer than {LONGEST_KEY} characters.")
    if quoted := _QUOTED.fullmatch(value):
        value = re.sub(r'\\(["\\])', r"\1", quoted[1])
    elif not _BARE.fullmatch(value):
        raise UnusableKeyError(KEY_INVALID)
    try:
        return check_key(value, "The Idempotency-Key")
    except ValueError as error:
        raise UnusableKeyError(KEY_INVALID, f"{error}.") from None


class HttpRequest(NamedTuple):
    """What is known about a request before its body is read."""

    method: str
    root: str
    path: str
    """The path below the root, as the application sees it."""
    query: bytes
    content_type: bytes
    """The content type, or an empty string."""
    keys: tuple[str, ...]
    """The values of the `Idempotency-Key` headers."""
    credentials: tuple[bytes, ...]
    """The non-empty headers `Authorization` and then `Cookie`, with their names; the Cookie headers as one."""
    length: int | None
    """The announced length of the body, or None."""

    def __str__(self) -> str:
        return f"{self.method} {quote(self.root + self.path, errors='replace')}"


@dataclass(frozen=True, slots=True)
class Rules:
    """The checked options of a middleware."""

    principal: Principal | None
    methods: frozenset[str]
    routes: re.Pattern[str] | None
    record_below: int
    max_body: int
    ttl: float
    keep: float
    free_on_failure: bool

    @classmethod
    def of(
        cls,
        *,
        principal: Principal | None,
        methods: Collection[str],
        routes: Collection[str] | None,
        record_below: int,
        max_body: int,
        ttl: Seconds,
        keep: Seconds,
        on_failure: OnFailure,
    ) -> Rules:
        """Return the rules for the options of a middleware.

        Raises:
            TypeError, ValueError: an option is unusable.
        """
        if principal is not None and not callable(principal):
            raise TypeError(f"principal must be a function of the request, not {principal!r}")
        if not 200 < record_below <= 600:
            raise ValueError(f"record_below must be a status from 201 to 600, not {record_below!r}")
        if max_body < 0:
            raise ValueError(f"max_body must be 0 or more bytes, not {max_body!r}")
        if on_failure not in ("free", "lapse"):
            raise ValueError(f'on_failure must be "free" or "lapse", not {on_failure!r}')
        life, record = ttl_of(ttl), check_keep(keep)
        if record < life:
            raise ValueError(
                f"keep={record:g} is shorter than ttl={life:g}: a client that retries when the claim of an earlier request expires, up"
                " to ttl seconds later, could find that the response was already deleted, and the request would be handled again."
                " Pass a longer keep= or a shorter ttl="
            )
        return cls(
            principal=principal,
            methods=_check_methods(methods),
            routes=None if routes is None else compile_routes(routes),
            record_below=record_below,
            max_body=max_body,
            ttl=life,
            keep=record,
            free_on_failure=on_failure == "free",
        )

    def is_handled_method(self, method: str) -> bool:
        """Return whether the middleware handles requests with this method."""
        # Methods are case-sensitive by the standard, but not in all frameworks.
        return method.upper() in self.methods

    def applies_to(self, request: HttpRequest) -> bool:
        """Return whether a request has, or needs, a key. With routes, every request that matches them needs one."""
        if not self.is_handled_method(request.method):
            return False
        return bool(request.keys) if self.routes is None else matches(self.routes, request.path)

    def find_principal(self, request: HttpRequest, raw: Environ) -> str:
        """Return the principal of a request. The function `principal` gets `raw`.

        Raises:
            ProblemResponse: the request has no principal.
            TypeError: `principal` did not return a str or None.
        """
        found: object = None
        if self.principal is not None:
            found = self.principal(raw)
        elif request.credentials:
            found = _compute_digest(*request.credentials)
        if found is None or found == "":
            raise ProblemResponse(PRINCIPAL_MISSING)
        if not isinstance(found, str):
            if inspect.iscoroutine(found):
                found.close()
            raise TypeError(f"principal must return a str or None, not {type(found).__name__}")
        return found

    def read_key(self, request: HttpRequest) -> str:
        """Return the key of a request.

        Raises:
            ProblemResponse: the request has no usable key, or its announced body is too long.
        """
        try:
            key = parse_key(request.keys)
        except UnusableKeyError as error:
            raise ProblemResponse(error.problem, str(error)) from None
        self.check_length(request.length or 0)
        return key

    def check_length(self, length: int) -> None:
        """Raise an error if a body is longer than allowed.

        Raises:
            ProblemResponse: the body is too long.
        """
        if length > self.max_body:
            detail = f"The body of a request with an Idempotency-Key must not be longer than {self.max_body} bytes."
            raise ProblemResponse(BODY_TOO_LARGE, detail)

    def build_effect_key(self, request: HttpRequest, owner: str, key: str, body: bytes) -> EffectKey:
        """Return the key of a request together with everything that identifies the request."""
        method, path = request.method.encode(), _encode(request.root + request.path)
        scope = f"{request.method} {quote(path)[:SHOWN]} {_compute_digest(owner.encode('utf-8', 'surrogatepass'), method, path)}"
        same = sha256(_join_framed(method, path, request.query, request.content_type, body))
        return EffectKey(scope, key, same.digest(), self.ttl, self.keep)

    def is_streaming(self, headers: Sequence[tuple[str, str]]) -> bool:
        """Return whether the headers of a response indicate that it is sent as it is produced, and not stored."""
        kind = _find_header(headers, "content-type").strip().lower()
        return (find_length(headers) or 0) > self.max_body or kind.startswith("text/event-stream")

    def build_record(self, status: int, headers: Sequence[tuple[str, str]], body: bytes | None) -> Reply | None:
        """Return the response in the form in which it is stored, or None if the request failed or should be sent again.

        `body` is None if the response was sent as it was produced.
        """
        again = status in _AGAIN or (status >= 400 and any(name.lower() == "retry-after" for name, _ in headers))
        if again or status >= self.record_below:
            return None
        if body is None or not all(_STORABLE.fullmatch(part) for pair in headers for part in pair):
            return UNRECORDABLE
        return Reply(status, select_headers(headers), body)


def find_length(headers: Sequence[tuple[str, str]]) -> int | None:
    """Return the length that the headers of a response announce, or None."""
    return parse_length(_find_header(headers, "content-length"))


def _find_header(headers: Sequence[tuple[str, str]], name: str) -> str:
    return {header.lower(): value for header, value in headers}.get(name, "")


def parse_length(value: str) -> int | None:
    """Return the value of a `Content-Length` header, or None if it is not a number."""
    if not (value.isascii() and value.isdecimal()):
        return None
    return int(value) if len(value) < _DIGITS else sys.maxsize


def _check_methods(methods: Collection[str]) -> frozenset[str]:
    if isinstance(methods, str):
        raise TypeError(f"methods must be a collection of methods: pass methods=[{methods!r}]")
    found = frozenset(str(method).upper() for method in methods)
    if not found:
        raise ValueError("methods=[] would apply to no request: pass at least one method, such as 'POST'")
    for method in found:
        if not _TOKEN.fullmatch(method):
            raise ValueError(f"{method!r} is not an HTTP method")
        if method in _SAFE:
            raise ValueError(f"methods must not contain {method!r}: such requests change nothing, so they need no key")
    return found


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _join_framed(*parts: bytes) -> bytes:
    """Join parts so that different parts never result in the same bytes."""
    return b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def _compute_digest(*parts: bytes) -> str:
    return sha256(_join_framed(*parts)).hexdigest()


def select_headers(headers: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return the headers of a replay, without those of the connection, `Set-Cookie`, `Date` and `Server`."""
    named = {
        name.strip().lower() for header, value in headers if header.lower() == "connection" for name in value.split(",")
    }
    return tuple(pair for pair in headers if pair[0].lower() not in _DROPPED | named)
