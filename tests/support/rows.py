"""One test over a table: it runs on every row and lists all rows on which it failed."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_FAILURES = (Exception, pytest.fail.Exception)


def every_row(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test once on all rows, which share its fixtures; with `parametrize` each row would be a separate test.

    Args:
        names: the arguments that a row gives, as for `pytest.mark.parametrize`.
        rows: a value for each name; a bare value if there is one name.
    """
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(rows)
    if not rows or any(isinstance(row, type(pytest.param())) for row in rows):
        raise ValueError("a table needs rows, and plain ones: no pytest.param")
    table = [dict(zip(listed, (row,) if len(listed) == 1 else row, strict=True)) for row in rows]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            failed = []
            for row in table:
                try:
                    test(**fixtures, **row)
                except _FAILURES as error:
                    failed.append((row, error))
            _report(failed, len(table))

        @functools.wraps(test)
        async def run_async(**fixtures: Any) -> None:
            failed = []
            for row in table:
                try:
                    await test(**fixtures, **row)
                except _FAILURES as error:
                    failed.append((row, error))
            _report(failed, len(table))

        wrapper: Any = run_async if inspect.iscoroutinefunction(test) else run
        signature = inspect.signature(test)
        fixtures = [parameter for name, parameter in signature.parameters.items() if name not in listed]
        wrapper.__signature__ = signature.replace(parameters=fixtures)
        return wrapper

    return decorate


def _report(failed: list[tuple[dict[str, Any], BaseException]], count: int) -> None:
    if failed:
        lines = [f"{', '.join(f'{key}={value!r}' for key, value in row.items())}: {error!r}" for row, error in failed]
        first = failed[0][1]
        raise AssertionError(f"{len(failed)} of {count} rows failed\n" + "\n".join(lines)) from first
