"""What a demo ends with when it cannot be played."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on; the message says why and, where there is one, the way out."""
