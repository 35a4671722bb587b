"""The public surface: what `pgfence` exports, that each name is documented, and every signature as text.

A change of `tests/public_api.txt` shows in review. Write it anew with `python tests/test_public_surface.py --write`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar, get_overloads

import pytest

import pgfence
from pgfence._api.misuse import Absent, Guided
from pgfence_alembic import Directives
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Iterator

LISTING = Path(__file__).with_name("public_api.txt")
# What a user imports. The other modules without an underscore are rooms of the house, reached through `pgfence`.
MODULES = (
    "pgfence",
    "pgfence.asgi",
    "pgfence.compat",
    "pgfence.embedded",
    "pgfence.fastapi",
    "pgfence.migrations",
    "pgfence.migrations.operations",
    "pgfence.monitoring",
    "pgfence.schema",
    "pgfence.telemetry",
    "pgfence.testing",
    "pgfence.wsgi",
)
# Made by the locks, or a fixture, alone: their constructors are no part of the surface.
HANDLES = {
    "AsyncAttempt",
    "AsyncFencedHeld",
    "AsyncHeld",
    "AsyncHeldLease",
    "AsyncIdem",
    "AsyncSlot",
    "Attempt",
    "FencedHeld",
    "Held",
    "HeldLease",
    "Idem",
    "IdempotentCall",
    "Op",
    "PgfenceFaults",
    "Slot",
}
MAGIC = ("__enter__", "__exit__", "__aenter__", "__aexit__", "__call__")


def exported(module: ModuleType) -> dict[str, object]:
    return {name: getattr(module, name) for name in module.__all__}


def is_public(name: str) -> bool:
    return not name.startswith("_") or name in MAGIC


def members(cls: type) -> Iterator[tuple[str, object]]:
    """Yield the public members that a class defines itself or inherits from a class of pgfence."""
    # What Guided has is there to be refused with the right form in the message.
    ours = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == "pgfence" and base is not Guided]
    for name in sorted({name for base in ours for name in vars(base) if is_public(name)}):
        value = next(vars(base)[name] for base in ours if name in vars(base))
        if not isinstance(value, Absent):
            yield name, value


class _Bare(str):
    """An annotation that prints as it was written, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def shown(path: str, function: object) -> Iterator[str]:
    """Yield a line for each signature a caller may use: the overloads where there are some."""
    assert inspect.isfunction(function), path
    kind = "async " if inspect.iscoroutinefunction(function) else ""
    for shape in get_overloads(function) or [function]:
        signature = inspect.signature(shape)
        parameters = [p.replace(annotation=_bare(p.annotation)) for p in signature.parameters.values()]
        yield f"{kind}{path}{signature.replace(parameters=parameters, return_annotation=_bare(signature.return_annotation))}"


def _bare(annotation: object) -> object:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def describe_member(path: str, value: object) -> Iterator[str]:
    if isinstance(value, property):
        yield f"{path}: {inspect.signature(value.fget).return_annotation}"
    elif isinstance(value, staticmethod | classmethod):
        yield from shown(path, value.__func__)
    elif inspect.isfunction(value):
        yield from shown(path, value)
    elif not inspect.ismemberdescriptor(value):
        # A descriptor of SQLAlchemy's says nothing but its address.
        yield (
            f"{path} = {value!r}" if type(value).__repr__ is not object.__repr__ else f"{path}: {type(value).__name__}"
        )


def describe_class(path: str, cls: type) -> Iterator[str]:
    bases = [base.__name__ for base in cls.__bases__ if base is not object and not base.__name__.startswith("_")]
    yield f"class {path}({', '.join(bases)})"
    constructor = next((vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)), None)
    if inspect.isfunction(constructor) and "Protocol" not in bases and cls.__name__ not in HANDLES:
        # Both twins share a constructor that is generic over what gives the engine.
        source = "AsyncEngineSource" if cls.__name__.startswith("Async") else "EngineSource"
        yield from (line.replace("EngineSourceT", source) for line in shown(path, constructor))
    for name, value in members(cls):
        yield from describe_member(f"{path}.{name}", value)


