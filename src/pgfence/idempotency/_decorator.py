"""`idempotent_call`: functions that run once for each key, which their arguments name."""

from __future__ import annotations

import functools
import inspect
import re
import string
import sys
import warnings
from types import SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pgfence._api.decorators import compile_templates
from pgfence._api.inputs import ASYNCIO, DAY, ORM, describe_function, find_loaded_classes, reject_generator
from pgfence._values.codec import Codec
from pgfence.idempotency._functions import idempotent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pgfence._process.clock import Seconds

P = ParamSpec("P")
R = TypeVar("R")

_SESSION = re.compile(r"\b(?:Session|AsyncSession|scoped_session|async_scoped_session)\b")


class _RequiredFields(string.Formatter):
    """`str.format`, where no field may be None: it would be one key for all calls that have no value of their own."""

    def get_field(self, field_name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, str]:
        found: tuple[object, str] = super().get_field(field_name, args, kwargs)
        if found[0] is None:
            raise ValueError(f"{{{field_name}}} of the key or the scope is None: a call without it has no key")
        return found


class SameCall(Protocol):
    """What `idempotent_call` returns: a decorator that keeps the signature."""

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]: ...


def idempotent_call(
    *,
    key: str,
    scope: str,
    payload: Sequence[str] | None = None,
    timeout: Seconds | None = None,
    keep: Seconds = DAY,
    record: Sequence[type[Exception]] = (),
) -> SameCall:
    """Make of a function one whose work is done once for each key; see `idempotent`, whose promises are these.

    ::

        @idempotent_call(key="{event_id}", scope="webhook:orders")
        def webhook(session: Session, event_id: str, amount: int) -> bool: ...

    The session is the one argument that is annotated as a session; the result is of the type that the function is annotated to
    return. It runs in the session's transaction, and the caller commits.

    Args:
        key: a `str.format` template for the call's arguments. Put between two fields what neither of them contains.
        scope: likewise.
        payload: names of the arguments that make two calls with the same key the same call; None compares nothing.
        timeout: as for `idempotent`.
        keep: likewise.
        record: likewise.

    Raises:
        TypeError: at the decoration: there is not one session among the arguments; the function is a generator function; `payload`
            is a text; or what it is annotated to return cannot be stored, which a call says where it is not defined yet.
        ValueError: at the decoration: a field of a template, or a name in `payload`, is no argument. From a call: a field of a
            template is None.
        PgfenceError: from a call, as `idempotent`.
    """
    return _Decorator(key, scope, payload, {"timeout": timeout, "keep": keep, "record": record})


class _Decorator:
    """What `idempotent_call` returns. One that decorates nothing warns when it is dropped."""

    def __init__(self, key: str, scope: str, payload: Sequence[str] | None, options: Mapping[str, object]) -> None:
        self._arguments = key, scope, payload, options
        self._used = False

    def __call__(self, fn: Callable[P, R], /) -> Callable[P, R]:
        self._used = True
        calls = _CallTemplate(fn, *self._arguments)
        if inspect.iscoroutinefunction(fn):

            @functools.wraps(fn)
            async def run_async(*args: P.args, **kwargs: P.kwargs) -> object:
                return await calls.build_key(args, kwargs).run(functools.partial(fn, *args, **kwargs))

            return cast("Callable[P, R]", run_async)

        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            value: R = calls.build_key(args, kwargs).run(functools.partial(fn, *args, **kwargs))
            return value

        return run

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            warnings.warn(
                f"idempotent_call(key={self._arguments[0]!r}, ...) decorates no function. Write @idempotent_call(...) in front of"
                " the function",
                RuntimeWarning,
                stacklevel=2,
            )


class _CallTemplate:
    """How the key of a call of one function is built from its arguments."""

    def __init__(
        self,
        fn: Callable[..., object],
        key: str,
        scope: str,
        payload: Sequence[str] | None,
        options: Mapping[str, object],
    ) -> None:
        reject_generator(fn)
        if isinstance(payload, str):
            raise TypeError(f"payload is a list of names: [{payload!r}]")
        hints, unknown = _resolve_hints(fn)
        self._signature = inspect.signature(fn)
        self._session = _find_session(fn, self._signature, hints)
        self._options: dict[str, Any] = {**options, "result": hints.get("return")}
        self._late = fn if "return" in unknown else None
        Codec.of(self._options["result"])
        if strangers := set(payload or ()) - set(self._signature.parameters):
            raise ValueError(
                f"payload names {sorted(strangers)}, and {describe_function(fn)} has ({', '.join(self._signature.parameters)})"
            )
        self._payload = payload
        self._plain = key, scope
        self._naming = compile_templates((key, scope), fn, _RequiredFields().format)

    def build_key(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Return the key of one call, in the transaction of its session."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        named = self._plain if self._naming is None else tuple(map(str, self._naming(args, kwargs)))
        payload = None if self._payload is None else {name: values[name] for name in self._payload}
        if self._late is not None:  # what it names may be there by now
            self._options["result"] = _resolve_hints(self._late)[0].get("return")
        return idempotent(values[self._session], named[0], scope=named[1], payload=payload, **self._options)


def _resolve_hints(fn: Callable[..., object]) -> tuple[dict[str, object], set[str]]:
    """Return the annotations, and the names of those that are texts still, for they name what is not known, or not yet."""
    found: dict[str, object] = {}
    unknown = set()
    for name, annotation in getattr(fn, "__annotations__", {}).items():
        one = SimpleNamespace(__annotations__={name: annotation})
        try:
            found |= get_type_hints(one, getattr(fn, "__globals__", {}))
        except NameError:
            found[name] = annotation
            unknown.add(name)
    return found, unknown


def _find_session(fn: Callable[..., object], signature: inspect.Signature, hints: dict[str, object]) -> str:
    found = [name for name in signature.parameters if _is_session(hints.get(name))]
    if len(found) != 1:
        told = " and ".join(found) if found else "none"
        raise TypeError(
            f"{describe_function(fn)} needs one argument that is annotated as a Session or AsyncSession, whose transaction the work"
            f" belongs to; it has {told}"
        )
    return found[0]


def _is_session(annotation: object) -> bool:
    if isinstance(annotation, str):
        return bool(_SESSION.search(annotation))
    classes = (
        *find_loaded_classes(ORM, "Session", "scoped_session"),
        *find_loaded_classes(ASYNCIO, "AsyncSession", "async_scoped_session"),
    )
    kind = get_origin(annotation) or annotation
    if kind in (Union, UnionType):
        return any(_is_session(one) for one in get_args(annotation))
    return isinstance(kind, type) and issubclass(kind, classes)
