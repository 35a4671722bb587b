"""The error for a fault that cannot be injected."""

from __future__ import annotations


class FaultUnavailableError(RuntimeError):
    """The fault cannot be injected here. The message says which platform, program, setting or privilege is missing."""


FaultUnavailableError.__module__ = "pgfence.testing"
