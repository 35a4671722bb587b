"""The error of a demo that cannot run."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot continue. The message says why and, if possible, what to do."""
