"""Read what FastAPI knows about the dependencies of an endpoint."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastapi._compat import ModelField
    from fastapi.dependencies.models import Dependant

    from pgfence._http.rules import Environ


def check_root(scope: Environ, session: Callable[..., object]) -> Dependant:
    """Return the dependant of a request, and check that all of its parts get the same session.

    FastAPI creates a session for each scope in which a dependency requests a session, and a further session for each use without
    its cache. If the session depends on a security scheme, FastAPI also creates one for each set of scopes of `Security`.

    Raises:
        TypeError: a part would get another session, or the endpoint is a generator, which FastAPI runs after the session has ended.
    """
    root = _find_root(scope)
    if _is_generator(root.call):
        raise TypeError(
            f"the endpoint of {scope['path']!r} is a generator, so its session would end before the generator begins. Return"
            " the result instead"
        )
    asked = [one for one in walk_parts(root) if one.call == session]
    for one in asked:
        if one.scope != "function" or not one.use_cache:
            how = 'without scope="function"' if one.scope != "function" else "with use_cache=False"
            raise TypeError(
                f"the endpoint of {scope['path']!r} also requests its session {how}, so it would get two sessions. Write"
                ' Depends(..., scope="function") wherever the session is requested'
            )
    if len({_cache_key_of(one) for one in asked}) > 1:
        raise TypeError(
            f"the endpoint of {scope['path']!r} also requests its session under Security(scopes=...), so it would get two"
            " sessions. Request the session outside Security()"
        )
    return root


def _cache_key_of(one: Dependant) -> object:
    """Return the key under which FastAPI caches a dependency's result.

    Newer versions of FastAPI compute the key with a function.
    """
    find = getattr(sys.modules[type(one).__module__], "_get_cache_key", None)
    return getattr(one, "cache_key", None) if find is None else find(dependant=one)


def _is_generator(endpoint: Callable[..., object] | None) -> bool:
    bare = inspect.unwrap(cast("Callable[..., object]", endpoint.func if isinstance(endpoint, partial) else endpoint))
    ways = (endpoint, bare, inspect.unwrap(type(bare).__call__))
    return any(inspect.isgeneratorfunction(way) or inspect.isasyncgenfunction(way) for way in ways)


def _find_root(scope: Environ) -> Dependant:
    route = scope["route"]
    # Older versions of FastAPI write the additions of an included router into the route. Newer versions store them separately.
    included = scope.get("fastapi", {}).get("effective_route_context")
    found: Dependant = (included if getattr(included, "original_route", None) is route else route).dependant
    return found


def walk_parts(root: Dependant) -> Iterator[Dependant]:
    """Yield a dependant and everything that it depends on."""
    yield root
    for one in root.dependencies:
        yield from walk_parts(one)


def find_parameter(root: Dependant, field: str) -> ModelField:
    """Return the field that validates a parameter of the path.

    Raises:
        TypeError: no parameter has this name.
    """
    for part in walk_parts(root):
        for one in part.path_params:
            if one.alias == field:
                return one
    raise TypeError(
        f"the field {{{field}}} in a name of Locked is not a path parameter that the endpoint or one of its dependencies declares"
    )


def build_signature(**wanted: object) -> inspect.Signature:
    """Return a signature from which FastAPI reads parameters: classes become annotations, and other values become defaults."""
    one = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    return inspect.Signature(
        [
            one(name, annotation=what) if isinstance(what, type) else one(name, default=what)
            for name, what in wanted.items()
        ]
    )
