"""FastAPI dependencies that work in the endpoint's transaction, and responses for pgfence errors.

`session=` takes the application's own dependency that provides the session. Every part of a request that uses the session must
depend on it with `scope="function"`. Otherwise, a dependency with `yield` commits after the client has received the response.
With `scope="function"`, FastAPI creates one session for all parts.
"""

from __future__ import annotations

import inspect
import logging
from enum import Enum
from functools import partial
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, overload
from urllib.parse import quote

from fastapi import Depends, Header, HTTPException, Request, Response, WebSocket, routing
from fastapi.exceptions import RequestValidationError

from pgfence._api.inputs import is_async_session
from pgfence._http import openapi
from pgfence._http.dependants import build_signature, check_root, find_parameter
from pgfence._http.endpoint import build_scope, is_on_loop, read_payload, wait_in_thread
from pgfence._http.exchange import RequestMarker
from pgfence._http.problems import (
    MEDIA_TYPE,
    NAME_INVALID,
    OUTCOME_UNKNOWN,
    PAYLOAD_INVALID,
    PRINCIPAL_MISSING,
    problem_of,
    retry_headers,
)
from pgfence._http.rules import UnusableKeyError, parse_key
from pgfence._values.codec import Codec
from pgfence.errors import PgfenceError
from pgfence.idempotency import AsyncIdem, Idem, idempotent
from pgfence.transaction import AsyncTransactionLock, TransactionLock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from fastapi import FastAPI
    from fastapi.dependencies.models import Dependant

    from pgfence._http.problems import Problem
    from pgfence._process.clock import Seconds
    from pgfence.effects._claim import Reply

__all__ = ["Idempotent", "IdempotentCall", "Locked", "idempotency_key", "install_error_handlers"]

T = TypeVar("T")
log = logging.getLogger("pgfence.fastapi")


def install_error_handlers(app: FastAPI) -> None:
    """Turn each pgfence error into a problem response (RFC 9457), and describe these responses in the OpenAPI document.

    The response is `application/problem+json`, with the `http_status` of the error, a `code` for programs and a `detail` for
    people. The section "Problems" of the HTTP reference lists all codes. `Retry-After` is sent if a retry may help, that
    is, for each error that is `retryable`, and for an AttemptLostError whose attempt has lost its claim. Such a response is not
    stored by an `IdempotencyMiddleware`. The message of the error, which may name keys and holders, is not sent but logged to
    `pgfence.fastapi`. If the status is 500 or above, it is logged at ERROR with its traceback. In a WebSocket, the error
    propagates. Call this function for each mounted application too, because it needs its own handlers.

    The OpenAPI document lists these problems for the operations that use `idempotency_key`, `Idempotent` or `Locked`, that an
    `IdempotencyMiddleware` of the application handles, or that have a header `If-Match`. It also describes the request header
    that the middleware reads.
    """
    app.add_exception_handler(PgfenceError, _answer)  # type: ignore[arg-type]
    app.add_exception_handler(_Refused, _refuse)  # type: ignore[arg-type]
    # Newer versions of FastAPI store the additions of an included router separately from the route.
    openapi.describe(app, getattr(routing, "iter_route_contexts", iter), _problems_of)


def _problems_of(dependency: object) -> tuple[Problem, ...]:
    if isinstance(dependency, Idempotent):
        return openapi.ONCE
    if isinstance(dependency, Locked):
        return openapi.LOCK
    return openapi.KEY if dependency is idempotency_key else ()


class _Refused(HTTPException):
    """A request that does not reach its endpoint. Without `install_error_handlers`, FastAPI's response to it has no code."""

    def __init__(self, problem: Problem, detail: str | None = None) -> None:
        super().__init__(problem.status, detail or problem.detail, {"content-type": MEDIA_TYPE})
        self.problem = problem


async def _answer(asked: Request | WebSocket, error: PgfenceError) -> Response:
    if isinstance(asked, WebSocket):
        raise error
    status = error.http_status
    level, trace = (logging.ERROR, error) if status >= 500 else (logging.INFO, None)
    log.log(level, "%s %s: %s", asked.method, quote(asked.scope["path"], errors="replace"), error, exc_info=trace)
    if (problem := problem_of(error)) is OUTCOME_UNKNOWN:
        RequestMarker.skip_recording(asked.scope)
    return _build_response(problem.reply(None, *retry_headers(error).items()))


async def _refuse(asked: Request | WebSocket, error: _Refused) -> Response:
    if isinstance(asked, WebSocket):
        raise error
    return _build_response(error.problem.reply(error.detail))


def _build_response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, dict(reply.headers))


