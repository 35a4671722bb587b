"""The error of a fault that cannot be made."""

from __future__ import annotations


class FaultUnavailableError(RuntimeError):
    """The fault cannot be made here. The message says which platform, program, setting or privilege is missing."""


FaultUnavailableError.__module__ = "pgfence.testing"
