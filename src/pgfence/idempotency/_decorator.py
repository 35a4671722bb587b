"""`idempotent_call`: functions that run once for each key, which is built from their arguments."""

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
    """A `str.format` that rejects None, because a field that is None would give all calls without a value the same key."""

    def get_field(self, field_name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, str]:
        found: tuple[object, str] = super().get_field(field_name, args, kwargs)
        if found[0] is None:
            raise ValueError(
                f"the field {{{field_name}}} in the key or the scope is None, so this call has no key: pass a value other than None"
            )
        return found


class SameCall(Protocol):
    """The type of the decorator that `idempotent_call` returns, which keeps the signature."""

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
    """Decorate a function so that its work is done once for each key, with the guarantees of `idempotent`.

    ::

        @idempotent_call(key="{event_id}", scope="webhook:orders")
        def webhook(session: Session, event_id: str, amount: int) -> bool: ...

    The session is the one parameter that is annotated as a session. The type of the result is the return annotation. The
    function runs in the session's transaction, which the caller commits.

    Args:
        key: a `str.format` template, which is filled with the call's arguments. If the template has several fields, separate
            them with a character that none of the values contains.
        scope: a template like `key`.
        payload: the names of the arguments that must be equal in all calls with the same key. None means that nothing is
            compared.
        timeout: see `idempotent`.
        keep: see `idempotent`.
        record: see `idempotent`.

    Raises:
        TypeError: at decoration, if not exactly one parameter is a session, the function is a generator function, `payload` is a
            str, or a result of the type in the return annotation cannot be stored. If a name in the annotation is not defined
            yet, the annotation is checked at each call. At a call, if a coroutine function gets a Session, or a plain function an
            AsyncSession.
        ValueError: at decoration, if a field of a template, or a name in `payload`, is not a parameter. At a call, if a field
            of a template is None.
        Exception: at a call, the same errors as `idempotent`, also for `timeout`, `keep` and `record`, which are not checked at
            decoration.
    """
    return _Decorator(key, scope, payload, {"timeout": timeout, "keep": keep, "record": record})


class _Decorator:
    """The decorator that `idempotent_call` returns. It warns if it is garbage-collected without having decorated a function."""

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
                f"idempotent_call(key={self._arguments[0]!r}, ...) decorates no function. Write @idempotent_call(...) before the"
                " function",
                RuntimeWarning,
                stacklevel=2,
            )


class _CallTemplate:
    """Build the key of a call of one function from its arguments."""

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
            raise TypeError(f"payload must be a list of names, such as [{payload!r}], not a str")
        hints, unknown = _resolve_hints(fn)
        self._signature = inspect.signature(fn)
        self._session = _find_session(fn, self._signature, hints)
        self._options: dict[str, Any] = {**options, "result": hints.get("return")}
        self._late = fn if "return" in unknown else None
        Codec.of(self._options["result"])
        if strangers := set(payload or ()) - set(self._signature.parameters):
            raise ValueError(
                f"payload contains {sorted(strangers)}, but the parameters of {describe_function(fn)} are"
                f" ({', '.join(self._signature.parameters)})"
            )
        self._payload = payload
        self._plain = key, scope
        self._naming = compile_templates((key, scope), fn, _RequiredFields().format)

    def build_key(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Return what `idempotent` returns for one call, in the transaction of its session."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        named = self._plain if self._naming is None else tuple(map(str, self._naming(args, kwargs)))
        payload = None if self._payload is None else {name: values[name] for name in self._payload}
        if self._late is not None:  # the name in the annotation may be defined now
            self._options["result"] = _resolve_hints(self._late)[0].get("return")
        return idempotent(values[self._session], named[0], scope=named[1], payload=payload, **self._options)


def _resolve_hints(fn: Callable[..., object]) -> tuple[dict[str, object], set[str]]:
    """Return the annotations, and the names of those that are still strings because a name in them is not defined yet."""
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
        count = ", ".join(map(repr, found)) if found else "none"
        raise TypeError(
            f"{describe_function(fn)} needs exactly one parameter annotated as a Session or AsyncSession, because the work runs"
            f" in that session's transaction; it has {count}"
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