async def _check_key(request: Request) -> str:
    try:
        return parse_key(request.headers.getlist(openapi.HEADER))
    except UnusableKeyError as error:
        raise _Refused(error.problem, str(error)) from error


async def idempotency_key(request: Request, **_: object) -> str:
    """Return the key of a request. Use it as a dependency, `Depends(idempotency_key)`. Quotes around the key make no difference.

    The OpenAPI document declares the header as required.

    Raises:
        HTTPException: 400, if the header `Idempotency-Key` is missing, repeated, malformed or too long.
    """
    return await _check_key(request)


async def _as_documented(
    request: Request,
    usable: Annotated[str, Depends(_check_key)],
    header: Annotated[str, Header(alias=openapi.HEADER, description=openapi.DESCRIPTION)],
) -> str:
    raise NotImplementedError


# FastAPI reads this signature and declares the header as required in its OpenAPI document. pgfence checks the header before
# FastAPI does, because FastAPI would respond with 422 to a missing header.
idempotency_key.__signature__ = inspect.signature(_as_documented)  # type: ignore[attr-defined]


class Locked:
    """A dependency that acquires a transaction lock before the endpoint begins.

    The lock is held until the endpoint's transaction ends.

    Write `Depends(Locked("account:{account_id}", session=get_session), scope="function")` in the decorator or as a parameter.
    Dependencies in the decorator run first, in the order of the list, so put authentication before this one. With
    `install_error_handlers`, a timeout results in status 423. `Locked` cannot be used for a WebSocket. See `TransactionLock` for
    the guarantees.

    Args:
        names: names in which a field in braces is a path parameter, converted as declared. If `account_id` is declared as `int`,
            the path value 007 locks `account:7`. A `Decimal` keeps its trailing zeros, so 1.5 and 1.50 are different locks.
        session: the dependency that provides the endpoint's Session or AsyncSession.
        timeout: seconds to wait; None means the configured default.

    Raises:
        ValueError: no name was given, or a field is not just the name of a parameter.
        TypeError: for a request, if a field is not declared as a parameter, if the endpoint is a generator, or if a dependency
            requests the session without `scope="function"`, with `use_cache=False`, or under other scopes of `Security`, so
            that there would be two sessions.
        HTTPException, RequestValidationError: for a request, if a path parameter cannot be used in a lock name, or is not of its
            declared type; both result in a 422.
        PgfenceError: for a request, the same errors as `TransactionLock.acquire`.
    """

    def __init__(self, *names: str, session: Callable[..., Any], timeout: Seconds | None = None) -> None:
        self._fields = {field for name in names for _, field, _, _ in Formatter().parse(name) if field is not None}
        if not names:
            raise ValueError("Locked needs at least one name")
        if bad := sorted(field for field in self._fields if not field.isidentifier()):
            raise ValueError(
                f"a field in a name of Locked must be just the name of a path parameter, not {', '.join(map(repr, bad))}"
            )
        self._names, self._session, self._timeout = names, session, timeout
        self.__signature__ = build_signature(request=Request, session=Depends(session, scope="function"))

    async def __call__(self, *, request: Request, session: Any) -> None:
        """Acquire the lock. FastAPI calls this method."""
        root = check_root(request.scope, self._session)
        values = {field: _parse_value(root, field, request.path_params) for field in self._fields}
        names = [name.format(**values) for name in self._names]
        try:
            if is_async_session(session):
                lock: AsyncTransactionLock | TransactionLock = AsyncTransactionLock(session, *names)
            else:
                lock = TransactionLock(session, *names)
        except ValueError as error:
            raise _Refused(
                NAME_INVALID, f"A parameter of the path cannot be part of the name of a lock: {error}."
            ) from error
        if isinstance(lock, AsyncTransactionLock):
            await lock.acquire(timeout=self._timeout)
        else:
            await wait_in_thread(partial(lock.acquire, timeout=self._timeout))


