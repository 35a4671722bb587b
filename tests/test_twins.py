"""Twins: every `AsyncX` has the public names, parameters and defaults of its `X`, and awaits where it must."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, get_overloads

import pgfence
from support.rows import every_row

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS = [name for name in pgfence.__all__ if f"Async{name}" in pgfence.__all__]
# No input or output, so plain functions in both worlds.
PLAIN = {
    "abandon",
    "begin",
    "check",
    "connect",
    "hold",
    "join",
    "lead",
    "observe",
    "on_lost",
    "partition_for",
    "progress",
    "remaining",
    "stand",
    "wrap",
}
# Made by the locks alone: their constructors are no part of the surface.
HANDLES = {"FencedHeld", "Held", "HeldLease", "Member", "Permit", "Slot", "Term", "Worker", "WriteHeld"}
MAGIC = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__call__": "__call__"}


def twin_of(name: str) -> tuple[type, type]:
    return getattr(pgfence, name), getattr(pgfence, f"Async{name}")


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_") and hasattr(cls, name)}


def shape(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    """Return names, kinds and defaults of the parameters: what a caller writes."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def shapes(function: Callable[..., Any]) -> list[list[tuple[str, Any, Any]]]:
    return [shape(form) for form in (function, *get_overloads(function))]


def test_the_locks_and_handles_are_twins() -> None:
    """The pairs that the contract names are there, so that the tests below have something to hold."""
    assert {"AdvisoryLock", "Held", "TransactionLock"} <= set(PAIRS)


@every_row("name", PAIRS)
def test_twins_offer_the_same_names(name: str) -> None:
    """What one twin can do, the other can, under the same name; `with` becomes `async with`."""
    sync, asynchronous = twin_of(name)
    assert public(sync) == public(asynchronous)
    for plain, awaited in MAGIC.items():
        assert hasattr(sync, plain) == hasattr(asynchronous, awaited)


@every_row("name", PAIRS)
def test_twins_take_the_same_arguments(name: str) -> None:
    """Names, kinds and defaults of all parameters agree, in every overload."""
    sync, asynchronous = twin_of(name)
    constructor = [] if name in HANDLES else ["__init__"]
    for method in (*constructor, *sorted(public(sync))):
        left, right = getattr(sync, method), getattr(asynchronous, method)
        if callable(left):
            assert shapes(left) == shapes(right), method
        else:
            assert isinstance(left, property) == isinstance(right, property), method


@every_row("name", PAIRS)
def test_the_async_twin_awaits_what_may_wait(name: str) -> None:
    """Methods that talk to the server are coroutine functions in the async twin, and only there."""
    sync, asynchronous = twin_of(name)
    for method in sorted(public(sync)):
        if callable(getattr(sync, method)):
            assert not inspect.iscoroutinefunction(getattr(sync, method)), method
            assert inspect.iscoroutinefunction(getattr(asynchronous, method)) == (method not in PLAIN), method


@every_row("name", PAIRS)
def test_twins_are_both_documented(name: str) -> None:
    """The async twin documents its guarantees itself or refers to its twin."""
    assert all(cls.__doc__ for cls in twin_of(name))
