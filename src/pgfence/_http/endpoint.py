"""Determine the scope of a request's key and its payload, and wait for a lock without blocking the event loop."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING
from urllib.parse import quote

from anyio import CapacityLimiter, create_task_group, get_current_task, to_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.datastructures import FormData, UploadFile
    from starlette.requests import Request

FORMS = ("multipart/form-data", "application/x-www-form-urlencoded")

PIECE = 2**20
"""The number of bytes of an uploaded file that are in memory at a time."""

READABLE = 160
"""The number of characters up to which a scope is stored as text, not as a digest."""


def build_scope(method: str, path: str, principal: object) -> str:
    """Return the scope of a key.

    Raises:
        ValueError: the principal is missing.
        TypeError: the principal is not a str.
    """
    if principal is None or principal == "":
        raise ValueError("an idempotency key belongs to a principal, but this request has no principal")
    if not isinstance(principal, str):
        raise TypeError(f"principal must return a str, not {type(principal).__name__}")
    text = f"{method} {quote(path)} {principal}"
    return text if len(text) <= READABLE and text.isprintable() else sha256(text.encode()).hexdigest()


def is_on_loop() -> bool:
    """Return whether an event loop runs in this thread, so that waiting would block the loop."""
    with suppress(RuntimeError):
        get_current_task()
        return True
    return False


async def wait_in_thread(wait: Callable[[], object]) -> None:
    """Wait in a separate thread. A cancelled task ends only after the wait, because its session is in use until then."""
    errors: list[Exception] = []

    def waits() -> None:
        try:
            wait()
        except Exception as error:
            errors.append(error)

    # This uses a separate limiter, because waiters that occupy the endpoints' threads would keep the request that holds the lock
    # from running. It uses a group, because `run_sync` alone abandons its thread when asyncio cancels the task.
    async with create_task_group() as group:
        group.start_soon(partial(to_thread.run_sync, waits, limiter=CapacityLimiter(1)))
    if errors:
        raise errors.pop()


async def read_payload(request: Request, reader: type[Request]) -> list[object]:
    """Return the query and the body of a request: JSON and forms by content, other bodies as bytes.

    The request can be read again afterwards. `reader` is the class Request, which this module does not import.

    Raises:
        RuntimeError: the body was read as a stream and not kept.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body: object
    try:
        raw = body = await request.body()
    except RuntimeError:
        if kind not in FORMS:  # for other types, `form()` would return an empty form, whatever was sent
            raise
        # The framework has already read the body as a form, and keeps the form.
        body = await _read_form(await request.form())
    else:
        # A body that cannot be parsed is kept as bytes, because the endpoint decides whether it is wrong or too large.
        if kind in FORMS:
            with suppress(Exception):
                async with reader(request.scope, partial(_receive, raw)).form() as form:
                    body = await _read_form(form) or body
        elif "json" in kind:
            with suppress(ValueError, RecursionError):
                body = json.loads(raw)
    # `request.url` is not used, because it is also built from the `Host` header, which may hide the query.
    return [request.scope["query_string"].decode("latin-1"), body]


async def _receive(body: bytes) -> dict[str, object]:
    return {"type": "http.request", "body": body}


async def _read_form(form: FormData) -> list[tuple[str, object]]:
    return [(name, await _read_field(value)) for name, value in form.multi_items()]


async def _read_field(value: UploadFile | str) -> object:
    if isinstance(value, str):
        return value
    await value.seek(0)  # an earlier reader may have left the file at its end
    digest = sha256()
    while piece := await value.read(PIECE):
        digest.update(piece)
    await value.seek(0)
    return [value.filename, value.content_type, digest.digest()]