class IdempotentCall(Generic[T]):
    """The idempotency key of a request, under which the endpoint does its work."""

    def __init__(self, once: Idem[T] | AsyncIdem[T], response: Response) -> None:
        once._used = True  # an endpoint may return 404 without calling `run`
        self._once = once
        self._build_response = response
        self._ended = False

    @overload
    def run(self, fn: Callable[[], Awaitable[T]], /) -> Coroutine[Any, Any, T]: ...
    @overload
    def run(self, fn: Callable[[], T], /) -> T: ...
    def run(self, fn: Callable[[], Any], /) -> Any:
        """Do the work, or return its stored result and set the header `Idempotent-Replayed: true`.

        The status and the headers are not stored, so set them outside `fn`. If the endpoint returns its own Response, copy the
        header from FastAPI's `response` parameter: `JSONResponse(value, headers=dict(response.headers))`.

        Args:
            fn: the function that does the work in the session's transaction. With an AsyncSession, pass a coroutine function and
                await the result.

        Raises:
            TypeError: `run` was called with a Session on an event loop, where waiting would block the commit of the request that
                has claimed the key; or `fn` is a coroutine function although the session is a Session, or the reverse; or the
                endpoint has returned, so that nothing would commit the work. A background task and the content of a
                StreamingResponse run after that.
            PgfenceError: the same errors as `idempotent`.
        """
        if self._ended:
            raise TypeError(
                "run() was called after the endpoint had returned, so its transaction has ended, and nothing would commit the work:"
                " call it in the endpoint, not in a background task or a StreamingResponse"
            )
        if isinstance(self._once, AsyncIdem):
            return self._run_async(self._once, fn)
        if is_on_loop():
            raise TypeError("run() with a Session would block the event loop: an async endpoint needs an AsyncSession")
        return self._mark_replayed(self._once.run(fn))

    async def _run_async(self, once: AsyncIdem[T], fn: Callable[[], Awaitable[T]]) -> T:
        return self._mark_replayed(await once.run(fn))

    def _end(self) -> None:
        self._ended = True

    def _mark_replayed(self, value: T) -> T:
        if self._once._op is not None and self._once._op.replayed:
            self._build_response.headers["Idempotent-Replayed"] = "true"
        return value


class Idempotent(Generic[T]):
    """A dependency that handles the `Idempotency-Key` of a request in the endpoint's transaction; see `idempotent`.

    `Depends(Idempotent(session=get_session, principal=user_id, result=PayOut), scope="function")` provides an
    `IdempotentCall[PayOut]`.

    Guarantees: a request without exactly one usable key, or without a principal, gets a 400. A key belongs to one principal,
    method and path. For a request with the same key and another query or body, `run` raises IdempotencyKeyReusedError (422). JSON
    and forms are compared by content, and other bodies byte for byte.

    Limitations: nothing happens unless the endpoint calls `run`. The body is compared as the client sent it, before it is
    validated: a price of `"10.0"` differs from `"10.00"`, and an omitted member from its default. If clients may vary the body in
    this way, call `idempotent` with the validated model as `payload`, which compares the values.

    Args:
        session: the dependency that provides the endpoint's Session or AsyncSession.
        principal: a dependency that returns who sent the request, as a non-empty str. Convert a number with `str()`. The
            principal must be unique among all applications that share the tables, and must never be a constant.
        result: the type of the result.

    Raises:
        TypeError: a result of the type `result` cannot be stored; or, for a request, the endpoint is a generator, a dependency
            would get another session (see `Locked`), or the principal is not a str.
        HTTPException: for a request, 400 if it has no usable key or no principal, or if its body cannot be compared, because it
            contains NaN or an infinity or is nested too deeply.
        RuntimeError: for a request whose body was read with `request.stream()` before this dependency runs.
    """

    def __init__(self, *, session: Callable[..., Any], principal: Callable[..., str], result: type[T]) -> None:
        Codec.of(result)
        self._session, self._result = session, result
        asked = {"session": Depends(session, scope="function"), "principal": Depends(principal)}
        self.__signature__ = build_signature(request=Request, response=Response, **asked, key=Depends(idempotency_key))

    async def __call__(
        self, *, request: Request, response: Response, session: Any, principal: str, key: str
    ) -> IdempotentCall[T]:
        """Return the `IdempotentCall` of the request. FastAPI calls this method. Only `run` accesses the database."""
        check_root(request.scope, self._session)
        payload = await read_payload(request, Request)
        try:
            scope = build_scope(request.method, request.scope["path"], principal)
        except ValueError as error:
            raise _Refused(PRINCIPAL_MISSING) from error
        try:
            once = idempotent(session, key, scope=scope, payload=payload, result=self._result)
        except ValueError as error:
            raise _Refused(PAYLOAD_INVALID) from error
        call = IdempotentCall(once, response)
        # FastAPI ends the session when the endpoint has returned, before the response and its background tasks.
        if (stack := request.scope.get("fastapi_function_astack")) is not None:
            stack.callback(call._end)
        return call


def _parse_value(root: Dependant, field: str, given: dict[str, object]) -> object:
    value, errors = find_parameter(root, field).validate(given[field], {}, loc=("path", field))
    if errors:
        raise RequestValidationError(errors)
    return value.value if isinstance(value, Enum) else value