def describe(module_name: str) -> Iterator[str]:
    module = importlib.import_module(module_name)
    for name, value in exported(module).items():
        path = f"{module_name}.{name}"
        if isinstance(value, ModuleType):
            yield f"module {path}"
        elif inspect.isclass(value):
            yield from describe_class(path, value)
        elif inspect.isfunction(value):
            yield from shown(path, value)
        elif name != "__version__":
            yield f"{path} = {value!r}"


def directives() -> Iterator[tuple[str, object]]:
    """Yield what a migration calls on `op`, by name."""
    for name in vars(Directives):
        if not name.startswith("_"):
            yield name, getattr(Directives, name)


def describe_directives() -> Iterator[str]:
    for name, directive in directives():
        assert inspect.ismethod(directive), name
        signature = inspect.signature(directive)
        _, *parameters = (p.replace(annotation=_bare(p.annotation)) for p in signature.parameters.values())
        yield f"op.{name}{signature.replace(parameters=parameters, return_annotation=_bare(signature.return_annotation))}"


def listing() -> str:
    parts = [*map(describe, MODULES), describe_directives()]
    return "".join(f"{line}\n" for part in parts for line in (*part, "")).removesuffix("\n")


@every_row("module_name", MODULES)
def test_exports_are_sorted_and_complete(module_name: str) -> None:
    """`__all__` is sorted and leaves out nothing that the module offers."""
    module = importlib.import_module(module_name)
    assert list(module.__all__) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    own = {
        n
        for n, value in vars(module).items()
        if getattr(value, "__module__", None) == module_name and not isinstance(value, TypeVar)
    }
    assert {name for name in own if is_public(name)} <= set(module.__all__)


def test_the_front_door_shows_nothing_else() -> None:
    """`pgfence.<tab>` shows the names of `__all__` and the modules beneath, no other import."""
    beneath = {module.name for module in pkgutil.iter_modules(pgfence.__path__)}
    # pytest rewrites the assertions of a distribution that has a plugin, and adds names such as @py_builtins.
    shown = {name for name in vars(pgfence) if not name.startswith(("_", "@"))}
    assert shown - beneath - {"TYPE_CHECKING", "annotations"} <= set(pgfence.__all__)


@every_row("module_name", MODULES)
def test_every_public_name_is_documented(module_name: str) -> None:
    """Each exported class and function, and each of their public methods and properties, has a docstring."""
    without = []
    for name, value in exported(importlib.import_module(module_name)).items():
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        parts = [(name, value)]
        if inspect.isclass(value):
            parts += [(f"{name}.{n}", m) for n, m in members(value) if isinstance(m, property) or callable(m)]
        without += [n for n, part in parts if n.rpartition(".")[2] not in MAGIC and not inspect.getdoc(part)]
    assert without == []


def test_every_directive_of_op_is_documented() -> None:
    """Each `op.<name>` that a migration may call has a docstring."""
    assert [name for name, directive in directives() if not inspect.getdoc(directive)] == []


def test_no_public_function_returns_a_plain_awaitable() -> None:
    """A forgotten `await` is reported by type checkers only for a Coroutine, so nothing public returns an Awaitable."""
    assert [line for line in listing().splitlines() if "-> Awaitable" in line] == []


def test_signatures_are_those_of_the_listing() -> None:
    """A changed public signature changes `tests/public_api.txt` too, where a reviewer sees it."""
    assert listing() == LISTING.read_text(encoding="utf-8"), "python tests/test_public_surface.py --write"


def test_the_version_is_that_of_the_installed_package() -> None:
    """`pgfence.__version__` is read from the package's metadata, when asked."""
    from importlib.metadata import version

    assert pgfence.__version__ == version("pgfence")
    with pytest.raises(AttributeError):
        _ = pgfence.no_such_name


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    LISTING.write_text(listing(), encoding="utf-8")
