"""Add the problems of pgfence and the header of its middleware to the OpenAPI document of a FastAPI application."""

from __future__ import annotations

import inspect
from collections import defaultdict
from http import HTTPMethod
from typing import TYPE_CHECKING, Any

from pgfence._http.dependants import walk_parts
from pgfence._http.problems import (
    BODY_INCOMPLETE,
    BODY_TOO_LARGE,
    KEY_FAILED,
    KEY_INVALID,
    KEY_MISSING,
    KEY_REPEATED,
    MEDIA_TYPE,
    NAME_INVALID,
    NOT_CLAIMED,
    NOT_RECORDED,
    OF_ERRORS,
    OUTCOME_UNKNOWN,
    PAYLOAD_INVALID,
    PRECONDITION_FAILED,
    PRINCIPAL_MISSING,
    choose_phrase,
)
from pgfence._http.routes import compile_routes, matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fastapi import FastAPI
    from fastapi.dependencies.models import Dependant
    from starlette.routing import BaseRoute

    from pgfence._http.problems import Problem

    Operation = dict[str, Any]
    """A part of the document."""

HEADER = "Idempotency-Key"
DESCRIPTION = (
    "A string of 1 to 255 printable ASCII characters, in double quotes, that is unique for each request. If you send the same "
    "request again, send the same key, and the request is handled only once."
)

_SCHEMA = "PgfenceProblem"
_PROBLEM = {
    "title": "Problem",
    "description": "The details of a problem (RFC 9457).",
    "type": "object",
    "required": ["title", "status", "detail", "code"],
    "properties": {
        "title": {"type": "string", "description": "The reason phrase of the status."},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What is wrong and what to do, for human readers."},
        "code": {"type": "string", "description": "A machine-readable code for the problem."},
    },
}
_AGAIN = {"description": "Seconds to wait before sending the request again.", "schema": {"type": "integer"}}
_LATER = (409, 423, 503)


def _list_errors(*names: str) -> tuple[Problem, ...]:
    return tuple(OF_ERRORS[name] for name in names)


_DATABASE = _list_errors("UnreachableError", "StandbyError")
_KEY = (
    KEY_MISSING,
    KEY_REPEATED,
    KEY_INVALID,
    *_list_errors("IdempotencyInProgressError", "IdempotencyKeyReusedError"),
)
KEY = (*_KEY, KEY_FAILED, *_list_errors("AttemptLostError"), OUTCOME_UNKNOWN, *_DATABASE)
"""The problems of operations that get their key as a str."""
ONCE = (*_KEY, PRINCIPAL_MISSING, PAYLOAD_INVALID, *_list_errors("DeadlockError", "CapacityError"), *_DATABASE)
"""The problems of operations whose effect and key are in one transaction."""
LOCK = (NAME_INVALID, *_list_errors("LockTimeoutError", "DeadlockError", "CapacityError"), *_DATABASE)
"""The problems of operations that begin with a lock."""
_VERSION = (*_list_errors("VersionConflictError", "VersionRequiredError"), PRECONDITION_FAILED)
_MIDDLEWARE = (
    *_KEY,
    PRINCIPAL_MISSING,
    BODY_INCOMPLETE,
    BODY_TOO_LARGE,
    KEY_FAILED,
    *_list_errors("AttemptLostError"),
    NOT_RECORDED,
    NOT_CLAIMED,
    *_DATABASE,
)


def describe(
    app: FastAPI,
    all_of: Callable[[list[BaseRoute]], Iterable[BaseRoute]],
    problems_of: Callable[[object], Iterable[Problem]],
) -> None:
    """Add the problems of pgfence to an application's OpenAPI document.

    `all_of` returns the routes, including those of included routers with what the inclusion adds, and `problems_of` the problems
    with which a dependency may respond.
    """
    original = app.openapi
    done: list[object] = [None]

    def openapi() -> Operation:
        document = original()  # FastAPI caches the document, and builds a new document if routes have been added
        if document is not done[0]:
            for path, method, operation, dependant in _find_operations(all_of(app.routes), document):
                problems = [one for part in walk_parts(dependant) for one in problems_of(part.call)]
                problems += _find_version_problems(operation)
                problems += _find_middleware_problems(app, path, method, operation)
                _add(document, operation, problems)
            done[0] = document
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def _find_operations(
    routes: Iterable[BaseRoute], document: Operation
) -> Iterator[tuple[str, str, Operation, Dependant]]:
    """Yield the path, method, description and dependant of each operation in the document."""
    for route in routes:
        path, dependant = getattr(route, "path_format", None), getattr(route, "dependant", None)
        methods = getattr(route, "methods", None) or ()
        for method in HTTPMethod:
            operation = document.get("paths", {}).get(path, {}).get(method.lower())
            if operation is not None and method in methods and dependant is not None:
                yield str(path), method, operation, dependant


def _find_version_problems(operation: Operation) -> tuple[Problem, ...]:
    headers = {one["name"].lower() for one in operation.get("parameters", ()) if one.get("in") == "header"}
    return _VERSION if "if-match" in headers else ()


def _find_middleware_problems(app: FastAPI, path: str, method: str, operation: Operation) -> Iterable[Problem]:
    """Yield the problems of a middleware that handles an operation, and make its header a parameter of the operation."""
    for one in app.user_middleware:
        if not any(kind.__module__ == "pgfence.asgi" for kind in getattr(one.cls, "__mro__", ())):
            continue
        given = inspect.signature(one.cls).bind_partial(None, *one.args, **one.kwargs)
        given.apply_defaults()
        routes, methods = given.arguments["routes"], given.arguments["methods"]
        if method not in {name.upper() for name in methods} or not (
            routes is None or matches(compile_routes(routes), path)
        ):
            continue
        _require_key(operation, required=routes is not None)
        yield from (problem for problem in _MIDDLEWARE if routes is not None or problem is not KEY_MISSING)


def _require_key(operation: Operation, *, required: bool) -> None:
    parameters: list[Operation] = operation.setdefault("parameters", [])
    for one in parameters:
        if one.get("in") == "header" and one["name"].lower() == HEADER.lower():
            one["required"] = required or one.get("required", False)
            return
    schema = {"type": "string"}
    parameters.append(
        {"name": HEADER, "in": "header", "required": required, "schema": schema, "description": DESCRIPTION}
    )


def _add(document: Operation, operation: Operation, problems: Iterable[Problem]) -> None:
    by_status: dict[int, dict[str, Problem]] = defaultdict(dict)
    for one in problems:
        by_status[one.status][one.code] = one
    for status in sorted(by_status):
        response = operation["responses"].setdefault(str(status), {"description": choose_phrase(status)})
        response.setdefault("content", {}).setdefault(
            MEDIA_TYPE,
            {
                "schema": {"$ref": f"#/components/schemas/{_SCHEMA}"},
                "examples": {code: {"value": one.document()} for code, one in by_status[status].items()},
            },
        )
        if status in _LATER:
            response.setdefault("headers", {}).setdefault("Retry-After", _AGAIN)
    if by_status:
        document.setdefault("components", {}).setdefault("schemas", {}).setdefault(_SCHEMA, _PROBLEM)
