"""Limits inside the package that a test sets, so that it need not wait for them, or is not ended by them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def set_limit(monkeypatch: pytest.MonkeyPatch, limit: str, value: float) -> None:
    """Set a limit, by the name of its constant, in every module of the package that uses it.

    Raises:
        LookupError: no imported module has a constant of that name.
    """
    users = [module for name, module in sys.modules.items() if name.startswith("pgfence.") and limit in vars(module)]
    if not users:
        raise LookupError(f"no module of pgfence has a limit {limit}")
    for module in users:
        monkeypatch.setattr(module, limit, value)
