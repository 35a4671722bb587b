"""What an endpoint's dependency knows of a request: whose key it is, what makes it the same request, and when to try again."""

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
"""Bytes of a file that are in memory at a time."""

READABLE = 160
"""Characters up to which a scope is stored as it is, and not as a digest."""


def build_scope(method: str, path: str, principal: object) -> str:
    """Return the scope of a key.

    Raises:
        ValueError: there is no principal.
        TypeError: it is no str.
    """
    if principal is None or principal == "":
        raise ValueError("an idempotency key belongs to a principal, and this request has none")
    if not isinstance(principal, str):
        raise TypeError(f"principal must return a str, not {type(principal).__name__}")
    text = f"{method} {quote(path)} {principal}"
    return text if len(text) <= READABLE and text.isprintable() else sha256(text.encode()).hexdigest()


def is_on_loop() -> bool:
    """Return whether an event loop runs in this thread, which waiting would block."""
    with suppress(RuntimeError):
        get_current_task()
        return True
    return False


async def wait_in_thread(wait: Callable[[], object]) -> None:
    """Wait in a separate thread. A cancelled task ends only when the wait has ended, because its session is in use until then."""
    errors: list[Exception] = []

    def waits() -> None:
        try:
            wait()
        except Exception as error:
            errors.append(error)

    # A separate limiter: waiters that take the endpoints' threads would keep the request that holds the lock from running. In a
    # group, because a lone `run_sync` abandons its thread when asyncio cancels the task.
    async with create_task_group() as group:
        group.start_soon(partial(to_thread.run_sync, waits, limiter=CapacityLimiter(1)))
    if errors:
        raise errors.pop()


async def read_payload(request: Request, reader: type[Request]) -> list[object]:
    """Return the query and the body of a request: JSON and forms as what they say, other bodies as they are.

    Args:
        request: the Request of Starlette that the endpoint gets, or may have; it can be read afterwards as before.
        reader: makes another one, of its scope and what receives.

    Raises:
        RuntimeError: the body was read as a stream and not kept.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body: object
    try:
        raw = body = await request.body()
    except RuntimeError:
        if kind not in FORMS:  # to Starlette it is an empty form then, whatever was sent
            raise
        # The framework has read it as a form, and keeps that.
        body = await _read_form(await request.form())
    else:
        # What cannot be read stays as it is: whether it is wrong, and how large it may be, is the endpoint's to say.
        if kind in FORMS:
            with suppress(Exception):
                async with reader(request.scope, partial(_receive, raw)).form() as form:
                    body = await _read_form(form) or body
        elif "json" in kind:
            with suppress(ValueError, RecursionError):
                body = json.loads(raw)
    # Not of `request.url`, which is made of the header `Host` too: that may hide the query.
    return [request.scope["query_string"].decode("latin-1"), body]


async def _receive(body: bytes) -> dict[str, object]:
    return {"type": "http.request", "body": body}


async def _read_form(form: FormData) -> list[tuple[str, object]]:
    return [(name, await _read_field(value)) for name, value in form.multi_items()]


async def _read_field(value: UploadFile | str) -> object:
    if isinstance(value, str):
        return value
    await value.seek(0)  # an earlier reader may have left it at its end
    digest = sha256()
    while piece := await value.read(PIECE):
        digest.update(piece)
    await value.seek(0)
    return [value.filename, value.content_type, digest.digest()]
